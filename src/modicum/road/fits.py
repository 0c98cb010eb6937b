"""A run that cannot fit into this machine is refused before it starts, with what would help."""

import os
from dataclasses import replace

import torch

from modicum.road.disk import Disk
from modicum.road.memory import Memory
from modicum.road.words import size
from modicum.road.works import TrainingWork
from modicum.store import UserError, free_memory, memory_limit


def least_memory(memory: Memory) -> Memory:
    """What a stage needs in any case: an estimate without the activations, which smaller micro-batches reduce."""
    return replace(memory, activations=0, logits=0)


def refuse_memory(memory: Memory, work: TrainingWork) -> None:
    """Raise UserError when a stage needs more memory than this machine has, with the mends that help."""
    limit = device_memory(work)
    if limit is None or memory.total <= limit:
        return
    held = memory.weights + memory.gradients + memory.optimizer
    mends = [f"a smaller model (weights, gradients and optimizer of this one take {size(held)})"]
    if memory.activations > memory.total / 10:
        if work.rows > 1:
            mends.insert(0, f"{work.stage}.micro_batch_size below {work.rows}")
        mends.insert(1, f"{work.stage}.sequence_length below {work.length}")
        if work.wishes.activation_checkpointing != "full":
            mends.insert(0, f"{work.stage}.activation_checkpointing: full")
    if work.ranks > 1 and not work.sharded:
        mends.append(f"{work.stage}.parallel: fsdp, which shares those out among the ranks")
    whose = "this machine has" if work.ranks == 1 else "each of the ranks has"
    raise UserError(
        f"{work.stage} needs about {size(memory.total)} of memory, and {whose} {size(limit)}; take "
        f"{', or '.join(mends)}"
    )


def refuse_disk(disk: Disk, free: int) -> None:
    """Raise UserError when the run's files do not fit on the disk."""
    if disk.total > free:
        raise UserError(
            f"the run needs about {size(disk.total)} of disk (checkpoints {size(disk.checkpoints)}, corpus and shards "
            f"{size(disk.corpus + disk.shards)}), and {size(free)} are free; keep fewer checkpoints (keep_last, "
            "keep_every_steps), make room, or set output to another disk"
        )


def free_device_memory(work: TrainingWork) -> int:
    """Bytes that are free where the stage works."""
    return torch.cuda.mem_get_info()[0] if work.on_cuda else free_memory()


def device_memory(work: TrainingWork) -> int | None:
    """Bytes that a rank of the stage has on its device; None where it cannot be asked."""
    if work.on_cuda:
        return torch.cuda.get_device_properties(0).total_memory
    if work.wishes.device == "mps" or (work.wishes.device == "auto" and torch.backends.mps.is_available()):
        return None
    return memory_limit() // (ranks_here() if work.ranks > 1 else 1)


def ranks_here() -> int:
    """Ranks that torchrun started on this machine; its processor's share its memory."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
