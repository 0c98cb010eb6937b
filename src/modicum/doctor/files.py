"""A checkpoint on disk, checked apart from the code that loads it: hashes, tensors, tokenizer, end ids."""

import json
from pathlib import Path
from typing import Any
from unicodedata import normalize

from modicum.checkpoint import Checkpoint, load_checkpoint
from modicum.doctor.finding import Finding, judged
from modicum.road.words import count, size
from modicum.store import UserError, verify_manifest
from modicum.store.manifest import MANIFEST, read_manifest
from modicum.tokenizer import Tokenizer
from modicum.tokenizer.roles import OWN_ROLES

_SAMPLE = "Tabs\tand line ends\r\n, Straße and Straße, emoji \U0001f469‍\U0001f680, <|im_end|> as text."


def check_files(path: Path) -> list[Finding]:
    """Every check of the folder that needs no forward pass; failures are the user's to mend."""
    findings = [hashes(path)]
    try:
        checkpoint = load_checkpoint(path, verify=False)
    except UserError as error:
        return [*findings, _failed("tensors and tokenizer", str(error))]
    return [
        *findings,
        tensors(checkpoint),
        vocabulary(checkpoint),
        round_trip(checkpoint.tokenizer),
        end_ids(path, checkpoint.tokenizer),
        training_state(checkpoint),
    ]


def hashes(path: Path) -> Finding:
    """Every file that the folder's manifest names against its SHA-256 there; files that it does not name are told."""
    try:
        verify_manifest(path)
    except UserError as error:
        return _failed("file hashes", str(error))
    hashed = {path / name for name in read_manifest(path)}
    total = sum(file.stat().st_size for file in hashed)
    detail = f"{len(hashed)} files, {size(total)}, all as they were written"
    others = {file for file in path.rglob("*") if file.is_file()} - hashed - {path / MANIFEST}
    if not others:
        return _fine("file hashes", detail)
    names = ", ".join(sorted(str(file.relative_to(path)) for file in others)[:5])
    return Finding("file hashes", "told", f"{detail}; no hash is known of {count(len(others))} more: {names}")


def tensors(checkpoint: Checkpoint) -> Finding:
    """All weights there, of the config's shapes (the loader has compared them), and finite."""
    bad = [name for name, weight in checkpoint.tensors.items() if not bool(weight.isfinite().all())]
    if bad:
        return _failed("weights", f"not finite: {', '.join(sorted(bad)[:5])}")
    if checkpoint.rounded:
        kinds = " and ".join(str(bits) for bits in sorted(set(checkpoint.rounded.values())))
        return _fine("weights", f"{len(checkpoint.rounded)} matrices rounded to {kinds} bits, all finite")
    parameters = sum(weight.numel() for weight in checkpoint.weights.values())
    expected = checkpoint.config.parameter_count()
    detail = f"{count(parameters)} parameters, all finite; config.json describes {count(expected)}"
    return judged("weights", parameters == expected, detail, yours=True)


def vocabulary(checkpoint: Checkpoint) -> Finding:
    """A row of the embedding for each id of the tokenizer. Rows that no id reaches are told: imported models have some,
    which are never generated."""
    rows, ids = checkpoint.config.vocab_size, checkpoint.tokenizer.vocab_size
    detail = f"{count(rows)} embedding rows, {count(ids)} token ids"
    if rows > ids:
        return Finding("vocabulary", "told", f"{detail}: no id reaches the other {count(rows - ids)}")
    return judged("vocabulary", rows == ids, detail, yours=True)


def round_trip(tokenizer: Tokenizer) -> Finding:
    """Text comes back as it went in, and no text becomes a control token."""
    ids = tokenizer.encode(_SAMPLE)
    control = tokenizer.special_ids.intersection(ids)
    if control:
        return _failed("tokenizer", f"text became the control ids {sorted(control)}")
    back = tokenizer.decode(ids)
    if back != _SAMPLE and back == normalize("NFC", _SAMPLE):
        return Finding("tokenizer", "told", "it normalizes text to NFC: it gives back that form")
    if back != _SAMPLE and _letters(back) == _letters(_SAMPLE):
        return Finding("tokenizer", "told", f"it normalizes text, white space too: it gives back {back!r}")
    same = back == _SAMPLE
    return judged("tokenizer", same, "text comes back as it went in" if same else "text comes back altered", yours=True)


def end_ids(path: Path, tokenizer: Tokenizer) -> Finding:
    """Generation ends at end-of-text, and for a chat model at the end of a turn; files agree. Our own padding ends
    nothing."""
    name = "end of text"
    in_config, in_generation = (_json(path / file) for file in ("config.json", "generation_config.json"))
    stops = _ids(in_generation.get("eos_token_id"))
    eot, turn, pad = tokenizer.eot_id, tokenizer.end_of_turn_id, tokenizer.pad_id
    if eot not in stops or not tokenizer.special_ids.issuperset(stops):
        chat = f" and, in a chat model, {turn} ({_name(tokenizer, turn)})" if turn != eot else ""
        wanted = f"{eot} ({_name(tokenizer, eot)}){chat}"
        return _failed(name, f"generation_config.json ends at the ids {stops}; expected {wanted}")
    if set(_ids(in_config.get("eos_token_id"))) != set(stops):
        return _failed(name, f"config.json ends at {in_config.get('eos_token_id')}, generation_config.json at {stops}")
    pads = {in_config.get("pad_token_id"), in_generation.get("pad_token_id")}
    # one from elsewhere may pad with a token that ends an answer, as Qwen's does; padding is masked by its place here
    if pads != {pad} or (pad in stops and tokenizer.roles == OWN_ROLES):
        return _failed(name, f"padding is {sorted(map(str, pads))}, and the tokenizer's is {pad}")
    kind = "a model" if turn == eot else "a chat model" if turn in stops else "a base model"
    padding = "padding is one of these" if pad in stops else "padding is another id"
    return _fine(name, f"{kind}: stops at {' and '.join(_name(tokenizer, stop) for stop in stops)}, {padding}")


def training_state(checkpoint: Checkpoint) -> Finding:
    """Whether training can go on from here, and its tensors are finite."""
    try:
        training = checkpoint.training
    except UserError as error:
        return _failed("training state", str(error))
    if training is None:
        return Finding("training state", "told", "none: this checkpoint can be used, but training cannot go on from it")
    bad = [name for name, tensor in training.tensors.items() if not bool(tensor.isfinite().all())]
    if bad:
        return _failed("training state", f"not finite: {', '.join(sorted(bad)[:5])}")
    return _fine("training state", f"{len(training.tensors)} tensors, all finite: training can go on from here")


def _letters(text: str) -> str:
    return "".join(character for character in normalize("NFKC", text) if character.isalnum())


def _name(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.id_bytes(token).decode("utf-8", "replace")


def _ids(value: Any) -> list[int]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _json(file: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return value


def _fine(name: str, detail: str) -> Finding:
    return Finding(name, "ok", detail, yours=True)


def _failed(name: str, detail: str) -> Finding:
    return Finding(name, "failed", "; ".join(detail.splitlines()), yours=True)
