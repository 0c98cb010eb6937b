"""A SentencePiece tokenizer in a GGUF file: pieces with scores instead of merges, and spaces as U+2581.

llama.cpp changes nothing in a text but its spaces. A model that normalizes (NFKC, or runs of spaces to one, which is
what SentencePiece does unless told not to) would give other ids there, and is refused.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from modicum.store import UserError

PIECES_NAME = "default"  # llama.cpp asks for a pre-tokenizer's name here too, and uses none
BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
_SPACE = "\u2581"
_TO_PIECES = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
_PREFIX = {"type": "Prepend", "prepend": _SPACE}
_LONGEST = 512
_MOST_MERGES = 1 << 22


def check_pieces(definition: Mapping[str, Any]) -> None:
    """Raise UserError, naming it, for what such a tokenizer does to a text and llama.cpp does not."""
    steps = _steps(definition.get("normalizer"))
    others = [step for step in steps if step not in (_TO_PIECES, _PREFIX)]
    if others:
        named = sorted({str(step.get("type")) for step in others})
        raise UserError(
            f"its SentencePiece tokenizer changes texts before it cuts them ({', '.join(named)}); llama.cpp would give "
            "other ids. Train one with normalization_rule_name=identity and remove_extra_whitespaces=false"
        )
    if _TO_PIECES not in steps or definition.get("pre_tokenizer") is not None:
        raise UserError("its SentencePiece tokenizer keeps words whole or spaces as they are; llama.cpp does not")


def has_prefix(definition: Mapping[str, Any]) -> bool:
    """Whether a space is written before every text."""
    return _PREFIX in _steps(definition.get("normalizer"))


def scores(merges: Sequence[Any], tokens: Sequence[str]) -> list[float]:
    """A score a token: the sooner a piece is made by merging, the higher. Those that no merge makes come last."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault("".join(merge.split(" ") if isinstance(merge, str) else merge), rank)
    return [-float(ranks.get(token, len(merges))) for token in tokens]


def pieces_definition(
    vocab: Mapping[str, int], normal: Sequence[bool], given: Sequence[float], prefix: bool, origin: str
) -> dict[str, Any]:
    """The content of a tokenizer.json but for its added tokens. normal: of each id, whether it is text. given: scores.

    Raises UserError, `origin` in front, for scores that belong to other tokens, a piece too long to be one, and more
    merges than a vocabulary has.
    """
    if len(given) != len(normal):
        raise UserError(f"{origin}: {len(normal):,} tokens with {len(given):,} scores")
    pieces = {piece: given[number] for piece, number in vocab.items() if normal[number]}
    longest = max(map(len, pieces), default=0)
    if longest > _LONGEST:
        raise UserError(f"{origin}: a piece has {longest:,} characters; no more than {_LONGEST} are read")
    cuts = (
        (-score, vocab[piece], cut, piece)
        for piece, score in pieces.items()
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    )
    pairs = list(islice(cuts, _MOST_MERGES + 1))
    if len(pairs) > _MOST_MERGES:
        raise UserError(f"{origin}: its pieces are made of each other in more than {_MOST_MERGES:,} ways")
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    to_text = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    return {
        "version": "1.0",
        "normalizer": {"type": "Sequence", "normalizers": [_TO_PIECES, *([_PREFIX] if prefix else [])]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [to_text, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": dict(vocab),
            "merges": [[piece[:cut], piece[cut:]] for _, _, cut, piece in sorted(pairs)],
        },
    }


def _steps(normalizer: Any) -> list[Any]:
    if not isinstance(normalizer, Mapping):
        return []
    return list(normalizer["normalizers"]) if normalizer.get("type") == "Sequence" else [normalizer]
