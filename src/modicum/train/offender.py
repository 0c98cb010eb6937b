"""The batch that made a loss or gradient infinite or NaN, kept for the person who must find out why."""

from pathlib import Path

from safetensors.torch import save_file

from modicum.data import Batch
from modicum.store import UserError
from modicum.train.update import Update


def refuse_offender(folder: Path, batch: Batch, update: Update, *, step: int, last: Path | None) -> UserError:
    """Write the batch of update `step` (1-based) as .safetensors into `folder`; returns the error that says so."""
    path = folder / f"not-finite-step-{step:08d}.safetensors"
    tensors = {
        "ids": batch.ids,
        "positions": batch.positions,
        "documents": batch.documents,
        "supervised": batch.supervised,
    }
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"step": str(step)})
    saved = f"the weights before it are in {last}" if last else "no checkpoint had been written before it"
    return UserError(
        f"{path}: update {step} was not made: its loss is {update.loss:.4g} and its gradient's norm "
        f"{update.gradient_norm:.4g}, from the batch in this file; {saved}; lower learning_rate or clip_norm, or "
        "take dtype float32"
    )
