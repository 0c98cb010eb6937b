"""The batch that made a loss or gradient infinite or NaN, kept for the person who must find out why."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from modicum.data import Batch
from modicum.store import UserError
from modicum.train.update import Update


def refuse_offender(folder: Path, shares: Sequence[Batch], update: Update, *, step: int) -> UserError:
    """Write the batch of update `step` (1-based), put together from the ranks' shares, as .safetensors into the run's
    folder; returns the error to raise. Where there is no room for it, the error says so."""
    path = folder / f"not-finite-step-{step:08d}.safetensors"
    names = ("ids", "positions", "documents", "supervised")
    tensors = {name: torch.cat([getattr(share, name) for share in shares]) for name in names}
    try:
        save_file(tensors, path, metadata={"step": str(step)})
        kept = "this file holds its batch"
    except (SafetensorError, OSError) as error:
        path.unlink(missing_ok=True)
        kept = f"its batch could not be kept here ({error})"
    last = folder / "checkpoints" / "last"
    saved = f"the newest checkpoint before it is {last.resolve()}" if last.exists() else "no checkpoint came before it"
    return UserError(
        f"{path}: update {step} was not made, for its loss is {update.loss:.4g} and its gradient's norm "
        f"{update.gradient_norm:.4g}; {kept}, and {saved}. Go on with dtype float32, or start "
        "anew with a lower learning_rate"
    )
