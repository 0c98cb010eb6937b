"""The stages before training: corpus, tokenizer, shards. Each has a function for its inputs and one for its work."""

import shutil
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Final

from modicum.corpus import prepare_corpus, read_choices, read_documents
from modicum.corpus.inputs import find_files
from modicum.data import write_shards
from modicum.recipe import Recipe, identity
from modicum.road.context import Road
from modicum.road.start import start_hash, starting_checkpoint
from modicum.store import UserError, atomic_directory, hash_file, hash_json, write_json
from modicum.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

TRAIN: Final = "train"
HELDOUT: Final = "heldout"


def corpus_inputs(road: Road) -> dict[str, str]:
    recipe, settings = road.recipe, identity(road.recipe.corpus)
    for plain in settings["sources"]:
        del plain["weight"], plain["max_epochs"]  # they change no document; pretraining sees to them
    inputs = {"corpus": hash_json(settings), "seed": str(road.seed("corpus"))}
    for source in recipe.corpus.sources:
        files = find_files(source)
        if files.root is not None:
            inputs[f"corpus.sources.{source.name}"] = road.fingerprints.of_files(files.root, files.names)
    if recipe.corpus.decontaminate_words:
        inputs["evaluate.items"] = hash_json(texts_to_avoid(road))
    return inputs


def unread_files(recipe: Recipe) -> list[str]:
    """For each source of which files are passed over, a line that counts them."""
    each = [find_files(source) for source in recipe.corpus.sources]
    return [f"source {f.source.name}: {f.root}: not read: {f.passed_over}" for f in each if f.passed_over]


def make_corpus(road: Road) -> None:
    report = prepare_corpus(
        road.recipe.corpus,
        corpus_folder(road),
        seed=road.seed("corpus"),
        decontaminate_against=texts_to_avoid(road),
        progress=lambda text: road.listener.progress(0, 0, text),
    )
    if road.recipe.corpus.heldout_fraction and not report.documents_heldout:
        shutil.rmtree(corpus_folder(road))
        raise UserError(
            "corpus: a single document is left, so none can be held out to measure on; add text, or set "
            "corpus.heldout_fraction: 0"
        )
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in report.dropped.items()) or "none"
    road.listener.say(
        f"corpus: {report.documents_in:,} documents read, {report.documents_kept:,} kept, "
        f"{report.documents_heldout:,} held out; dropped: {dropped}"
    )
    for warning in report.warnings:
        road.listener.say(f"warning: {warning}")


def texts_to_avoid(road: Road) -> list[str]:
    """The question of every item that tests generalisation; a recall item asks for what the corpus says."""
    if not road.recipe.corpus.decontaminate_words:
        return []
    items = [item for path in road.recipe.evaluate.items for item in read_choices(path)]
    return [item.question for item in items if item.kind == "generalisation"]


def tokenizer_inputs(road: Road) -> dict[str, str]:
    settings, template, start = road.recipe.tokenizer, road.recipe.chat.template, road.recipe.model.checkpoint
    if start is None:
        inputs = {"tokenizer": hash_json(identity(settings)), "vocab_size": str(_vocab_size(road))}
    else:
        inputs = {"model.checkpoint": start_hash(start)}
    if template is not None:
        inputs["chat.template"] = hash_json(template_text(template))
    if settings.path is not None:
        inputs["tokenizer.path"] = road.fingerprints.of(settings.path)
    elif start is None:
        inputs["corpus"] = _manifest_hash(corpus_folder(road))
        inputs["seed"] = str(road.seed("tokenizer"))
    return inputs


def make_tokenizer(road: Road) -> None:
    settings, template = road.recipe.tokenizer, road.recipe.chat.template
    text = None if template is None else template_text(template)
    start, sample = starting_checkpoint(road.recipe), None
    if start is not None:
        tokenizer = start.tokenizer
        road.listener.say(f"tokenizer: that of {start.path}, vocabulary {tokenizer.vocab_size:,}")
    elif settings.path is not None:
        tokenizer = load_tokenizer(settings.path, template=text, missing=settings.missing_special_tokens)
        road.listener.say(f"tokenizer: loaded {settings.path}, vocabulary {tokenizer.vocab_size:,}")
    else:
        tokenizer, report = train_tokenizer(
            (document.text for document in read_documents(corpus_folder(road))),
            vocab_size=_vocab_size(road),
            min_frequency=settings.min_frequency,
            sample_bytes=settings.sample_mb * 10**6,
            seed=road.seed("tokenizer"),
        )
        sample = asdict(report)
        road.listener.say(f"tokenizer: {report}")
    with atomic_directory(road.folder("tokenizer") / "files") as folder:
        tokenizer.save(folder)
        if text is not None:
            load_tokenizer(folder, template=text, missing="keep").save(folder)
        if sample is not None:
            write_json(folder / "sample.json", sample)


def template_text(path: Path) -> str:
    """The source of a chat template. Raises UserError for a file that is none."""
    try:
        return path.read_text("utf-8")
    except IsADirectoryError:
        raise UserError(f"chat.template: {path} is a folder; name the Jinja file in it") from None
    except UnicodeDecodeError as error:
        raise UserError(f"chat.template: {path} is not UTF-8 text (byte {error.start})") from None


def _vocab_size(road: Road) -> int:
    """What the tokenizer section asks for, else the model's preset."""
    return road.recipe.tokenizer.vocab_size or road.recipe.model.vocab_size


def open_tokenizer(road: Road) -> Tokenizer:
    """The run's tokenizer."""
    return load_tokenizer(road.folder("tokenizer") / "files", missing="keep")


def shards_inputs(road: Road) -> dict[str, str]:
    return {
        "corpus": _manifest_hash(corpus_folder(road)),
        "tokenizer": open_tokenizer(road).hash,
        "seed": str(road.seed("shards")),
    }


def make_shards(road: Road) -> None:
    tokenizer, corpus = open_tokenizer(road), corpus_folder(road)
    for split in (TRAIN, HELDOUT):
        documents = read_documents(corpus, split)
        info = write_shards(documents, tokenizer, shards_folder(road, split), seed=road.seed("shards"))
        road.listener.say(
            f"shards: {split} {info.documents:,} documents, {info.tokens:,} tokens, "
            f"{info.bytes / max(1, info.tokens):.2f} bytes a token"
        )


def shards_folder(road: Road, split: str) -> Path:
    return road.folder("shards") / split


def _manifest_hash(folder: Path) -> str:
    return hash_file(folder / "manifest.json")


def corpus_folder(road: Road) -> Path:
    return road.folder("corpus") / "text"


def corpus_weights(road: Road, present: Iterable[str]) -> tuple[dict[str, float], dict[str, float]]:
    """weight and max_epochs of the sources that have text left."""
    names = set(present)
    sources = [source for source in road.recipe.corpus.sources if source.name in names]
    return {s.name: s.weight for s in sources}, {s.name: s.max_epochs for s in sources}
