"""A foreign checkpoint becomes an ordinary one: read without trust, relaid, proven, and only then written."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from modicum.checkpoint import load_checkpoint
from modicum.checkpoint.save import write_model
from modicum.exchange.foreign import Foreign, read_foreign
from modicum.exchange.gguf_file import read_gguf
from modicum.exchange.gguf_importing import foreign_of
from modicum.exchange.gguf_roles import check_named, check_types, ends_of
from modicum.exchange.gguf_vocabulary import tokenizer_of
from modicum.exchange.layouts import relaid
from modicum.exchange.names import Dialect
from modicum.exchange.parity import Compared, decoder_speaker, prove, truth_of
from modicum.store import UserError, atomic_directory, read_json, write_manifest
from modicum.store import refuse_taken as refuse_taken
from modicum.store.atomic import write_bytes
from modicum.tokenizer import CYBERSLM_TEMPLATE, Tokenizer, load_tokenizer, sentencepiece_tokenizer
from modicum.tokenizer.load import template_in

SENTENCEPIECE = "tokenizer.model"


@dataclass(frozen=True)
class ImportReport:
    """What was imported, and how closely it says what its source says. tensors: how many were written; dtype: as what;
    vocabulary: rows of the embedding; tokenizer: its file, with so many ids; left_aside: parts of the file not read;
    notes: what of the source is not kept, or was done to it."""

    out: Path
    architecture: str
    written_as: str
    parameters: int
    tensors: int
    dtype: str
    vocabulary: int
    tokenizer: Path
    tokenizer_ids: int
    compared: tuple[Compared, ...]
    left_aside: tuple[str, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON data."""
        return {**asdict(self), "out": str(self.out), "tokenizer": str(self.tokenizer)}


@dataclass(frozen=True)
class _Source:
    """A model as it was read. file: that of its tokenizer; template: the source's own, where the tokenizer may carry
    ChatML for a tuning to come; stops: where an answer ends, by its own account."""

    model: Foreign
    file: Path
    tokenizer: Tokenizer
    template: str | None
    stops: list[int]


def import_checkpoint(
    path: Path,
    *,
    dialect: Dialect,
    out: Path,
    tokenizer: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> ImportReport:
    """Write the foreign checkpoint at `path` (a file, or a folder) as the checkpoint `out`.

    tokenizer: a tokenizer.json, a SentencePiece tokenizer.model or a folder with one; without it, the one beside the
    weights. Raises UserError, and writes nothing, when anything is missing, left over or of the wrong shape, when the
    logits are not the source's, and when `out` is there already. Nothing in the source is executed.
    """
    refuse_taken(out)
    progress(f"reading {path}")
    source = _read_gguf(path, tokenizer) if dialect == "gguf" else _read(path, dialect, tokenizer)
    foreign, file, spoken = source.model, source.file, source.tokenizer
    if spoken.vocab_size > foreign.config.vocab_size:
        raise UserError(
            f"{file}: has {spoken.vocab_size} ids, and the model a vocabulary of {foreign.config.vocab_size}; it is "
            "another model's: name the right one with --tokenizer"
        )
    progress("comparing its logits with the float64 reference")
    config = replace(foreign.config, rotary_layout="half")
    weights = relaid(
        foreign.weights, head_dim=config.head_dim, source=foreign.config.rotary_layout, target=config.rotary_layout
    )
    truth = truth_of(foreign.weights, foreign.config)
    compared = prove(f"the checkpoint made of {path}", decoder_speaker(weights, config), truth)
    progress(f"writing {out}")
    with atomic_directory(out) as unfinished:
        chat = spoken.end_of_turn_id in source.stops or (not source.stops and source.template is not None)
        ours = [spoken.end_of_turn_id, spoken.eot_id] if chat else [spoken.eot_id]
        write_model(
            unfinished,
            config=config,
            weights=weights,
            tokenizer=spoken.with_template(source.template),
            chat=chat,
            stop_ids=[*ours, *source.stops],
        )
        if file.suffix == ".model":  # for who exports the model again; nothing here reads it
            write_bytes(unfinished / SENTENCEPIECE, file.read_bytes())
        written = load_checkpoint(unfinished, verify=False)
        write_manifest(unfinished)
    return _report(foreign, out, file, spoken, compared, written.config.qk_norm)


def _read(path: Path, dialect: Dialect, tokenizer: Path | None) -> _Source:
    foreign = read_foreign(path, dialect)
    folder = path if path.is_dir() else path.parent
    file = _tokenizer_file(folder, dialect, tokenizer)
    spoken, template = _read_tokenizer(file, dialect)
    _check_token_ids(foreign, spoken, file)
    return _Source(foreign, file, spoken, template, _stop_ids(folder, dialect, spoken))


def _read_gguf(path: Path, tokenizer: Path | None) -> _Source:
    """One GGUF file, which holds all of it."""
    file = read_gguf(path)
    foreign = foreign_of(file)
    if tokenizer is not None:
        named = _tokenizer_file(path.parent, "hf", tokenizer)
        spoken, template = _read_tokenizer(named, "hf")
        check_types(file.values, str(path))
        check_named(file.values, spoken, named, str(path))
    else:
        spoken, named = tokenizer_of(file.values, str(path)), path
        template = file.values.get("tokenizer.chat_template")
    ends = ends_of(file.values)
    _check_ends(ends, spoken, path)
    return _Source(foreign, named, spoken, template, ends)


def _tokenizer_file(folder: Path, dialect: Dialect, given: Path | None) -> Path:
    """The file that decides the ids: a dialect has a tokenizer.model of its own, Hugging Face its tokenizer.json."""
    if given is not None and given.is_file():
        return given
    where = given or folder
    names = ("tokenizer.json", "tokenizer.model") if dialect == "hf" else ("tokenizer.model", "tokenizer.json")
    for name in names:
        if (where / name).is_file():
            return where / name
    raise UserError(
        f"{where}: no tokenizer; put the model's tokenizer.json or its SentencePiece tokenizer.model there, or name it "
        "with --tokenizer"
    )


def _read_tokenizer(file: Path, dialect: Dialect) -> tuple[Tokenizer, str | None]:
    """The tokenizer, and the source's own chat template."""
    template = template_in(file.parent)
    if template is None and dialect == "cyberslm":
        template = CYBERSLM_TEMPLATE
    if file.suffix == ".model":
        return sentencepiece_tokenizer(file, template=template), template
    return load_tokenizer(file, template=template, missing="keep"), template


def _check_token_ids(foreign: Foreign, tokenizer: Tokenizer, file: Path) -> None:
    """Refuse a config that has another token begin or end a text than the tokenizer does."""
    named = tokenizer.roles.bos
    begins = {tokenizer.bos_id, tokenizer.definition["model"]["vocab"][named] if named else tokenizer.bos_id}
    allowed = {"bos_token_id": sorted(begins), "eos_token_id": [tokenizer.eot_id]}
    faults = [
        f"{name} {number} in the config, {' or '.join(map(str, allowed[name]))} in {file}"
        for name, number in foreign.token_ids.items()
        if number not in allowed[name]
    ]
    if faults:
        heading = f"{foreign.origin}: its config and its tokenizer disagree; correct one, or name the right tokenizer"
        raise UserError("\n".join([heading, *(f"  {fault}" for fault in faults)]))


def _stop_ids(folder: Path, dialect: Dialect, tokenizer: Tokenizer) -> list[int]:
    """Where a Hugging Face model stops, by its own account; empty where it says nothing of use."""
    if dialect != "hf":
        return []
    for name in ("generation_config.json", "config.json"):
        given = read_json(folder / name).get("eos_token_id") if (folder / name).is_file() else None
        ids = [number for number in (given if isinstance(given, list) else [given]) if type(number) is int]
        if ids:
            _check_ends(ids, tokenizer, folder / name)
            return ids
    return []


def _check_ends(ends: list[int], tokenizer: Tokenizer, origin: Path) -> None:
    """Refuse an end that the tokenizer has no token for: it is another model's, or lacks tokens that were added."""
    strange = [number for number in ends if not 0 <= number < tokenizer.vocab_size]
    if strange:
        raise UserError(
            f"{origin}: an answer would end at {strange[0]}, which is no token's id; correct it, or name the model's "
            "own tokenizer with --tokenizer"
        )


def _report(
    foreign: Foreign, out: Path, file: Path, tokenizer: Tokenizer, compared: tuple[Compared, ...], qk_norm: bool
) -> ImportReport:
    (dtype,) = {str(weight.dtype).removeprefix("torch.") for weight in foreign.weights.values()}
    return ImportReport(
        out=out,
        architecture=foreign.architecture,
        written_as="Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLM",
        parameters=foreign.config.parameter_count(),
        tensors=len(foreign.weights),
        dtype=dtype,
        vocabulary=foreign.config.vocab_size,
        tokenizer=file,
        tokenizer_ids=tokenizer.vocab_size,
        compared=compared,
        left_aside=foreign.left_aside,
        notes=foreign.notes,
    )
