"""One run at work: update, log, evaluate, save; and its state, taken and put back."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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
from modicum.train.parallel import gathered, reshard, spread
from modicum.train.plan import Batches, Heldout, Intervals, Progress, Say, TrainResult, due
from modicum.train.ranks import Ranks
from modicum.train.schedule import Schedule
from modicum.train.spikes import Spikes
from modicum.train.state import VERSION, random_names, random_states, restore_random_states
from modicum.train.stop import Interrupted, StopRequest
from modicum.train.update import Update, make_update
from modicum.train.window import Window


@dataclass
class Run:
    """Arguments as for `train`. `step` counts the updates made.

    Of many ranks each has such a run, with its share of the batches; all of them make the same decisions.
    """

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
    ranks: Ranks

    def __post_init__(self) -> None:
        choices = self.choices
        self.model.activation_checkpointing = choices.activation_checkpointing
        self.model.attention_block = choices.attention_block
        self.loss = SupervisedLoss(
            self.model, device=torch.device(choices.device), dtype=choices.torch_dtype, compiled=choices.compile
        )
        self.engine: nn.Module = spread(self.loss, choices.parallel or "ddp", self.ranks)
        self.optimizer = Optimizer(self.model, self.optimizer_settings, self.choices.torch_dtype)
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
        if self.choices.parallel is not None:
            how += f" on each of {self.choices.ranks} ranks, {self.choices.parallel}"
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
            stopping = self.ranks.any(stop.wanted)
            if better or stopping or due(self.step, self.intervals.checkpoint, self.steps):
                last = self.save()
                if stopping:
                    where = f"after update {self.step} of {self.steps}, which is saved in {last}"
                    self.ranks.refuse(Interrupted(f"{where}; run the same command again to go on"))
        if self.ranks.any(stop.wanted):  # asked for while the last checkpoint was written
            made = f"all {self.steps} updates are made and saved"
            self.ranks.refuse(Interrupted(f"{made}; run the same command again to go on with what follows"))
        self.model.eval()
        return self._result()

    def _update(self) -> None:
        start, waited = time.monotonic(), self.batches.wait_seconds
        batch = next(self.batches)
        waited = self.batches.wait_seconds - waited
        rate = self.schedule.rate(self.step, self.steps)
        update = self._make_update(batch, rate)
        if not update.finite:
            shares, folder = self.ranks.gather(batch), self.checkpoints.parent
            self.ranks.refuse(self.ranks.by_first(lambda: refuse_offender(folder, shares, update, step=self.step + 1)))
        self.step += 1
        self.tokens += update.tokens
        self.window.add(update, seconds=time.monotonic() - start, waited=waited)
        self._tell(update, rate)

    def _make_update(self, batch: Batch, rate: float) -> Update:
        def once() -> Update:
            return make_update(
                self.engine,
                self.optimizer,
                batch,
                micro_batch_size=self.micro_batch_size,
                rate=rate,
                clip_norm=self.optimizer_settings.clip_norm,
                ranks=self.ranks,
            )

        if self._compiled or not self.choices.compile:
            return once()
        # The first update is where code is made, from a cache in which a kill may have left a part of a library.
        before = random_states(self.choices.device)
        try:
            update = once()
        except compile_errors() as error:
            # another rank may be in the midst of this update: all must begin anew, which is torchrun's affair
            if not mend_cache(headers=True) or self.ranks.world_size > 1:
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
            loss, targets = self.loss.mean(heldout(), self.ranks)
        reshard(self.loss)
        if self.best is not None and self.best.get("targets", targets) != targets:
            self.say(f"the held-out text has {targets:,} tokens now and is another one, so the best is looked for anew")
            self.best = None
        better = isfinite(loss) and (self.best is None or loss < self.best["loss"])
        if better:
            self.best = {"step": self.step, "loss": loss, "targets": targets}
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
        """Write a checkpoint of this step, move the links, prune. All ranks call this, and wait until it is done."""
        own = random_names(random_states(self.choices.device), self.ranks.rank)
        random = {name: state for states in self.ranks.gather(own) for name, state in states.items()}
        moments = gathered(self.optimizer.moments(self.model), self.ranks)
        weights = gathered(self.model.state_dict(), self.ranks)
        return self.ranks.by_first(lambda: self._write(weights, {**moments, **random}))

    def _write(self, weights: dict[str, Tensor], tensors: dict[str, Tensor]) -> Path:
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
        folder = save_checkpoint(
            self.checkpoints,
            self.step,
            config=self.model.config,
            weights=weights,
            tokenizer=self.tokenizer,
            chat=self.chat,
            training=TrainingState(tensors, state),
        )
        if self.best is not None and self.best["step"] == self.step:
            mark_best(self.checkpoints, folder)
        prune(self.checkpoints, keep_last=self.intervals.keep_last, keep_every_steps=self.intervals.keep_every)
        return folder

    def restore(self, checkpoint: Checkpoint) -> None:
        """Stand where the checkpoint stands, whose weights the model has already."""
        assert checkpoint.training is not None
        state, tensors = checkpoint.training.state, checkpoint.training.tensors
        origin = checkpoint.path / "training"
        self.optimizer.restore_moments(self.model, tensors, origin / "optimizer.safetensors")
        restore_random_states(tensors, self.choices.device, origin / "optimizer.safetensors", self.ranks.rank)
        self.batches.load_state_dict(state["data"])
        self.step = state["step"]
        self.tokens, self.seconds = state["tokens"], state["seconds"]
        self.window = Window(**state["window"])
        self.spikes.load_state_dict(state["spikes"])
        self.totals = state["totals"]
        self.best = self.ranks.by_first(lambda: self._restore_links(state["best"], checkpoint.path))
        self.say(f"going on after update {self.step} from {checkpoint.path}")
        if self.totals[-1][1] != self.steps:
            self.say(
                f"the run was to have {self.totals[-1][1]} updates and is now to have {self.steps}; its learning rate "
                "follows the new length from here on"
            )
            self.totals = [*self.totals, [self.step, self.steps]]

    def _restore_links(self, best: dict[str, Any] | None, last: Path) -> dict[str, Any] | None:
        """Point `last` and `best` at what they were at this step: a kill may have come before one was moved, or after.
        Returns the best that is there."""
        point(self.checkpoints / "last", last)
        folder = None if best is None else step_folder(self.checkpoints, best["step"])
        if folder is not None and folder.is_dir():
            mark_best(self.checkpoints, folder)
            return best
        (self.checkpoints / "best").unlink(missing_ok=True)
        return None

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
