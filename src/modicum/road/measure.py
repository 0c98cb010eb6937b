"""The evaluate stage: every figure of the report, for the model before, base and chat model, in results.json."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from modicum.checkpoint import Checkpoint, load_checkpoint
from modicum.corpus import Choice, Conversation, read_choices, read_documents
from modicum.evaluate import AnswerLoss, answer_loss, answer_quality, bits_per_byte, multiple_choice
from modicum.generate import Generator, SamplingParams
from modicum.model import Decoder
from modicum.recipe import identity
from modicum.road.context import Road
from modicum.road.prepare import HELDOUT, corpus_folder
from modicum.road.training import conversations, initial_model
from modicum.store import UserError, hash_file, hash_json, write_json

RESULTS = "results.json"
Figure = TypeVar("Figure")
_SAMPLES = 3
_SAMPLE_TOKENS = 120


def evaluate_inputs(road: Road) -> dict[str, str]:
    inputs = {"evaluate": hash_json(identity(road.recipe.evaluate)), "seed": str(road.seed("evaluate"))}
    inputs["context"] = str(road.recipe.pretrain.sequence_length)
    for number, path in enumerate(road.recipe.evaluate.items):
        inputs[f"evaluate.items.{number}"] = road.fingerprints.of(path)
    for name, path in _checkpoints(road).items():
        inputs[name] = hash_file(path / "manifest.json")
    for number, path in enumerate(road.recipe.sft.data if road.recipe.sft is not None else []):
        inputs[f"sft.data.{number}"] = road.fingerprints.of(path)
    inputs["heldout"] = hash_file(corpus_folder(road) / "manifest.json")
    return inputs


def evaluate(road: Road) -> None:
    """Measure and write evaluate/results.json; its shape is described in docs/formats.md."""
    checkpoints = {name: load_checkpoint(path) for name, path in _checkpoints(road).items()}
    items = [item for path in road.recipe.evaluate.items for item in read_choices(path)]
    missing: dict[str, str] = {}
    results: dict[str, Any] = {
        "checkpoints": {name: str(checkpoint.path) for name, checkpoint in checkpoints.items()},
        "heldout": _heldout(road, checkpoints),
        "choices": _choices(road, checkpoints, items, missing) if items else {},
    }
    if "chat" in checkpoints:
        results |= _answers(road, checkpoints, missing)
    else:
        results["samples"] = _continuations(road, checkpoints["base"])
    results["not_measured"] = missing
    write_json(road.folder("evaluate") / RESULTS, results)


def is_of_these_models(road: Road) -> bool:
    """Whether what was measured last is the models that lie in the run now, as far as its recipe has them."""
    manifest, there = road.run.stage("evaluate").manifest(), _checkpoints(road)
    if manifest is None or manifest.inputs.keys() & {"base", "chat"} > there.keys():
        return False
    hashes = {name: hash_file(path / "manifest.json") for name, path in there.items() if path.exists()}
    return all(manifest.inputs.get(name) == found for name, found in hashes.items())


def _checkpoints(road: Road) -> dict[str, Path]:
    stages = {"base": "pretrain"} | ({"chat": "sft"} if road.recipe.sft is not None else {})
    return {name: road.run.checkpoints(stage) / "last" for name, stage in stages.items()}


def _measured(road: Road, missing: dict[str, str], name: str, measure: Callable[[], Figure]) -> Figure | None:
    """The figure; None, with the reason in `missing`, where it cannot be made: the others are not lost by it."""
    try:
        return measure()
    except UserError as error:
        missing[name] = str(error)
        road.listener.say(f"{name}: not measured: {error}")
        return None


def _heldout(road: Road, checkpoints: dict[str, Checkpoint]) -> dict[str, Any]:
    """Bits per byte before, after pretraining and after tuning, in windows of the length that was trained on."""
    settings = road.recipe.evaluate
    base = checkpoints["base"]
    if next(read_documents(corpus_folder(road), HELDOUT), None) is None:
        road.listener.say("nothing is held out (corpus.heldout_fraction: 0), so bits per byte are not measured")
        return {}
    models: dict[str, Decoder] = {}
    if road.recipe.pretrain.steps:  # without an update the base model is the one before
        before = "untrained" if road.recipe.model.checkpoint is None else "start"
        models[before] = initial_model(road, base.config.vocab_size)
    models |= {name: checkpoint.model() for name, checkpoint in checkpoints.items()}
    found = {}
    for number, (name, model) in enumerate(models.items()):
        road.listener.progress(number, len(models), f"bits per byte, {name} model")
        bits = bits_per_byte(
            model,
            base.tokenizer,
            read_documents(corpus_folder(road), HELDOUT),
            context=road.recipe.pretrain.sequence_length,
            max_tokens=settings.heldout_tokens,
            bootstrap_samples=settings.bootstrap_samples,
            seed=road.seed("evaluate"),
        )
        found[name] = bits.to_dict()
        total = bits.total
        span = "" if total.low is None else f"{total.low:.3f} to {total.high:.3f}, "
        road.listener.say(
            f"held-out bits per byte, {name} model: {total.value:.3f} ({span}{total.documents:,} documents)"
        )
    return found


def _choices(
    road: Road, checkpoints: dict[str, Checkpoint], items: list[Choice], missing: dict[str, str]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, (name, checkpoint) in enumerate(checkpoints.items()):
        road.listener.progress(number, len(checkpoints), f"multiple choice, {name} model")
        measure = partial(
            multiple_choice,
            checkpoint.model(),
            checkpoint.tokenizer,
            items,
            chat=name == "chat",
            bootstrap_samples=road.recipe.evaluate.bootstrap_samples,
            seed=road.seed("evaluate"),
        )
        result = _measured(road, missing, f"multiple choice, {name} model", measure)
        if result is None:
            continue
        found[name] = result.to_dict()
        road.listener.say(
            f"multiple choice, {name} model: {result.accuracy:.3f} ({result.low:.3f} to {result.high:.3f}, "
            f"{result.n} questions); chance {result.chance:.3f}, commonest answer {result.majority:.3f}, "
            f"word overlap {result.word_overlap:.3f}"
        )
    return found


def _answers(road: Road, checkpoints: dict[str, Checkpoint], missing: dict[str, str]) -> dict[str, Any]:
    """How the chat model answers held-out prompts, and how well both models predict the true answers; None for what
    cannot be measured."""
    settings, seed = road.recipe.evaluate, road.seed("evaluate")
    chat = checkpoints["chat"]
    heldout: list[Conversation] = conversations(road, chat.tokenizer).heldout
    model = chat.model()
    generator = Generator(model, chat.tokenizer, stop_ids=chat.stop_ids)
    road.listener.progress(0, 2, f"answering {min(settings.prompts, len(heldout))} held-out prompts")
    quality = _measured(
        road,
        missing,
        "answers to held-out prompts",
        lambda: answer_quality(
            generator, heldout, prompts=settings.prompts, max_new_tokens=settings.max_new_tokens, seed=seed
        ),
    )
    if quality is not None:
        road.listener.say(
            f"answers to {quality.prompts} held-out prompts: {quality.stop_rate:.0%} end by themselves, "
            f"{quality.empty_rate:.0%} are empty, median length {quality.median_length_ratio:.2f} times the reference's"
        )
    road.listener.progress(1, 2, "loss on held-out answers")

    def loss(model: Decoder, *, shuffle: bool = False) -> AnswerLoss:
        return answer_loss(
            model, chat.tokenizer, heldout, shuffle=shuffle, max_tokens=settings.heldout_tokens, seed=seed
        )

    losses = _measured(
        road,
        missing,
        "loss on held-out answers",
        lambda: {"base": loss(checkpoints["base"].model()), "chat": loss(model)},
    )
    if losses is not None:
        shuffled = _measured(
            road, missing, "loss on held-out answers after the prompts of others", lambda: loss(model, shuffle=True)
        )
        if shuffled is not None:
            losses["chat_shuffled"] = shuffled
        figures = ", ".join(f"{name.replace('_', ' ')} {its.nats_per_token:.3f}" for name, its in losses.items())
        road.listener.say(f"loss on held-out answers, nats a token: {figures}")
    answers = None if quality is None else quality.to_dict()
    samples = [
        {
            "messages": [*sample["messages"], {"role": "assistant", "content": sample["answer"]}],
            "reference": sample["reference"],
            "finish_reason": sample["finish_reason"],
        }
        for sample in (answers.pop("samples")[:_SAMPLES] if answers else [])
    ]
    return {
        "answers": {
            "chat": answers,
            "loss": None if losses is None else {name: its.to_dict() for name, its in losses.items()},
        },
        "samples": samples,
    }


def _continuations(road: Road, base: Checkpoint) -> list[dict[str, Any]]:
    """What the base model makes of the first words of held-out documents."""
    generator = Generator(base.model(), base.tokenizer, stop_ids=base.stop_ids)
    samples = []
    for document in read_documents(corpus_folder(road), HELDOUT):
        opening = document.text[:80]
        (answer,) = generator.generate(
            [[base.tokenizer.bos_id, *base.tokenizer.encode(opening)]],
            SamplingParams(max_new_tokens=_SAMPLE_TOKENS, temperature=0.8, seed=road.seed("evaluate")),
        )
        messages = [{"role": "text", "content": opening}, {"role": "assistant", "content": answer.text}]
        samples.append(
            {"messages": messages, "reference": document.text[80:400], "finish_reason": answer.finish_reason}
        )
        if len(samples) == _SAMPLES:
            break
    return samples
