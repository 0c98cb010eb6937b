"""Everything the doctor looks at, for a recipe, a checkpoint, or neither."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from modicum.checkpoint import load_checkpoint
from modicum.corpus import read_conversations
from modicum.doctor.arithmetic import probe_all
from modicum.doctor.chat import MarkedConversation, mask_boundaries
from modicum.doctor.files import check_files
from modicum.doctor.finding import Finding, exit_status
from modicum.doctor.learning import NANO, overfit, untrained_loss
from modicum.doctor.machine import device_here, examine_machine
from modicum.model import Decoder, ModelConfig
from modicum.recipe import Recipe, load_recipe
from modicum.road.prepare import template_text
from modicum.road.start import check_start, model_config
from modicum.store import UserError, free_memory
from modicum.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

# A probe holds a model's fp32 weights and little more; it should not crowd out what else runs here.
_MEMORY_SHARE = 0.5


@dataclass
class Examination:
    """findings in the order in which they were made; conversations: some of the user's own, with what is supervised."""

    findings: list[Finding] = field(default_factory=list)
    conversations: list[MarkedConversation] = field(default_factory=list)

    def add(self, item: Finding | MarkedConversation) -> None:
        """Take in what `examine` yields."""
        if isinstance(item, Finding):
            self.findings.append(item)
        else:
            self.conversations.append(item)

    @property
    def exit_status(self) -> int:
        return exit_status(self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: every finding, the marked conversations, the exit status."""
        return {**asdict(self), "exit_status": self.exit_status}


def examine(target: Path | None = None) -> Iterator[Finding | MarkedConversation]:
    """Yield findings as they are made. target: a recipe's file, a checkpoint's folder, or None for the machine alone.

    Raises UserError for a target that is neither; what is wrong inside of it is a finding.
    """
    if target is None:
        yield from examine_machine(Path())
        yield from arithmetic(NANO)
    elif target.is_dir():
        yield from examine_machine(target)
        yield from examine_checkpoint(target)
    else:
        recipe = load_recipe(target)
        yield from examine_machine(recipe.output)
        yield from examine_recipe(recipe)


def examined(target: Path | None = None) -> Examination:
    """All of `examine`, collected."""
    found = Examination()
    for item in examine(target):
        found.add(item)
    return found


def arithmetic(config: ModelConfig) -> Iterator[Finding]:
    """The probes of a fresh model of this shape, and those of the loss."""
    device = device_here()
    if _crowds(config):
        detail = "the recipe's model is too large to be probed beside what runs here; a tiny one takes its place"
        yield Finding("model", "told", detail)
        config = NANO
    yield from probe_all(Decoder(config).to(device))
    yield untrained_loss(config, device)
    yield overfit(device)


def examine_checkpoint(path: Path) -> Iterator[Finding]:
    """The folder's files, and the probes of the model in it when they can be loaded and it fits into memory."""
    findings = check_files(path)
    yield from findings
    if any(finding.outcome == "failed" for finding in findings):
        yield Finding("model", "told", "not probed, because the files are not in order")
        return
    checkpoint = load_checkpoint(path, verify=False)
    if _crowds(checkpoint.config):
        yield Finding("model", "told", "not probed, because it is too large beside what runs here")
        return
    # rounded activations may fall to either side of a step, which would hide what the probes look for
    yield from probe_all(checkpoint.model(device=device_here(), widened=True))


def _crowds(config: ModelConfig) -> bool:
    """Whether a model of this shape, in float32, takes more than its share of the memory that is free."""
    return 4 * config.parameter_count() > _MEMORY_SHARE * free_memory()


def examine_recipe(recipe: Recipe) -> Iterator[Finding | MarkedConversation]:
    """The probes of the recipe's own model, its conversations, and the newest checkpoints of its run."""
    check_start(recipe)
    tokenizer = tokenizer_of(recipe)
    ids = tokenizer.vocab_size if tokenizer else recipe.tokenizer.vocab_size or recipe.model.vocab_size
    yield from arithmetic(model_config(recipe, ids))
    if recipe.sft is not None and recipe.sft.data:
        own_template = recipe.chat.template is not None
        template = template_text(recipe.chat.template) if recipe.chat.template else None
        finding, shown = _conversations(recipe.sft.data, tokenizer, template, own_template=own_template)
        yield finding
        yield from shown
    for stage in ("pretrain", "sft"):
        last = recipe.run_folder / stage / "checkpoints" / "last"
        if last.exists():
            for found in check_files(last):
                yield Finding(f"{stage}: {found.name}", found.outcome, found.detail, found.yours)


def tokenizer_of(recipe: Recipe) -> Tokenizer | None:
    """The run's tokenizer, else the one that the recipe takes over or loads; None where one is still to be trained."""
    made = recipe.run_folder / "tokenizer" / "files"
    template = template_text(recipe.chat.template) if recipe.chat.template else None
    if made.is_dir():
        tokenizer = load_tokenizer(made, missing="keep")  # the next run gives it the recipe's template
        return tokenizer if template is None else tokenizer.with_template(template)
    if recipe.model.checkpoint is not None:
        return load_tokenizer(recipe.model.checkpoint, template=template, missing="keep")
    if recipe.tokenizer.path is not None:
        return load_tokenizer(recipe.tokenizer.path, template=template, missing=recipe.tokenizer.missing_special_tokens)
    return None


def _conversations(
    paths: list[Path], tokenizer: Tokenizer | None, template: str | None, *, own_template: bool
) -> tuple[Finding, list[MarkedConversation]]:
    """mask_boundaries, with a small tokenizer trained on the conversations themselves where the run has none yet."""
    try:
        return mask_boundaries(paths, tokenizer or stand_in(paths, template), own_template=own_template)
    except UserError as error:
        detail = "; ".join(str(error).splitlines())
        return Finding("supervised tokens", "failed", detail, yours=True), []


def stand_in(paths: list[Path], template: str | None) -> Tokenizer:
    """A tokenizer of 512 ids for a look at the masks, whose borders do not depend on the merges; with the template."""
    turns = (message["content"] for path in paths for talk in read_conversations(path) for message in talk.messages)
    trained, _ = train_tokenizer(turns, vocab_size=512, min_frequency=1, sample_bytes=10**6, seed=0)
    if template is None:
        return trained
    with TemporaryDirectory() as folder:
        trained.save(Path(folder))
        return load_tokenizer(Path(folder), template=template)
