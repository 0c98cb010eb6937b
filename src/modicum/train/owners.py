"""Sharded matrices for an optimizer that needs them whole: each is whole on one rank, its owner.

Muon orthogonalises a matrix; on shards it would do something else. So gradients travel to the owners, which move their
matrices, and the moved rows travel back: two exchanges an update, of as many numbers as the matrices have.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from modicum.train.parallel import whole


class Owners:
    """`weights`: matrices sharded by rows over one group, alike on all ranks. All ranks call each method.

    mine: the whole matrices that this rank owns, as parameters for its own optimizer; none where there are more ranks
    than matrices. whole_of: the same by the id of the sharded weight, None for what another rank owns.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights: list[Any] = list(weights)
        mesh = self.weights[0].device_mesh
        self._group = mesh.get_group()
        self._rank, self._world = mesh.get_local_rank(), mesh.size()
        owners = shared_out([tuple(weight.shape) for weight in weights], self._world)
        self._owned = [[i for i, owner in enumerate(owners) if owner == rank] for rank in range(self._world)]
        # gathered by all, one after the other, and kept by the owner
        self.whole_of: dict[int, nn.Parameter | None] = {}
        for weight, owner in zip(weights, owners, strict=True):
            full = whole(weight.detach())
            self.whole_of[id(weight)] = nn.Parameter(full) if owner == self._rank else None
        self.mine = [matrix for matrix in self.whole_of.values() if matrix is not None]

    def collect_gradients(self) -> None:
        """Give each of `mine` the whole gradient of its sharded weight."""
        parts = [weight.grad.to_local() for weight in self.weights]
        sent = [torch.cat([parts[i].flatten() for i in owned] or [parts[0].new_empty(0)]) for owned in self._owned]
        shapes = [self.weights[i].shape for i in self._owned[self._rank]]
        rows = [rows_of_ranks(shape[0], self._world) for shape in shapes]
        sizes = [
            [count[rank] * shape[1] for count, shape in zip(rows, shapes, strict=True)] for rank in range(self._world)
        ]
        received = self._exchange(sent, [sum(of_rank) for of_rank in sizes])
        pieces = [torch.split(flat, of_rank) for flat, of_rank in zip(received, sizes, strict=True)]
        for place, (parameter, shape) in enumerate(zip(self.mine, shapes, strict=True)):
            parameter.grad = torch.cat([of_rank[place] for of_rank in pieces]).view(shape)

    def shards(self, wholes: Sequence[Tensor], columns: int | None = None) -> list[Tensor]:
        """Tensors like `mine`, one for each, as this rank's rows of all the matrices, in the order of the weights.
        columns: of the tensors, where they differ from the matrices'."""
        cuts = [torch.split(full, rows_of_ranks(full.shape[0], self._world)) for full in wholes]
        device = self.weights[0].device
        sent = [
            torch.cat([cut[rank].flatten() for cut in cuts] or [torch.empty(0, device=device)])
            for rank in range(self._world)
        ]
        local = [weight.to_local() for weight in self.weights]
        shapes = [(part.shape[0], columns or part.shape[1]) for part in local]
        sizes = [[shapes[i][0] * shapes[i][1] for i in owned] for owned in self._owned]
        received = self._exchange(sent, [sum(of_rank) for of_rank in sizes])
        found: list[Tensor] = list(local)
        for owned, flat, of_rank in zip(self._owned, received, sizes, strict=True):
            for i, part in zip(owned, torch.split(flat, of_rank), strict=True):
                found[i] = part.view(shapes[i])
        return found

    @torch.no_grad()
    def hand_out(self) -> None:
        """Put the rows of `mine` into the sharded weights."""
        for weight, part in zip(self.weights, self.shards([full.detach() for full in self.mine]), strict=True):
            weight.to_local().copy_(part)

    def as_sharded(self, wholes: Sequence[Tensor], columns: int | None = None) -> list[Tensor]:
        """Like `shards`, but each as a whole that is sharded as its weight is."""
        from torch.distributed.tensor import DTensor

        return [
            DTensor.from_local(
                part,
                weight.device_mesh,
                weight.placements,
                shape=torch.Size((weight.shape[0], part.shape[1])),
                stride=(part.shape[1], 1),
            )
            for part, weight in zip(self.shards(wholes, columns), self.weights, strict=True)
        ]

    def _exchange(self, sent: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Send the r-th tensor to rank r; what came from each rank, `sizes` numbers long."""
        flat = torch.cat(list(sent))
        received = flat.new_empty(sum(sizes))
        dist.all_to_all_single(received, flat, list(sizes), [part.numel() for part in sent], group=self._group)
        return list(torch.split(received, list(sizes)))


def shared_out(shapes: Sequence[tuple[int, ...]], ranks: int) -> list[int]:
    """The owner of each matrix: the largest first, each to the rank with the least work so far."""
    work, owners = [0] * ranks, [0] * len(shapes)
    # products of the orthogonalisation: the shorter side squared times the longer one
    costs = [min(rows, columns) * rows * columns for rows, columns in shapes]
    for i in sorted(range(len(shapes)), key=lambda i: -costs[i]):
        owners[i] = work.index(min(work))
        work[owners[i]] += costs[i]
    return owners


def rows_of_ranks(rows: int, ranks: int) -> list[int]:
    """How many rows each rank holds, as FSDP2 cuts a tensor: equal chunks, and less or nothing at the end."""
    chunk = -(-rows // ranks)
    return [max(0, min(chunk, rows - rank * chunk)) for rank in range(ranks)]
