"""Training, for pretraining and fine-tuning alike: begin, or go on exactly where the folder's newest checkpoint stands.

What the batches hold and what the settings mean is others' affair.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from modicum.checkpoint import Checkpoint, load_checkpoint, newest
from modicum.model import Decoder, training_flops_per_token
from modicum.store import UserError, remove_leftovers
from modicum.tokenizer import Tokenizer
from modicum.train.allocator import keep_freed_memory
from modicum.train.attention import AttentionShape
from modicum.train.machine import Choices, Wishes, choose, prepared
from modicum.train.metrics import MetricsFile
from modicum.train.optimizer import OptimizerSettings
from modicum.train.plan import Batches, Heldout, Intervals, Progress, Say, TrainResult, silent
from modicum.train.ranks import ALONE, Ranks, check_device
from modicum.train.run import Run
from modicum.train.schedule import Schedule
from modicum.train.state import KEYS, VERSION, check_identity
from modicum.train.stop import StopRequest


def train(
    model: Decoder,
    batches: Batches,
    *,
    out: Path,
    tokenizer: Tokenizer,
    chat: bool,
    identity: Mapping[str, Any],
    steps: int,
    seed: int,
    schedule: Schedule,
    optimizer: OptimizerSettings,
    micro_batch_size: int | None = None,
    heldout: Heldout | None = None,
    intervals: Intervals = Intervals(),  # noqa: B008 (immutable)
    wishes: Wishes = Wishes(),  # noqa: B008
    progress: Progress = silent,
    say: Say = silent,
    ranks: Ranks = ALONE,
) -> TrainResult:
    """Bring the training in `out` to `steps` updates; leaves metrics.jsonl and checkpoints/ there.

    model: with the weights to begin from; it is moved to the device and changed in place. When `out` holds a whole
    checkpoint the run goes on from the newest, bit for bit as if it had not stopped; `identity` (JSON data) must be as
    it was. With more `steps` than before the schedule follows the new length from there on. heldout: gives the batches
    of the held-out loss, the same ones at each call. chat: whether the checkpoints end an answer at the end of a turn.
    progress(done, total, text) is called after each update, say(line) for what should stay.

    ranks: the processes that train together, all of which call this with equal arguments but for their share of the
    batches. The first one writes and speaks. Their number may change from one part of a run to the next.

    Raises UserError for a changed identity, fewer steps than were made, too little data, a device whose memory runs
    out, and a loss or gradient that is not finite (weights on disk are from before it); Interrupted after SIGINT or
    SIGTERM, when all is saved.
    """
    checkpoints = out / "checkpoints"
    if not ranks.is_first:
        progress = say = silent

    def begin() -> tuple[Path | None, dict[str, Any] | None, Choices]:
        remove_leftovers(checkpoints)
        folder = newest(checkpoints)
        before = None if folder is None else _checked(load_checkpoint(folder, verify=False), model, identity, steps)
        batches.check(steps * batches.batch_size)
        rows, length = _size(batches)
        tokens = rows * length * steps * ranks.world_size
        choices = choose(
            wishes,
            flops=0.0 if before else float(tokens) * training_flops_per_token(model.config, length),
            earlier=before["choices"] if before else None,
            say=say,
            ranks=ranks,
            shape=AttentionShape.of(model.config, length),
            micro_batch_size=min(micro_batch_size or rows, rows),
        )
        return folder, before, choices

    folder, before, choices = ranks.by_first(begin)
    check_device(ranks, choices.device)
    checkpoint = None if folder is None else load_checkpoint(folder, verify=False)
    if checkpoint is not None:
        model.load_state_dict(checkpoint.weights)
    if choices.device == "cpu":
        keep_freed_memory()
    metrics_path = out / "metrics.jsonl" if ranks.is_first else None
    try:
        model.to(choices.device)
        with (
            prepared(choices),
            StopRequest(say) as stop,
            MetricsFile(metrics_path, step=before["step"] if before else 0) as metrics,
        ):
            run = Run(
                model,
                batches,
                choices=choices,
                checkpoints=checkpoints,
                metrics=metrics,
                tokenizer=tokenizer,
                chat=chat,
                identity=identity,
                steps=steps,
                schedule=schedule,
                optimizer_settings=optimizer,
                micro_batch_size=micro_batch_size or batches.batch_size,
                heldout=heldout,
                intervals=intervals,
                progress=progress,
                say=say,
                ranks=ranks,
            )
            if checkpoint is None or ranks.rank:
                # Each rank drops other units. One that the run did not have before begins at this step.
                torch.manual_seed(_seed(seed, ranks.rank, before["step"] if before else 0))
            if checkpoint is not None:
                run.restore(checkpoint)
            del checkpoint  # its tensors are the run's now
            try:
                return run.go(stop)
            finally:
                run.loss.close()
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"the memory of the device ran out ({str(error).splitlines()[0]}); set a smaller micro_batch_size, or "
            "activation_checkpointing: full, and run the same command again: it goes on from its newest checkpoint, "
            "where there is one"
        ) from error
    finally:
        batches.close()


def _checked(checkpoint: Checkpoint, model: Decoder, identity: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """The training state of the checkpoint to go on from, when this run may."""
    path = checkpoint.path
    if checkpoint.training is None:
        raise UserError(f"{path}: has no training part, so training cannot go on from it; start another run")
    state = checkpoint.training.state
    if state.get("version") != VERSION or not state.keys() >= KEYS:
        raise UserError(f"{path / 'training/state.json'}: not written by this version of modicum; start the run anew")
    check_identity(state["identity"], identity, path)
    if checkpoint.config != model.config:
        raise UserError(f"{path / 'config.json'}: describes another model; start a run under another name")
    if state["step"] > steps:
        raise UserError(
            f"{path}: {state['step']} updates were made, and the run is now to have {steps}; ask for at least as many"
        )
    return state


def _seed(seed: int, rank: int, step: int) -> int:
    """The first rank's is the run's, as in one process."""
    if not rank:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}/{rank}/{step}".encode("ascii")).digest()[:4], "big")


def _size(batches: Batches) -> tuple[int, int]:
    """Rows, and the inputs of a row, that an update reads. The batch that is looked at is handed out again."""
    state = batches.state_dict()
    rows, length = next(batches).documents.shape
    batches.load_state_dict(state)
    return rows, length
