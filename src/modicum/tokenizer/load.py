"""Read any byte-complete BPE tokenizer.json: keep it, add the control tokens it lacks, or say what it lacks."""

import json
from collections.abc import Iterable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal

import tokenizers

from modicum.store import UserError
from modicum.tokenizer.definition import checked_definition, json_text
from modicum.tokenizer.encoder import guarded
from modicum.tokenizer.roles import OWN_ROLES, with_roles
from modicum.tokenizer.special import IM_END, IM_START, NEEDED_TOKENS, next_multiple, reserved_token, special_entry
from modicum.tokenizer.template import CHATML
from modicum.tokenizer.tokenizer import Tokenizer
from modicum.tokenizer.vocabulary import is_control

LARGEST_FILE = 1 << 28


def load_tokenizer(
    path: Path, *, template: str | None = None, missing: Literal["refuse", "extend", "keep"] = "refuse"
) -> Tokenizer:
    """The tokenizer of a tokenizer.json, or of a folder that holds one.

    template: the source of a chat template; without one, the folder's chat_template.jinja (or the one in its
    tokenizer_config.json), else ChatML. missing: what to do when control tokens are missing or the size is no
    multiple of 64: refuse, or append them (a model trained with the old vocabulary then needs new rows), or keep the
    tokenizer as it is, with the roles that the tokenizer_config.json beside it names, as a model from elsewhere needs
    it, and with what its post-processor puts around a text; one that is kept has no template where it lacks ChatML's
    tokens.
    Decoding gives back every text unless the file holds a normalizer, as Qwen's NFC; then it gives back that form.
    Raises UserError for a file that is not such a tokenizer.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    content = _read_json(file)
    definition = checked_definition(content, str(file))
    roles, probed = OWN_ROLES, list(NEEDED_TOKENS)
    if template is None and (path.is_dir() or missing == "keep"):
        template = template_in(file.parent)
    if missing == "keep":
        definition, roles = with_roles(
            definition, settings_in(file.parent), str(file), post_processor=content.get("post_processor")
        )
        control = [entry["content"] for entry in definition["added_tokens"] if is_control(entry)]
        if template is None and {IM_START, IM_END} <= set(control):
            template = CHATML
        probed = [token for token in control if token in roles.named.values() or token in (template or "")]
    else:
        _complete(definition, file, extend=missing == "extend")
        template = CHATML if template is None else template
    whole = guarded(lambda: tokenizers.Tokenizer.from_str(json_text(definition)), f"{file}: cannot be used")
    tokenizer = Tokenizer(definition, template, roles)
    check_against_library(tokenizer, whole, probed, file)
    return tokenizer


def check_against_library(tokenizer: Tokenizer, whole: tokenizers.Tokenizer, probed: Iterable[str], file: Path) -> None:
    """Raise UserError when cutting a text at control tokens and encoding the spans is not what the library does."""
    for token in probed:
        text = f"{token}one{token} Two  {token}\n\n3 é{token}{token} x"
        expected = guarded(partial(whole.encode, text, add_special_tokens=False), str(file)).ids
        if tokenizer.encode_with_control(text) != expected:
            raise UserError(
                f"{file}: text beside {token} is encoded in another way than text alone (a pre-tokenizer that treats "
                "the start of a text specially, or a control token that is normalized or matches whole words only), "
                "so prompts could not be built piece by piece; name another tokenizer"
            )


def _complete(definition: dict[str, Any], file: Path, *, extend: bool) -> None:
    """Refuse a definition that lacks needed tokens or leaves rows empty, or append what is missing."""
    lacking = [token for token in NEEDED_TOKENS if token not in {e["content"] for e in definition["added_tokens"]}]
    vocab = definition["model"]["vocab"]
    size = next_multiple(max(vocab.values()) + 1 + sum(token not in vocab for token in lacking))
    if lacking or size != len(vocab):
        if not extend:
            raise UserError(_refusal(file, lacking, len(vocab), size))
        _extend(definition, lacking, size)


def _read_text(file: Path) -> str:
    try:
        if file.stat().st_size > LARGEST_FILE:
            raise UserError(f"{file}: larger than {LARGEST_FILE >> 20} MiB; no tokenizer is")
        return file.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise UserError(f"{file}: no such file; expected a tokenizer.json or a folder that holds one") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 text (byte {error.start})") from None


def _read_json(file: Path) -> Any:
    try:
        return json.loads(_read_text(file))
    except RecursionError:
        raise UserError(f"{file}: nested too deeply to be a tokenizer's") from None
    except ValueError as error:
        raise UserError(f"{file}: not valid JSON: {error}") from None


def _refusal(file: Path, lacking: list[str], have: int, size: int) -> str:
    what = f"lacks {', '.join(lacking)}" if lacking else f"has {have} tokens, not a multiple of 64 without gaps"
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
    free = sorted(set(range(size)) - set(vocab.values()))
    names = (name for number in count() if (name := reserved_token(number)) not in vocab)
    fillers = {next(names): row for row in free}
    vocab |= fillers
    definition["added_tokens"] += [special_entry(token, vocab[token]) for token in (*lacking, *fillers)]
    definition["added_tokens"].sort(key=lambda entry: entry["id"])


def settings_in(folder: Path) -> dict[str, Any]:
    """The content of the tokenizer_config.json beside a tokenizer; empty where there is none, or no object in it."""
    file = folder / "tokenizer_config.json"
    content = _read_json(file) if file.is_file() else None
    return content if isinstance(content, dict) else {}


def template_in(folder: Path) -> str | None:
    """The chat template that lies beside a tokenizer: a file of its own, or, from older programs, in its settings."""
    file, settings = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if file.is_file():
        return _read_text(file)
    found = settings_in(folder).get("chat_template")
    if isinstance(found, list):  # several with names: [{"name": "default", "template": "..."}, ...]
        found = next((t.get("template") for t in found if isinstance(t, dict) and t.get("name") == "default"), None)
    if not isinstance(found, str | None):
        raise UserError(f"{settings}: chat_template: expected a string, found {type(found).__name__}")
    return found
