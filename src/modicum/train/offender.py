"""The batch that made a loss or gradient infinite or NaN, kept for the person who must find out why."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from modicum.data import Batch
from modicum.store import UserError
from modicum.train.update import Update


def refuse_offender(folder: Path, shares: Sequence[Batch], update: Update, *, step: int) -> UserError:
    """Write the batch of update `step` (1-based), put together from the ranks' shares, as .safetensors into the run's
    folder; returns the error to raise."""
    path = folder / f"not-finite-step-{step:08d}.safetensors"
    names = ("ids", "positions", "documents", "supervised")
    tensors = {name: torch.cat([getattr(share, name) for share in shares]) for name in names}
    save_file(tensors, path, metadata={"step": str(step)})
    last = folder / "checkpoints" / "last"
    saved = f"the newest checkpoint before it is {last.resolve()}" if last.exists() else "no checkpoint came before it"
    return UserError(
        f"{path}: update {step} was not made, for its loss is {update.loss:.4g} and its gradient's norm "
        f"{update.gradient_norm:.4g}; this file holds its batch, and {saved}. Go on with dtype float32, or start "
        "anew with a lower learning_rate"
    )
