"""A run that cannot fit into this machine is refused before it starts, with what would help."""

from dataclasses import replace

import torch

from modicum.road.disk import Disk
from modicum.road.memory import Memory
from modicum.road.words import size
from modicum.road.works import TrainingWork
from modicum.store import UserError, memory_limit


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
    raise UserError(
        f"{work.stage} needs about {size(memory.total)} of memory, and this machine has {size(limit)}; take "
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


def device_memory(work: TrainingWork) -> int | None:
    """Bytes that the stage's device has; None where it cannot be asked."""
    if work.wishes.device in ("auto", "cuda") and torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    if work.wishes.device == "mps" or (work.wishes.device == "auto" and torch.backends.mps.is_available()):
        return None
    return memory_limit()
