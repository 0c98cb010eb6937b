"""The training stages of a recipe as amounts of work: updates, tokens, FLOPs, looks at held-out text, saves."""

from dataclasses import dataclass
from math import ceil

import torch

from modicum.model import ModelConfig, training_flops_per_token
from modicum.recipe import Recipe, TrainSettings
from modicum.road.disk import saved_steps
from modicum.road.text import Text
from modicum.train import Wishes
from modicum.train.machine import COMPILE_PAYS_FLOPS, has_fast_bfloat16
from modicum.train.optimizer import Kind


@dataclass(frozen=True)
class TrainingWork:
    """One training stage. rows: of a micro-batch; length: tokens of a row; tokens: places in all updates together.

    heldout_tokens: read by all looks at held-out text together; saves: checkpoints written. ranks: processes that share
    each update; sharded: whether they share out weights, gradients and moments too. A micro-batch is one rank's.
    """

    stage: str
    steps: int
    batch_size: int
    rows: int
    length: int
    flops_per_token: int
    heldout_tokens: int
    saves: int
    wishes: Wishes
    optimizer: Kind = "adamw"
    ranks: int = 1
    sharded: bool = False

    @property
    def tokens(self) -> int:
        return self.steps * self.batch_size * self.length

    @property
    def flops(self) -> float:
        return float(self.tokens) * self.flops_per_token

    @property
    def share(self) -> int:
        """Rows of an update that one rank reads."""
        return self.batch_size // self.ranks

    @property
    def on_cuda(self) -> bool:
        """Whether it trains on a CUDA device: asked for, or left open where there is one."""
        return self.wishes.device in ("auto", "cuda") and torch.cuda.is_available()

    @property
    def number_bytes(self) -> int:
        """Of a number in its matrix products."""
        fast = has_fast_bfloat16("cuda" if self.on_cuda else "cpu")
        return 2 if self.wishes.dtype == "bfloat16" or (self.wishes.dtype == "auto" and fast) else 4

    @property
    def compiles(self) -> bool:
        """Whether the trainer will find that compiling pays, where it is left to it."""
        return self.flops >= COMPILE_PAYS_FLOPS


def training_works(recipe: Recipe, config: ModelConfig, text: Text, *, ranks: int = 1) -> list[TrainingWork]:
    """Pretraining, and fine-tuning where the recipe has it, whose number of updates follows from the conversations."""
    settings = recipe.pretrain
    heldout = settings.evaluate_tokens
    heldout = heldout if text.heldout_tokens is None else min(heldout, text.heldout_tokens)
    works = [_work("pretrain", settings, settings.steps, heldout, config, ranks)]
    if recipe.sft is not None and text.talk is not None:
        steps = ceil(recipe.sft.epochs * text.talk.rows / recipe.sft.batch_size)
        share = recipe.sft.heldout_fraction
        heldout = min(recipe.sft.evaluate_tokens, round(text.talk.tokens * share / (1 - share)))
        works.append(_work("sft", recipe.sft, steps, heldout, config, ranks))
    return works


def _work(
    stage: str, settings: TrainSettings, steps: int, heldout: int, config: ModelConfig, ranks: int
) -> TrainingWork:
    looks = -(-steps // settings.evaluate_every_steps)
    share = settings.batch_size // ranks
    return TrainingWork(
        stage=stage,
        steps=steps,
        batch_size=settings.batch_size,
        rows=min(settings.micro_batch_size or share, share),
        length=settings.sequence_length,
        flops_per_token=training_flops_per_token(config, settings.sequence_length),
        heldout_tokens=looks * heldout,
        saves=len(saved_steps(settings, steps)),
        wishes=Wishes(
            device=settings.device,
            dtype=settings.dtype,
            compile=settings.compile,
            threads=settings.threads,
            activation_checkpointing=settings.activation_checkpointing,
        ),
        optimizer=settings.optimizer,
        ranks=ranks,
        sharded=ranks > 1 and settings.parallel == "fsdp",
    )
