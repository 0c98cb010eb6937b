"""One run at work: update, log, evaluate, save; and its state, taken and put back."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from modicum.checkpoint import Checkpoint, TrainingState, mark_best, point, prune, save_checkpoint, step_folder
from modicum.data import Batch
from modicum.model import Decoder
from modicum.store import peak_memory_bytes
from modicum.tokenizer import Tokenizer
from modicum.train.compiler import compile_errors, mend_cache
from modicum.train.loss import SupervisedLoss
from modicum.train.machine import Choices
from modicum.train.metrics import MetricsFile
from modicum.train.offender import refuse_offender
from modicum.train.optimizer import Optimizer, OptimizerSettings
from modicum.train.plan import Batches, Heldout, Intervals, Progress, Say, TrainResult, due
from modicum.train.schedule import Schedule
from modicum.train.spikes import Spikes
from modicum.train.state import VERSION, random_states, restore_random_states
from modicum.train.stop import Interrupted, StopRequest
from modicum.train.update import Update, make_update
from modicum.train.window import Window


@dataclass
class Run:
    """Arguments as for `train`. `step` counts the updates made."""

    model: Decoder
    batches: Batches
    choices: Choices
    checkpoints: Path
    metrics: MetricsFile
    tokenizer: Tokenizer
    chat: bool
    identity: Mapping[str, Any]
    steps: int
    schedule: Schedule
    optimizer_settings: OptimizerSettings
    micro_batch_size: int
    heldout: Heldout | None
    intervals: Intervals
    progress: Progress
    say: Say

    def __post_init__(self) -> None:
        choices = self.choices
        self.model.activation_checkpointing = choices.activation_checkpointing
        self.optimizer = Optimizer(self.model, self.optimizer_settings)
        self.loss = SupervisedLoss(
            self.model, device=torch.device(choices.device), dtype=choices.torch_dtype, compiled=choices.compile
        )
        self._compiled = False
        self.step = 0
        self.tokens = 0
        self.seconds = 0.0
        self.totals = [[0, self.steps]]
        self.best: dict[str, Any] | None = None
        self.window = Window()
        self.spikes = Spikes()

    def go(self, stop: StopRequest) -> TrainResult:
        """Make the updates that are left. Raises Interrupted when a stop was asked for, after saving."""
        how = f"{self.choices.dtype}{', compiled' if self.choices.compile else ''}, {self.choices.threads} threads"
        self.say(f"training on {self.choices.device} ({how})")
        self.model.train()
        clock = time.monotonic()
        while self.step < self.steps:
            self._update()
            better = False
            if self.heldout is not None and due(self.step, self.intervals.evaluate, self.steps):
                better = self._evaluate(self.heldout)
            now = time.monotonic()
            self.seconds += now - clock
            clock = now
            if better or stop.wanted or due(self.step, self.intervals.checkpoint, self.steps):
                last = self.save()
                if stop.wanted:
                    where = f"after update {self.step} of {self.steps}, which is saved in {last}"
                    raise Interrupted(f"{where}; run the same command again to go on")
        self.model.eval()
        return self._result()

    def _update(self) -> None:
        start, waited = time.monotonic(), self.batches.wait_seconds
        batch = next(self.batches)
        waited = self.batches.wait_seconds - waited
        rate = self.schedule.rate(self.step, self.steps)
        update = self._make_update(batch, rate)
        if not update.finite:
            raise refuse_offender(self.checkpoints.parent, batch, update, step=self.step + 1)
        self.step += 1
        tokens = int((batch.documents >= 0).sum())
        self.tokens += tokens
        self.window.add(update, tokens=tokens, seconds=time.monotonic() - start, waited=waited)
        self._tell(update, rate)

    def _make_update(self, batch: Batch, rate: float) -> Update:
        def once() -> Update:
            return make_update(
                self.loss,
                self.optimizer,
                batch,
                micro_batch_size=self.micro_batch_size,
                rate=rate,
                clip_norm=self.optimizer_settings.clip_norm,
            )

        if self._compiled or not self.choices.compile:
            return once()
        # The first update is where code is made, from a cache in which a kill may have left a part of a library.
        before = random_states(self.choices.device)
        try:
            update = once()
        except compile_errors() as error:
            if not mend_cache(headers=True):
                raise
            self.say(
                f"compiling failed ({type(error).__name__}); cleared what a kill may have left in the compiler's cache"
            )
            self.optimizer.zero_grad()
            restore_random_states(before, self.choices.device, "memory")
            update = once()
        self._compiled = True
        return update

    def _tell(self, update: Update, rate: float) -> None:
        spike = self.spikes.observe(update.loss, update.gradient_norm)
        if spike is not None:
            self.metrics.write("spike", self.step, **spike)
        speed = self.window.record()["tokens_per_second"]
        self.progress(self.step, self.steps, f"loss {update.loss:.3f}, {speed:,.0f} tokens/s")
        # the first update holds the time that compiling took, which would spoil the line of the first ten
        if self.step == 1 or due(self.step, self.intervals.log, self.steps):
            memory = {"peak_memory_mb": peak_memory_bytes() // 10**6}
            if self.choices.device == "cuda":
                memory["device_memory_mb"] = torch.cuda.max_memory_allocated() // 10**6
            self.metrics.write(
                "train",
                self.step,
                learning_rate=rate,
                **self.window.record(),
                tokens=self.tokens,
                epochs=self.batches.epochs(self.step * self.batches.batch_size),
                **memory,
            )
            self.window = Window()

    def _evaluate(self, heldout: Heldout) -> bool:
        """Measure the held-out loss; whether it is the lowest so far."""
        start = time.monotonic()
        devices = [torch.cuda.current_device()] if self.choices.device == "cuda" else []
        with torch.random.fork_rng(devices):  # how often one evaluates must not change what is learnt
            loss, targets = self.loss.mean(heldout())
        better = isfinite(loss) and (self.best is None or loss < self.best["loss"])
        if better:
            self.best = {"step": self.step, "loss": loss}
        self.metrics.write(
            "heldout",
            self.step,
            loss=loss if isfinite(loss) else None,
            targets=targets,
            best=better,
            seconds=round(time.monotonic() - start, 3),
        )
        self.say(f"update {self.step}: held-out loss {loss:.4f} nats a token{', the best so far' if better else ''}")
        return better

    def save(self) -> Path:
        """Write a checkpoint of this step, move the links, prune."""
        self.metrics.sync()
        state = {
            "version": VERSION,
            "step": self.step,
            "totals": self.totals,
            "identity": self.identity,
            "choices": self.choices.plain(),
            "data": self.batches.state_dict(),
            "best": self.best,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "window": self.window.plain(),
            "spikes": self.spikes.state_dict(),
        }
        tensors = {**self.optimizer.moments(self.model), **random_states(self.choices.device)}
        folder = save_checkpoint(
            self.checkpoints,
            self.step,
            config=self.model.config,
            weights=self.model.state_dict(),
            tokenizer=self.tokenizer,
            chat=self.chat,
            training=TrainingState(tensors, state),
        )
        if self.best is not None and self.best["step"] == self.step:
            mark_best(self.checkpoints, folder)
        prune(self.checkpoints, keep_last=self.intervals.keep_last, keep_every_steps=self.intervals.keep_every)
        return folder

    def restore(self, checkpoint: Checkpoint) -> None:
        """Stand where the checkpoint stands."""
        assert checkpoint.training is not None
        state, tensors = checkpoint.training.state, checkpoint.training.tensors
        origin = checkpoint.path / "training"
        self.model.load_state_dict(checkpoint.weights)
        self.optimizer.restore_moments(self.model, tensors, origin / "optimizer.safetensors")
        restore_random_states(tensors, self.choices.device, origin / "optimizer.safetensors")
        self.batches.load_state_dict(state["data"])
        self.step = state["step"]
        self.tokens, self.seconds = state["tokens"], state["seconds"]
        self.window = Window(**state["window"])
        self.spikes.load_state_dict(state["spikes"])
        self.totals = state["totals"]
        self._restore_best(state["best"])
        # a kill between a checkpoint's rename and this move leaves `last` on the one before
        point(self.checkpoints / "last", checkpoint.path)
        self.say(f"going on after update {self.step} from {checkpoint.path}")
        if self.totals[-1][1] != self.steps:
            self.say(
                f"the run was to have {self.totals[-1][1]} updates and is now to have {self.steps}; its learning rate "
                "follows the new length from here on"
            )
            self.totals = [*self.totals, [self.step, self.steps]]

    def _restore_best(self, best: dict[str, Any] | None) -> None:
        """Point `best` at what it was at this step: a kill may have come before the link was moved, or after."""
        folder = None if best is None else step_folder(self.checkpoints, best["step"])
        if folder is not None and folder.is_dir():
            self.best = best
            mark_best(self.checkpoints, folder)
        else:
            (self.checkpoints / "best").unlink(missing_ok=True)

    def _result(self) -> TrainResult:
        best = None if self.best is None else step_folder(self.checkpoints, self.best["step"])
        return TrainResult(
            last=step_folder(self.checkpoints, self.step),
            best=best,
            best_heldout_loss=None if self.best is None else self.best["loss"],
            steps=self.step,
            tokens=self.tokens,
            seconds=self.seconds,
        )
