"""Read any byte-complete BPE tokenizer.json: check it, add the control tokens it lacks, or say what it lacks."""

import json
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal

import tokenizers

from modicum.store import UserError
from modicum.tokenizer.encoder import guarded
from modicum.tokenizer.special import NEEDED_TOKENS, next_multiple, reserved_token, special_entry
from modicum.tokenizer.template import CHATML
from modicum.tokenizer.tokenizer import Tokenizer
from modicum.tokenizer.vocabulary import byte_characters, is_byte_level, is_control, json_text

LARGEST_FILE = 1 << 28


def load_tokenizer(
    path: Path, *, template: str | None = None, missing: Literal["refuse", "extend"] = "refuse"
) -> Tokenizer:
    """The tokenizer of a tokenizer.json, or of a folder that holds one.

    template: the source of a chat template; without one, the folder's chat_template.jinja (or the one in its
    tokenizer_config.json), else ChatML. missing: what to do when control tokens are missing or the size is no
    multiple of 64: refuse, or append them (a model trained with the old vocabulary then needs new rows).
    What would change the ids of a text from outside it, as a post-processor that adds tokens, truncation, padding and
    dropout, is left out. Raises UserError for a file that is not such a tokenizer.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    definition = checked_definition(_read_json(file, LARGEST_FILE), str(file))
    lacking = [token for token in NEEDED_TOKENS if token not in {e["content"] for e in definition["added_tokens"]}]
    vocab = definition["model"]["vocab"]
    size = next_multiple(max(vocab.values()) + 1 + sum(token not in vocab for token in lacking))
    if lacking or size != len(vocab):
        if missing == "refuse":
            raise UserError(_refusal(file, lacking, len(vocab), size))
        _extend(definition, lacking, size)
    if template is None:
        template = _template_beside(path) if path.is_dir() else None
    tokenizer = guarded(lambda: Tokenizer(definition, CHATML if template is None else template), str(file))
    _check_against_library(definition, tokenizer, file)
    return tokenizer


def _read_json(file: Path, largest: int) -> Any:
    try:
        if file.stat().st_size > largest:
            raise UserError(f"{file}: larger than {largest >> 20} MiB; no tokenizer is")
        return json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file}: no such file; expected a tokenizer.json or a folder that holds one") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 text (byte {error.start})") from None
    except RecursionError:
        raise UserError(f"{file}: nested too deeply to be a tokenizer") from None
    except ValueError as error:
        raise UserError(f"{file}: not valid JSON: {error}") from None


def checked_definition(content: Any, origin: str) -> dict[str, Any]:
    """The content of a tokenizer.json reduced to what decides the ids of a text, every part of the expected type.

    Raises UserError, with `origin` in front, for a model that is not BPE, a vocabulary that cannot say every byte,
    ids that are missing twice or far apart, or a definition that the tokenizers library does not take.
    """
    fault = _fault(content)
    if fault:
        raise UserError(f"{origin}: {fault}")
    added = [
        {
            **special_entry(entry["content"], entry["id"]),
            "special": False,
            **{k: entry[k] for k in _FLAGS if k in entry},
        }
        for entry in sorted(content.get("added_tokens", []), key=lambda entry: entry["id"])
    ]
    # The library numbers an added token by its place behind the vocabulary, whatever the file says its id is, unless
    # the vocabulary holds it too. So it does.
    vocab = {**content["model"]["vocab"], **{entry["content"]: entry["id"] for entry in added}}
    return {
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


def _fault(content: Any) -> str | None:
    """What keeps `content` from being a tokenizer we can use, or None."""
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, dict):
        return "not a tokenizer.json: it has no model"
    if model.get("type", "BPE") != "BPE" or not isinstance(model.get("merges"), list):
        return f"its model is {model.get('type')!r}; only BPE tokenizers can say every text and are read here"
    vocab, added = model.get("vocab"), content.get("added_tokens", [])
    if not isinstance(vocab, dict) or not all(type(number) is int for number in vocab.values()):
        return "model.vocab: expected an object of tokens and their ids"
    if not isinstance(added, list) or not all(_is_added_token(entry) for entry in added):
        return "added_tokens: expected a list of objects with id and content"
    ids = {**vocab, **{entry["content"]: entry["id"] for entry in added}}
    strayed = [e["content"] for e in added if vocab.get(e["content"], e["id"]) != e["id"]]
    if strayed:
        return f"added_tokens: {strayed[0]!r} has another id in model.vocab"
    if len(set(ids.values())) != len(ids):
        return "two tokens have the same id"
    if any(number < 0 for number in ids.values()) or max(ids.values(), default=0) >= 2 * len(ids):
        first, last = min(ids.values()), max(ids.values())
        return f"ids must lie close together from 0 on; {len(ids)} tokens reach from {first} to {last}"
    try:
        "".join(ids).encode("utf-8")
    except UnicodeEncodeError:
        return "a token holds a lone surrogate, which is no character"
    steered = {entry["content"] for entry in added if is_control(entry)}
    if any(part in steered for merge in model["merges"] for part in _parts(merge)):
        return "model.merges: a merge makes or uses a control token, so text could become one"
    if is_byte_level(content):
        missing = [byte for character, byte in byte_characters().items() if character not in vocab]
    else:
        missing = [byte for byte in range(256) if f"<0x{byte:02X}>" not in vocab] if model.get("byte_fallback") else [0]
    if missing:
        return f"it has no token for byte 0x{missing[0]:02X}, so there are texts that it cannot say"
    return None


_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def _is_added_token(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and type(entry.get("id")) is int
        and isinstance(entry.get("content"), str)
        and entry["content"] != ""
        and all(type(entry.get(flag, False)) is bool for flag in _FLAGS)
    )


def _parts(merge: Any) -> list[str]:
    """The two sides of a merge and what it makes; older files write it as one string."""
    sides = merge.split(" ") if isinstance(merge, str) else merge
    if not isinstance(sides, list) or not all(isinstance(side, str) for side in sides):
        return []
    return [*sides, "".join(sides)]


def _refusal(file: Path, lacking: list[str], have: int, size: int) -> str:
    what = f"lacks {', '.join(lacking)}" if lacking else f"has {have} tokens, which is no multiple of 64"
    return (
        f"{file}: {what}. Set tokenizer.missing_special_tokens: extend to append what is missing, up to {size} tokens "
        "(a model made for the old vocabulary then needs new rows), or name another tokenizer, or let one be trained"
    )


def _extend(definition: dict[str, Any], lacking: list[str], size: int) -> None:
    """Add the lacking tokens behind the last id, then reserved tokens wherever an id below `size` has none.

    A lacking token that stands in the vocabulary already keeps its id.
    """
    vocab = definition["model"]["vocab"]
    end = max(vocab.values()) + 1
    for token in lacking:
        if token not in vocab:
            vocab[token], end = end, end + 1
    names = (name for number in count() if (name := reserved_token(number)) not in vocab)
    fillers = dict(zip(names, sorted(set(range(size)) - set(vocab.values())), strict=False))
    vocab |= fillers
    definition["added_tokens"] += [special_entry(token, vocab[token]) for token in (*lacking, *fillers)]
    definition["added_tokens"].sort(key=lambda entry: entry["id"])


def _check_against_library(definition: dict[str, Any], tokenizer: Tokenizer, file: Path) -> None:
    """Raise UserError when cutting a text at its control tokens and encoding the spans is not what the library does."""
    whole = guarded(lambda: tokenizers.Tokenizer.from_str(json_text(definition)), str(file))
    for token in NEEDED_TOKENS:
        text = f"{token}one{token} Two  {token}\n\n3 é{token}{token} x"
        expected = guarded(partial(whole.encode, text, add_special_tokens=False), str(file)).ids
        if tokenizer.encode_with_control(text) != expected:
            raise UserError(
                f"{file}: text beside {token} is encoded in another way than text alone (a pre-tokenizer that treats "
                "the start of a text specially, or a control token that is normalized or matches whole words only), "
                "so prompts could not be built piece by piece; name another tokenizer"
            )


def _template_beside(folder: Path) -> str | None:
    file = folder / "chat_template.jinja"
    return file.read_text("utf-8") if file.is_file() else None
