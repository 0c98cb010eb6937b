"""What a tokenizer.json must hold to be used here: every part checked, all reduced to what decides a text's ids."""

import json
from collections.abc import Mapping
from typing import Any

from modicum.store import UserError
from modicum.tokenizer.special import special_entry
from modicum.tokenizer.vocabulary import byte_characters, is_byte_level, is_control

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def json_text(definition: Mapping[str, Any]) -> str:
    """The text of tokenizer.json: the same bytes for the same content."""
    return json.dumps(definition, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def checked_definition(content: Any, origin: str) -> dict[str, Any]:
    """The content of a tokenizer.json, reduced to what decides the ids of a text alone.

    Left out: a post-processor, which puts tokens around a text (a BOS would stand twice once a template writes one
    too); truncation, which would cut texts unseen; padding; dropout, which makes ids random.

    Raises UserError, with `origin` in front, for a model that is not BPE, a vocabulary that cannot say every byte, ids
    that are taken twice or lie far apart, and merges that make a control token.
    """
    fault = _shape_fault(content) or _vocabulary_fault(content)
    if fault:
        raise UserError(f"{origin}: {fault}")
    added = [_added_entry(entry) for entry in sorted(content.get("added_tokens", []), key=lambda entry: entry["id"])]
    # The library numbers an added token by its place behind the vocabulary, whatever id the file gives it, unless the
    # vocabulary holds it too. So it does.
    vocab = {**content["model"]["vocab"], **{entry["content"]: entry["id"] for entry in added}}
    definition = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": content.get("normalizer"),
        "pre_tokenizer": content.get("pre_tokenizer"),
        "post_processor": None,
        "decoder": content.get("decoder"),
        "model": {**content["model"], "type": "BPE", "dropout": None, "vocab": vocab},
    }
    try:
        json_text(definition).encode("utf-8")
    except UnicodeEncodeError as error:
        surrogate = ord(error.object[error.start])
        raise UserError(f"{origin}: holds a lone surrogate (U+{surrogate:04X}), which is no character") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{origin}: not plain JSON: {error}") from None
    return definition


def _shape_fault(content: Any) -> str | None:
    """What is missing or of another type than a BPE tokenizer.json has there, or None."""
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, dict):
        return "not a tokenizer.json: it has no model"
    if model.get("type", "BPE") != "BPE" or "merges" not in model:
        return f"its model is {model.get('type')!r}; only BPE tokenizers, which can say every text, are read here"
    if not isinstance(model["merges"], list):
        return "model.merges: expected a list"
    vocab, added = model.get("vocab"), content.get("added_tokens", [])
    if not isinstance(vocab, dict) or not vocab or not all(type(number) is int for number in vocab.values()):
        return "model.vocab: expected an object of tokens and their ids"
    if not isinstance(added, list) or not all(_is_added_token(entry) for entry in added):
        return "added_tokens: expected a list of objects with id, content and true or false for each flag"
    if not all(isinstance(content.get(part), dict | None) for part in ("normalizer", "pre_tokenizer", "decoder")):
        return "normalizer, pre_tokenizer and decoder: expected objects"
    return None


def _vocabulary_fault(content: dict[str, Any]) -> str | None:
    """Why these tokens cannot be used, or None."""
    model, added = content["model"], content.get("added_tokens", [])
    vocab = model["vocab"]
    strayed = [entry["content"] for entry in added if vocab.get(entry["content"], entry["id"]) != entry["id"]]
    if strayed:
        return f"added_tokens: {strayed[0]!r} has another id in model.vocab"
    ids = {**vocab, **{entry["content"]: entry["id"] for entry in added}}
    first, last = min(ids.values()), max(ids.values())
    if len(set(ids.values())) != len(ids) or len({entry["content"] for entry in added}) != len(added):
        return "two tokens have the same id, or one token stands twice"
    if first < 0 or last >= 2 * len(ids):
        return f"ids must lie close together from 0 on; {len(ids)} tokens reach from {first} to {last}"
    control = {entry["content"] for entry in added if is_control(entry)}
    if any(part in control for merge in model["merges"] for part in _parts(merge)):
        return "model.merges: a merge makes or uses a control token, so text could become one"
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return "its words carry a prefix or suffix, so decoding does not give back the text"
    if is_byte_level(content):
        lacking = [byte for character, byte in byte_characters().items() if character not in vocab]
    else:
        fallback = model.get("byte_fallback") is True
        lacking = [byte for byte in range(256) if not fallback or f"<0x{byte:02X}>" not in vocab]
    if lacking:
        return f"it has no token for byte 0x{lacking[0]:02X}, so there are texts that it cannot say"
    return None


def _is_added_token(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and type(entry.get("id")) is int
        and isinstance(entry.get("content"), str)
        and entry["content"] != ""
        and type(entry.get("special")) is bool
        and all(type(entry.get(flag, False)) is bool for flag in _FLAGS)
    )


def _added_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {**special_entry(entry["content"], entry["id"]), **{flag: entry[flag] for flag in _FLAGS if flag in entry}}


def _parts(merge: Any) -> list[str]:
    """The two sides of a merge and what it makes; older files write it as one string."""
    sides = merge.split(" ") if isinstance(merge, str) else merge
    if not isinstance(sides, list) or not all(isinstance(side, str) for side in sides):
        return []  # the library refuses such a merge when it reads the file
    return [*sides, "".join(sides)]
