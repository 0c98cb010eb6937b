"""The processes that train one model together, as torchrun starts them: which of them this is, and how all agree.

What decides how the work goes on (a stop, a loss that is not finite, where to begin) is agreed by all ranks on the CPU,
over a connection of its own that waits as long as the first rank works. The first rank alone writes files and speaks.
"""

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from modicum.store import UserError
from modicum.train.rendezvous import meet
from modicum.train.stop import Interrupted

T = TypeVar("T")

# How gloo and nccl say that a process at the other end is no more. Their other errors (a timeout, a full /dev/shm, a
# fault on the device) are faults to look at, not ranks to wait for.
_LOST = ("closed by peer", "reset by peer", "broken pipe", "remote process exited")

# The others wait while the first rank reads a corpus; that one of them has died shows by its closed connection.
_PATIENCE = timedelta(days=30)


@dataclass(eq=False)
class Ranks:
    """This process among `world_size`; without a `group` it is alone, and every method returns what it was given.

    It has one inside of `joined` only. Each method is a meeting: all ranks call it, in the same order, or all of them
    hang. Numbers travel as float64.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    group: Any = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Each value summed over all ranks; the same bits on each of them."""
        if self.group is None:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.group)
        found: list[float] = total.tolist()
        return found

    def any(self, flag: bool) -> bool:
        """Whether the flag is up on one rank at least."""
        return self.sum(float(flag))[0] > 0

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order, on the first rank; none on the others."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.world_size if self.is_first else []
        dist.gather_object(value, values if self.is_first else None, dst=0, group=self.group)
        return values

    def by_first(self, work: Callable[[], T]) -> T:
        """The result of `work`, which the first rank does while the others wait for it.

        Where it fails, the first rank raises its error, and the others end without a word of their own.
        """
        if self.group is None:
            return work()
        answer: list[Any] = [False, None]
        if self.is_first:
            try:
                answer[1] = work()
            except BaseException:
                dist.broadcast_object_list([True, None], src=0, group=self.group)
                raise
        dist.broadcast_object_list(answer, src=0, group=self.group)
        if answer[0]:
            self._leave()
        result: T = answer[1]
        return result

    def refuse(self, error: BaseException) -> NoReturn:
        """Raise the error, of which all ranks know, on the first one; the others end without a word."""
        if not self.is_first:
            self._leave()
        raise error

    def shares(self, items: Iterable[T]) -> Iterator[tuple[T, bool]]:
        """This rank's items of those that all ranks have, and whether each counts: as many on every rank.

        In the last round a rank may be left without an item; it gets one that another rank counts.
        """
        left = iter(items)
        while taken := list(islice(left, self.world_size)):
            counts = self.rank < len(taken)
            yield taken[self.rank if counts else 0], counts

    def _leave(self) -> NoReturn:
        with suppress(RuntimeError):
            # Ends when the first rank has ended. Whoever ended before it would have torchrun stop it in mid-sentence.
            dist.barrier(group=self.group)
        raise SystemExit(1)


ALONE = Ranks()


@contextmanager
def joined() -> Iterator[Ranks]:
    """The ranks that torchrun has started, connected inside the block; ALONE in any other process.

    Raises Interrupted when another rank has been lost.
    """
    if not dist.is_torchelastic_launched():
        yield ALONE
        return
    local = int(os.environ["LOCAL_RANK"])
    if local < torch.cuda.device_count():
        torch.cuda.set_device(local)
    store, rank, world_size = meet()
    # gloo for what lies on a CPU, nccl for what lies on CUDA devices
    dist.init_process_group(store=store, rank=rank, world_size=world_size)
    control: Any = dist.new_group(backend="gloo", timeout=_PATIENCE)
    ranks = Ranks(rank, world_size, local, control)
    try:
        yield ranks
        # Together, and not after an error: a closed connection ends the ranks that still listen.
        dist.barrier(group=control)
    except RuntimeError as error:
        if not _is_lost_connection(error):
            raise
        raise Interrupted(
            "another rank has ended; the run goes on from its newest checkpoint when it is started again, as "
            f"`torchrun --max-restarts` does by itself ({str(error).splitlines()[0]})"
        ) from error
    ranks.group = control = None
    gc.collect()  # engines hold the connections too, in circles
    dist.destroy_process_group()


def check_device(ranks: Ranks, device: str) -> None:
    """Raise UserError where this machine has more ranks than GPUs to train on."""
    if device == "cuda" and ranks.group is not None and ranks.local_rank >= torch.cuda.device_count():
        raise UserError(
            f"device cuda: torchrun has started more ranks here than the {torch.cuda.device_count()} GPUs; lower "
            "--nproc-per-node"
        )
    if device == "mps" and ranks.world_size > 1:
        raise UserError("device mps: it cannot be shared by ranks; start one process, or take device cpu")


def _is_lost_connection(error: RuntimeError) -> bool:
    words = str(error).lower()
    return isinstance(error, dist.DistNetworkError) or any(lost in words for lost in _LOST)
