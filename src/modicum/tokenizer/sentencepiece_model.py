"""A SentencePiece model as a tokenizer, compared with the sentencepiece library before anyone gets it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from modicum.store import UserError, read_json
from modicum.tokenizer.definition import checked_definition, json_text
from modicum.tokenizer.encoder import guarded
from modicum.tokenizer.load import check_against_library, settings_in
from modicum.tokenizer.pieces import BYTE, NORMAL, SPACE, definition_of, read_model, roles_of
from modicum.tokenizer.roles import Roles, given_roles
from modicum.tokenizer.tokenizer import Tokenizer

ADVERSARIAL = (
    "",
    " ",
    "   ",
    "a",
    " leading",
    "  two leading, trailing  ",
    "double  spaces   and\u00a0other\u2009ones\u3000here",
    "tabs\tand\t\ttabs",
    "lines\nand\r\nCRLF\r\n\r\nand\n\n\nblank ones\n",
    "Straße, naïve café, Å, Ångström, e\u0301, n\u0303, A\u030a, ﬁ\u0301",
    "x\u0338 \u0301alone, Việt Nam, Vie\u0323\u0302t",
    "digits 0 12 345 6789, 3.14, 1,000,000, ① ½ ² ٣",
    "日本語と漢字、中文。한국어 \u1112\u1161\u11ab",
    "नमस्ते, สวัสดี, שָׁלוֹם, السَّلام, Привет",
    "\U0001f642 \U0001f469\u200d\U0001f680 \U0001f3f3\ufe0f\u200d\U0001f308 \U0001f1e9\U0001f1ea 1\ufe0f\u20e3",
    "zero\u200bwidth\u200cand\u200djoined\ufeff, soft\u00adhyphen, \u202eright to left\u202c",
    "NUL \0 and \x01 \x07 \x1b[0m \x7f \x85",
    "\ud7ff\ue000\ufffd\uffff\U00010000\U0010ffff",
    "<s>text</s> <unk> <pad> <0x0A> <0xE2> [INST] <|im_end|>",
    f"a{SPACE}b {SPACE} {SPACE}{SPACE}c{SPACE}",
    "a" * 5000,
    " " * 3000,
    "=-" * 2000 + "-" * 777,
    "ab \n" * 1500,
    "if (a <= b) { return x[i]->y; }  // https://example.org/?q=1&r=%20\n\tpass",
)


def sentencepiece_tokenizer(path: Path, *, template: str | None = None) -> Tokenizer:
    """The tokenizer of a tokenizer.model: BPE with byte fallback, with the ids that SentencePiece gives.

    template: the source of a chat template, such as CYBERSLM_TEMPLATE; without one no conversation can be written.
    Words that the model's trainer was told to keep whole are text, but those that look like markers (`<tool>`) are
    control tokens, which no text becomes. A text begins with the model's bos, unless a tokenizer_config.json beside it
    sets add_bos_token to false. Where the model normalizes to NFKC, SentencePiece leaves several combining
    marks on one letter in the order in which they stand, and here they are put into Unicode's own order first.

    Raises UserError for a file that is no such model, for one to which the files beside it add tokens or give another
    beginning or end, and for one whose ids would differ, with the text.
    """
    proto, settings = read_model(path), settings_in(path.parent)
    roles = roles_of(proto, settings, path)
    _refuse_others(proto, roles, settings, path)
    definition = checked_definition(definition_of(proto), str(path))
    whole = guarded(lambda: tokenizers.Tokenizer.from_str(json_text(definition)), f"{path}: cannot be used")
    tokenizer = Tokenizer(definition, template, roles)
    _compare(tokenizer, proto, path)
    check_against_library(tokenizer, whole, roles.named.values(), path)
    return tokenizer


def _refuse_others(proto: Any, roles: Roles, settings: Mapping[str, Any], path: Path) -> None:
    """Refuse a model that is not all of its tokenizer: what the files beside it add, it knows nothing of, and how text
    is cut beside that differs from one program to the next."""
    kept = {piece.piece: str(number) for number, piece in enumerate(proto.pieces) if piece.type not in (NORMAL, BYTE)}
    added = _added(path.parent, settings)
    others = [f"{token!r} (id {number})" for token, number in added if kept.get(token) != number]
    own = {"bos_token": roles.bos, "eos_token": roles.eos}
    given = given_roles(settings, str(path))
    others += [f"{role} {given[role]!r}" for role, token in own.items() if given.get(role, token) != token]
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        raise UserError(
            f"{path}: the files beside it name {', '.join(others[:3])}{more}, which it does not have so; name the "
            "model's own tokenizer.json, as transformers writes one for that folder"
        )


def _added(folder: Path, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Tokens that the files beside a model name as added ones, and their ids."""
    named = settings.get("added_tokens_decoder")
    for number, entry in (named if isinstance(named, dict) else {}).items():
        yield str(entry.get("content") if isinstance(entry, dict) else entry), number
    file = folder / "added_tokens.json"
    for token, number in (read_json(file) if file.is_file() else {}).items():
        yield token, str(number)


def _compare(tokenizer: Tokenizer, proto: Any, path: Path) -> None:
    from sentencepiece import SentencePieceProcessor

    try:
        theirs = SentencePieceProcessor(model_proto=proto.SerializeToString())
        theirs.encode("a")
    except RuntimeError as error:
        raise UserError(f"{path}: SentencePiece cannot use it: {error}") from None
    control = [tokenizer.id_bytes(i).decode("utf-8", "replace") for i in tokenizer.special_ids]
    words = [name for name in control if tokenizer.special_ids.intersection(theirs.encode(name))]
    for text in _texts(proto):
        if any(word in text for word in words):
            continue
        ours, expected = tokenizer.encode(text), theirs.encode(text)
        if ours != expected:
            place = next((i for i, (a, b) in enumerate(zip(ours, expected, strict=False)) if a != b), len(expected))
            raise UserError(
                f"{path}: the text {text[:60]!r} would get other ids than SentencePiece gives it (from its token "
                f"{place + 1} on), so a model trained with it would read other words; this model cannot be imported"
            )


def _texts(proto: Any) -> Iterator[str]:
    """The adversarial texts, each piece alone, and all of them in a row."""
    yield from ADVERSARIAL
    pieces = [piece.piece.replace(SPACE, " ") for piece in proto.pieces if piece.type == NORMAL]
    yield from pieces
    yield "".join(pieces)
    yield "".join(reversed(pieces))
