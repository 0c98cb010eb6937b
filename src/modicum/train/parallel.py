"""PyTorch's engines for many ranks: DDP, a copy of the model on each, and FSDP2, its weights shared out.

Both take the mean of the ranks' gradients; whoever wants the sum scales the loss (train/update.py). DTensor is loaded
only where it is used.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from modicum.train.loss import SupervisedLoss
from modicum.train.ranks import Ranks

Parallel = Literal["ddp", "fsdp"]


def spread(loss: SupervisedLoss, parallel: Parallel, ranks: Ranks) -> nn.Module:
    """The loss as all ranks compute it together; `loss` itself where there is one process.

    The loss is wrapped and not the decoder, so that the head's weight is used inside of a forward pass. Under "fsdp"
    its weights are sharded in place: each layer for itself, and embedding, last norm and head in one group, since a
    tied head is the embedding. Compiled layers stay compiled: the engine's hooks lie around them.
    """
    if ranks.group is None:
        return loss
    if parallel == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(loss.device.type, (ranks.world_size,))
        for layer in loss.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(loss, mesh=mesh)
        return loss
    # It would cut compiled code where a bucket of gradients ends; ours is compiled by the layer, which is cut enough.
    torch._dynamo.config.optimize_ddp = False
    # the buffers are constants; releases of PyTorch name the setting that leaves them alone differently
    names = signature(DistributedDataParallel).parameters
    unsent: dict[str, Any] = {
        "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False,
    }
    return DistributedDataParallel(loss, gradient_as_bucket_view=True, **unsent)


def exchanging(engine: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
    """Inside, a forward and backward pass of one micro-batch. DDP's gradients meet only in the `last` of an update;
    FSDP2's in each, for between them no rank could hold them all."""
    held_back = isinstance(engine, DistributedDataParallel) and not last
    return engine.no_sync() if held_back else nullcontext()  # type: ignore[operator]


def reshard(loss: SupervisedLoss) -> None:
    """Let go of the weights that a forward pass without a backward pass has gathered."""
    sharded: Any = loss
    if hasattr(sharded, "reshard"):
        sharded.reshard()


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """The full tensor, on every rank. All ranks call this."""
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor
    full: Tensor = sharded.full_tensor()
    return full


def gathered(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """The full tensors on the first rank, sharded ones moved to the CPU; none on the others. All ranks call this."""
    found = {}
    for name, tensor in tensors.items():
        full = whole(tensor)
        if ranks.is_first:
            found[name] = full.detach().cpu() if is_sharded(tensor) else full
    return found


def sharded_like(full: Tensor, weight: Tensor) -> Tensor:
    """This rank's part of a full tensor that all ranks have, sharded as `weight` is; a plain copy of it where that is
    whole. float32, on weight's device."""
    moved = full.to(weight.device, torch.float32, copy=True)
    if not is_sharded(weight):
        return moved
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(moved, weight.device_mesh, weight.placements, src_data_rank=None)  # type: ignore[attr-defined]
