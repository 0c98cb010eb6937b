"""A tokenizer in the words of a GGUF file, and back: tokens, kinds, merges, special ids, and the pattern by its name.

llama.cpp knows patterns by name alone. A tokenizer whose pattern has no name there is refused: under another's name it
would give other ids.
"""

import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from modicum.exchange.gguf_pieces import BYTE_PIECE, PIECES_NAME, check_pieces, has_prefix, pieces_definition, scores
from modicum.exchange.gguf_roles import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    around,
    check_types,
    roles_of,
)
from modicum.store import UserError, write_json, write_text
from modicum.tokenizer import PRETOKENIZER_PATTERN, Tokenizer, load_tokenizer
from modicum.tokenizer.special import special_entry
from modicum.tokenizer.vocabulary import is_byte_level, is_control

Value = bool | int | float | str | list[str] | list[int] | list[float]

UNFLAGGED = "modicum.tokenizer.unflagged_ids"  # see unflagged_ids

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_LISTS = {"tokens": str, "token_type": int}
_LLAMA3 = PRETOKENIZER_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def _split(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _BYTE_LEVEL]}


# llama.cpp's name -> the pre-tokenizer that it stands for, and whether whole words are tokens without merges.
_NAMES: dict[str, tuple[dict[str, Any], bool]] = {
    "qwen2": (_split(PRETOKENIZER_PATTERN), False),
    "llama-bpe": (_split(_LLAMA3), True),
    "gpt-2": ({**_BYTE_LEVEL, "use_regex": True}, False),
    "smollm": (
        {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, {**_BYTE_LEVEL, "use_regex": True}],
        },
        False,
    ),
}


def vocabulary_metadata(tokenizer: Tokenizer, rows: int) -> dict[str, Value]:
    """The tokenizer.* keys, in order, for a model with `rows` rows in its embedding; those without a token are unused.

    Raises UserError, naming it, for what llama.cpp has no word for.
    """
    definition, roles = tokenizer.definition, tokenizer.roles
    name = pre_tokenizer_name(definition)
    ids = special_ids(tokenizer)
    model = definition["model"]
    tokens, kinds = _tokens(definition, rows)
    found: dict[str, Value] = {
        "tokenizer.ggml.model": "gpt2" if is_byte_level(definition) else "llama",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
    }
    if is_byte_level(definition):
        found["tokenizer.ggml.merges"] = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    else:
        if model.get("unk_token"):
            kinds[model["vocab"][model["unk_token"]]] = UNKNOWN
        found["tokenizer.ggml.scores"] = scores(model["merges"], tokens)
        found["tokenizer.ggml.add_space_prefix"] = has_prefix(definition)
    for role, key in (("bos", "bos"), ("eos", "eos"), ("eot", "eot"), ("pad", "padding")):
        found[f"tokenizer.ggml.{key}_token_id"] = ids[role]
    found["tokenizer.ggml.add_bos_token"] = roles.opens is not None
    found["tokenizer.ggml.add_eos_token"] = roles.closes is not None
    if roles.unk:
        found["tokenizer.ggml.unknown_token_id"] = model["vocab"][roles.unk]
    if tokenizer.chat_template:
        found["tokenizer.chat_template"] = tokenizer.chat_template
    if unflagged := unflagged_ids(tokenizer):
        found[UNFLAGGED] = unflagged
    return found


def unflagged_ids(tokenizer: Tokenizer) -> list[int]:
    """Of the control tokens those that the tokenizer does not flag as special, as Qwen3's `<think>`: an answer may say
    them, and no text becomes one. GGUF has no such kind: they are control tokens in a file, and named beside."""
    return [entry["id"] for entry in tokenizer.definition["added_tokens"] if is_control(entry) and not entry["special"]]


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """The ids of bos, eos, eot and pad. Raises UserError for what llama.cpp would put around a text and we would not.

    It takes token 11 for bos where none is named, so that without one eos stands there, which begins a text here.
    """
    roles, vocab = tokenizer.roles, tokenizer.definition["model"]["vocab"]
    bos = roles.bos or roles.opens or roles.eos
    if roles.opens not in (None, bos) or roles.closes not in (None, roles.eos):
        around = " and ".join(token for token in (roles.opens, roles.closes) if token is not None)
        raise UserError(
            f"its tokenizer puts {around} around a text; llama.cpp can put bos {bos} and eos {roles.eos} there"
        )
    return {"bos": vocab[bos], "eos": tokenizer.eot_id, "eot": tokenizer.end_of_turn_id, "pad": tokenizer.pad_id}


def spoken_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """The ids of each text as a file of this tokenizer gives them, with what stands around it."""
    ids, roles = special_ids(tokenizer), tokenizer.roles
    before = [ids["bos"]] if roles.opens is not None else []
    after = [ids["eos"]] if roles.closes is not None else []
    return [[*before, *found, *after] for found in tokenizer.encode_batch(texts)]


def pre_tokenizer_name(definition: Mapping[str, Any]) -> str:
    """What llama.cpp calls the way in which a tokenizer cuts a text. Raises UserError for one that it does not know."""
    if not is_byte_level(definition):
        check_pieces(definition)
        return PIECES_NAME
    normalizer = definition.get("normalizer")
    if normalizer is not None and normalizer.get("type") != "NFC":
        raise UserError(f"its tokenizer's normalizer ({normalizer.get('type')}) has no counterpart in llama.cpp")
    cutting = (_plain(definition.get("pre_tokenizer")), bool(definition["model"].get("ignore_merges")))
    for name, (pre_tokenizer, whole) in _NAMES.items():
        if cutting == (_plain(pre_tokenizer), whole):
            return name
    kinds = _kinds(definition.get("pre_tokenizer"))
    raise UserError(
        f"its tokenizer cuts text in a way that llama.cpp has no name for here (pre-tokenizer {kinds}); those that are "
        f"known: {', '.join(_NAMES)}"
    )


def tokenizer_of(values: Mapping[str, Any], origin: str) -> Tokenizer:
    """The tokenizer of a file's keys. Raises UserError, `origin` in front, for one that is of no known kind."""
    check_types(values, origin)
    tokens, kinds = (_listed(values, f"tokenizer.ggml.{key}", kind, origin) for key, kind in _LISTS.items())
    model, name = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.pre")
    if model != "llama" and (model != "gpt2" or name not in _NAMES):
        raise UserError(
            f"{origin}: a tokenizer of model {str(model)[:40]!r}, pre-tokenizer {str(name)[:40]!r}; llama is read, and "
            f"gpt2 with {', '.join(_NAMES)}. Name the model's own tokenizer.json or tokenizer.model with --tokenizer"
        )
    strange = sorted({kind for kind in kinds if not NORMAL <= kind <= BYTE})
    if strange:
        raise UserError(f"{origin}: tokenizer.ggml.token_type: {strange[0]} is no kind of token; 1 to 6 are")
    used = {token: number for number, token in enumerate(tokens) if number < len(kinds) and kinds[number] != UNUSED}
    if len(kinds) != len(tokens) or len(used) != sum(kind != UNUSED for kind in kinds):
        raise UserError(f"{origin}: {len(tokens):,} tokens with {len(kinds):,} kinds, or one token stands twice")
    unflagged = set(_listed(values, UNFLAGGED, int, origin)) if UNFLAGGED in values else set()
    added = [
        {**special_entry(token, number), "special": _is_special(token, kinds[number], number in unflagged)}
        for token, number in used.items()
        if kinds[number] in (CONTROL, UNKNOWN, USER_DEFINED)
    ]
    if model == "llama":
        given = _listed(values, "tokenizer.ggml.scores", float, origin)
        if not all(map(math.isfinite, given)):
            raise UserError(f"{origin}: tokenizer.ggml.scores: holds NaN or infinity")
        prefix = values.get("tokenizer.ggml.add_space_prefix", True)
        definition = pieces_definition(used, [kind == NORMAL for kind in kinds], given, prefix, origin)
        unknown = [token for token, number in used.items() if kinds[number] == UNKNOWN]
        definition["model"]["unk_token"] = unknown[0] if unknown else None
    else:
        merges = _listed(values, "tokenizer.ggml.merges", str, origin)
        pre_tokenizer, whole = _NAMES[str(name)]
        definition = _byte_level_definition(used, merges, pre_tokenizer, whole)
    definition["added_tokens"] = added
    roles = roles_of(values, tokens, kinds, origin)
    definition["post_processor"] = around(values, roles, definition["model"]["vocab"])
    with tempfile.TemporaryDirectory(prefix="modicum-") as place:
        write_json(Path(place) / "tokenizer.json", definition)
        write_json(Path(place) / "tokenizer_config.json", roles)
        if "tokenizer.chat_template" in values:
            write_text(Path(place) / "chat_template.jinja", values["tokenizer.chat_template"])
        try:
            return load_tokenizer(Path(place), missing="keep")
        except UserError as error:
            raise UserError(
                str(error).replace(str(Path(place) / "tokenizer.json"), f"{origin}: its tokenizer")
            ) from None


def _is_special(token: str, kind: int, unflagged: bool) -> bool:
    """Whether a token is flagged so. One without the look of a marker would be text if it were not."""
    return kind != USER_DEFINED and not (unflagged and is_control({"content": token, "special": False}))


def _byte_level_definition(
    vocab: Mapping[str, int], merges: Sequence[str], pre_tokenizer: Mapping[str, Any], whole: bool
) -> dict[str, Any]:
    return {
        "version": "1.0",
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "decoder": {**_BYTE_LEVEL, "add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": whole,
            "vocab": vocab,
            "merges": [merge.split(" ") for merge in merges],
        },
    }


def _listed(values: Mapping[str, Any], key: str, kind: type, origin: str) -> list[Any]:
    found = values.get(key)
    if not isinstance(found, list) or not all(type(item) is kind for item in found):
        raise UserError(f"{origin}: {key}: expected a list of {kind.__name__}; it has none, or another")
    return found


def _tokens(definition: Mapping[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """The text and the kind of every row."""
    texts = {number: token for token, number in definition["model"]["vocab"].items()}
    added = {entry["id"]: CONTROL if is_control(entry) else USER_DEFINED for entry in definition["added_tokens"]}
    tokens = [texts.get(number, f"[PAD{number}]") for number in range(rows)]
    pieces = not is_byte_level(definition)
    kinds = [_kind(texts.get(number), added.get(number), pieces) for number in range(rows)]
    return tokens, kinds


def _kind(text: str | None, added: int | None, pieces: bool) -> int:
    if text is None:
        return UNUSED
    return added or (BYTE if pieces and BYTE_PIECE.fullmatch(text) else NORMAL)


def _plain(part: Any) -> Any:
    """A part of a tokenizer.json without what decides no id."""
    if isinstance(part, Mapping):
        return {key: _plain(value) for key, value in part.items() if key != "trim_offsets"}
    return [_plain(value) for value in part] if isinstance(part, list) else part


def _kinds(part: Any) -> str:
    if not isinstance(part, Mapping):
        return "none"
    inner = part.get("pretokenizers")
    return " + ".join(_kinds(one) for one in inner) if isinstance(inner, list) else str(part.get("type"))
