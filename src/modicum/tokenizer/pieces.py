"""A SentencePiece BPE model with byte fallback, written as the tokenizer.json that gives the same ids.

The file is untrusted: it is read as protocol buffer data and checked before SentencePiece's own code sees it.
"""

import math
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from modicum.store import UserError
from modicum.tokenizer.roles import Roles
from modicum.tokenizer.special import special_entry
from modicum.tokenizer.vocabulary import is_control

LARGEST_FILE = 1 << 28
SPACE = "▁"  # U+2581, what SentencePiece writes for a space
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_BPE = 2
_LONGEST = 512  # characters; SentencePiece's trainer makes no longer pieces, and splitting one costs their square
_LEAF = 1 << 31
# Characters that join what stands before them in one grapheme (Unicode Standard Annex 29).
_JOINING = (
    r"[\p{M}\p{Cf}\n\x{0e33}\x{0eb3}\x{1160}-\x{11ff}\x{d7b0}-\x{d7ff}\x{ff9e}\x{ff9f}"
    r"\x{1f1e6}-\x{1f1ff}\x{1f3fb}-\x{1f3ff}]"
)
_COMPOSING = ("nfkc", "nfkc_cf", "nmt_nfkc", "nmt_nfkc_cf")  # SentencePiece's own maps, by name


def read_model(path: Path) -> Any:
    """The ModelProto of a tokenizer.model. Raises UserError for a file that is none, or that is no such BPE model."""
    try:
        import_module("sentencepiece")
        protocol = import_module("sentencepiece.sentencepiece_model_pb2")
        message = import_module("google.protobuf.message")
    except ImportError:
        raise UserError(
            f"{path}: reading a SentencePiece model needs two more packages: pip install 'modicum[sentencepiece]'"
        ) from None
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise UserError(f"{path}: larger than {LARGEST_FILE >> 20} MiB; no tokenizer is")
        proto = protocol.ModelProto.FromString(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except message.DecodeError:
        raise UserError(f"{path}: not a SentencePiece model, or not a whole one") from None
    fault = _fault(proto)
    if fault:
        raise UserError(f"{path}: {fault}")
    return proto


def roles_of(proto: Any, settings: Mapping[str, Any], path: Path) -> Roles:
    """The tokens that the model's trainer made for beginning, end, padding and what is unknown.

    A text begins with its bos, as models with a SentencePiece tokenizer have it, unless settings, the content of a
    tokenizer_config.json, say otherwise.
    """
    trainer, pieces = proto.trainer_spec, proto.pieces

    def piece(number: int, name: str) -> str | None:
        if not 0 <= number < len(pieces) or pieces[number].type not in (UNKNOWN, CONTROL):
            return None
        return str(pieces[number].piece) if pieces[number].piece == name else None

    unk = next(str(p.piece) for p in pieces if p.type == UNKNOWN)
    eos = piece(trainer.eos_id, trainer.eos_piece)
    if eos is None:
        raise UserError(f"{path}: it has no token that ends a text (eos_id {trainer.eos_id}); train it with one")
    pad = piece(trainer.pad_id, trainer.pad_piece)
    bos = piece(trainer.bos_id, trainer.bos_piece)
    opens = None if settings.get("add_bos_token") is False else bos
    return Roles(eos, pad or unk, bos, unk, opens, eos if settings.get("add_eos_token") is True else None)


def definition_of(proto: Any) -> dict[str, Any]:
    """The content of the tokenizer.json."""
    normalizer = proto.normalizer_spec
    vocab = {piece.piece: number for number, piece in enumerate(proto.pieces)}
    added = [special_entry(p.piece, number) for number, p in enumerate(proto.pieces) if _is_added(p)]
    words = sorted((p.piece for p in proto.pieces if p.type == USER_DEFINED and not _is_added(p)), key=len)[::-1]
    words = [word for word in words if len(word) > 1]  # a single character that no merge uses stays whole by itself
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if normalizer.add_dummy_prefix else []
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": list(_normalizers(normalizer))},
        "pre_tokenizer": _split(words) if words else None,
        "decoder": {
            "type": "Sequence",
            "decoders": [_replace({"String": SPACE}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": next(p.piece for p in proto.pieces if p.type == UNKNOWN),
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": True,
            "ignore_merges": bool(words),  # what the split leaves alone is one piece
            "vocab": vocab,
            "merges": _merges(proto),
        },
    }


def _merges(proto: Any) -> list[list[str]]:
    """Every pair of pieces that makes a piece, the best score first: SentencePiece joins any two neighbours whose
    text is a piece, and knows no list of pairs."""
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == NORMAL}
    pairs = [
        (-score, number, cut, piece)
        for number, (piece, score) in enumerate(scores.items())
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    return [[piece[:cut], piece[cut:]] for _, _, cut, piece in sorted(pairs)]


def _normalizers(spec: Any) -> Iterator[dict[str, Any]]:
    """SentencePiece's own order: the character map, spaces, U+2581 for a space, and one of it before the text.

    The tokenizers library applies the map to a whole grapheme and loses what follows the part that it finds. So text is
    composed first, and U+0001 parts graphemes while the map is applied.
    """
    composing = spec.name in _COMPOSING
    if composing:
        yield {"type": "NFC"}
        yield _replace({"Regex": rf"(?m)(?<=.)(?={_JOINING})"}, "\x01")
    if spec.precompiled_charsmap:
        yield {"type": "Precompiled", "precompiled_charsmap": b64encode(spec.precompiled_charsmap).decode("ascii")}
    if composing:
        yield _replace({"Regex": rf"\x01(?={_JOINING})"}, "")
    if spec.remove_extra_whitespaces:
        yield _replace({"Regex": r"\A +"}, "")
        yield _replace({"Regex": " {2,}"}, " ")
    yield _replace({"String": " "}, SPACE)
    if spec.remove_extra_whitespaces:
        yield _replace({"Regex": rf"{SPACE}+\z"}, "")  # at the end a U+2581 of the text's own goes too
    if spec.add_dummy_prefix:
        yield {"type": "Prepend", "prepend": SPACE}


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _split(words: list[str]) -> dict[str, Any]:
    """Cut a text at the words that stay whole; and the name of a byte that would be left alone, which is text."""
    word = "|".join(re.escape(word) for word in words)
    pattern = rf"{word}|(?<={word}|\A)<(?=0x[0-9A-F]{{2}}>(?:\z|{word}))"
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _is_added(piece: Any) -> bool:
    """Whether a piece is a control token here: one that steers, or a word of its trainer's that looks like one."""
    marker = piece.type == USER_DEFINED and is_control({"content": piece.piece, "special": False})
    return piece.type in (UNKNOWN, CONTROL) or marker


def _fault(proto: Any) -> str | None:
    """Why this model cannot become a tokenizer here, or None."""
    trainer, normalizer, kinds = proto.trainer_spec, proto.normalizer_spec, [piece.type for piece in proto.pieces]
    if not proto.pieces:
        return "not a SentencePiece model: it has no pieces"
    if trainer.model_type != _BPE:
        kind = {1: "unigram", 3: "word", 4: "character"}.get(trainer.model_type, "unknown")
        return f"a {kind} model; only BPE models with byte fallback, which can say every text, are read here"
    if not trainer.byte_fallback:
        return "a BPE model without byte fallback, so there are texts that it cannot say"
    if {p.piece for p in proto.pieces if p.type == BYTE} != {f"<0x{byte:02X}>" for byte in range(256)}:
        return "it has not one token for each byte, so there are texts that it cannot say"
    if kinds.count(UNKNOWN) != 1:
        return f"it has {kinds.count(UNKNOWN)} unknown tokens; a model has one"
    if UNUSED in kinds:
        return "some of its pieces are switched off (UNUSED), which a tokenizer.json cannot say"
    if trainer.treat_whitespace_as_suffix or not normalizer.escape_whitespaces:
        return "it writes spaces in another way than as U+2581 before a word"
    if proto.denormalizer_spec.precompiled_charsmap:
        return "it rewrites text when it decodes (a denormalizer), which a tokenizer.json cannot say"
    if not all(math.isfinite(piece.score) for piece in proto.pieces):
        return "a piece's score is not a finite number"
    if len({piece.piece for piece in proto.pieces}) != len(kinds) or not all(piece.piece for piece in proto.pieces):
        return "a piece is empty or stands twice"
    longest = max((len(piece.piece) for piece in proto.pieces if piece.type == NORMAL), default=0)
    if longest > _LONGEST:
        return f"a piece has {longest:,} characters; SentencePiece makes none of more than {_LONGEST}"
    return _map_fault(normalizer.precompiled_charsmap)


def _map_fault(blob: bytes) -> str | None:
    """Why a character map cannot be trusted, or None. It is a double array that native code walks without looking: no
    step may lead out of it, and no leaf beyond the replacements behind it."""
    if not blob:
        return None
    size = int.from_bytes(blob[:4], "little")
    if len(blob) < 4 or size % 1024 or not 0 < size < len(blob) - 4 or blob[-1] != 0:
        return "its character map is damaged"
    units = np.frombuffer(blob[4 : 4 + size], "<u4").astype(np.int64)
    leaf = units >= _LEAF
    offsets = (units >> 10) << ((units & (1 << 9)) >> 6)
    reach = (np.arange(len(units)) ^ offsets) | 0xFF  # any byte may come next
    if (reach[~leaf] >= len(units)).any() or (units[leaf] - _LEAF >= len(blob) - 4 - size).any():
        return "its character map is damaged"
    return None
