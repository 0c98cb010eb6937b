"""What a GGUF file says of its special tokens: which it has, what stands around a text, and where an answer ends.

What it does not say is what llama.cpp takes then, or is refused where that cannot be told.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from modicum.store import UserError
from modicum.tokenizer import Tokenizer
from modicum.tokenizer.roles import Roles, post_processor_of

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_ROLES = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
_IDS = (*_ROLES.values(), "eot")
_TYPES: dict[str, type] = {
    "tokenizer.ggml.model": str,
    "tokenizer.ggml.pre": str,
    "tokenizer.chat_template": str,
    **{f"tokenizer.ggml.{key}": bool for key in ("add_bos_token", "add_eos_token", "add_space_prefix")},
    **{f"tokenizer.ggml.{key}_token_id": int for key in _IDS},
}
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>")  # what llama.cpp takes for eot, by its text
_WORDS = {str: "text", bool: "true or false", int: "a whole number"}
_PIECES_DEFAULTS = {"bos_token": 1, "eos_token": 2}  # of llama.cpp, for files of model "llama"


def check_types(values: Mapping[str, Any], origin: str) -> None:
    """Raise UserError, `origin` in front, for keys of the tokenizer whose values are of another type."""
    faults = [
        f"{key}: expected {_WORDS[kind]}, found {str(values[key])[:60]!r}"
        for key, kind in _TYPES.items()
        if key in values and type(values[key]) is not kind
    ]
    if faults:
        raise UserError("\n".join([f"{origin}: not a tokenizer that is known here", *(f"  {f}" for f in faults)]))


def roles_of(values: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int], origin: str) -> dict[str, str]:
    """The content of tokenizer_config.json. One token for beginning and end is the end's.

    Raises UserError for an id that no token has, and where llama.cpp begins a text with a token that cannot be told.
    """
    given = {key: values.get(f"tokenizer.ggml.{key}_token_id") for key in _IDS}
    wrong = [key for key, number in given.items() if number is not None and not 0 <= number < len(tokens)]
    if wrong:
        raise UserError(f"{origin}: {', '.join(f'{key} {given[key]}' for key in wrong)} is no token's id")
    ids = {role: given[key] for role, key in _ROLES.items()}
    if values.get("tokenizer.ggml.model") == "llama":
        for role, number in _PIECES_DEFAULTS.items():
            if ids[role] is None and number < len(tokens) and kinds[number] == CONTROL:
                ids[role] = number
    if ids["bos_token"] is None and puts_bos(values):
        raise UserError(
            f"{origin}: llama.cpp puts a token before every text of this file, and no tokenizer.ggml.bos_token_id says "
            "which; add it, or set tokenizer.ggml.add_bos_token to false"
        )
    if ids["bos_token"] == ids["eos_token"]:
        del ids["bos_token"]
    return {role: tokens[number] for role, number in ids.items() if number is not None}


def puts_bos(values: Mapping[str, Any]) -> bool:
    """Whether llama.cpp puts bos before a text: what is not said is yes for pieces and Llama 3, and else no."""
    unsaid = values.get("tokenizer.ggml.model") == "llama" or values.get("tokenizer.ggml.pre") == "llama-bpe"
    return bool(values.get("tokenizer.ggml.add_bos_token", unsaid))


def around(values: Mapping[str, Any], roles: Mapping[str, str], vocab: Mapping[str, int]) -> dict[str, Any] | None:
    """The post-processor for what the file puts around a text. What is not said of its end is no."""
    eos = roles.get("eos_token")
    opens = roles.get("bos_token", eos) if puts_bos(values) else None
    closes = eos if values.get("tokenizer.ggml.add_eos_token") else None
    return post_processor_of(Roles(eos="", pad="", opens=opens, closes=closes), vocab)


def ends_of(values: Mapping[str, Any]) -> list[int]:
    """The ids at which an answer ends, eot first. A chat file that names no eot has one in llama.cpp all the same."""
    tokens, kinds = (_list(values, f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    ends = [values.get(f"tokenizer.ggml.{role}_token_id") for role in ("eot", "eos")]
    if ends[0] is None and "tokenizer.chat_template" in values:
        pairs = enumerate(zip(tokens, kinds, strict=False))
        ends[:1] = [number for number, (token, kind) in pairs if token in _TURN_ENDS and kind == CONTROL]
    return list(dict.fromkeys(number for number in ends if type(number) is int))


def check_named(values: Mapping[str, Any], tokenizer: Tokenizer, file: Path, origin: str) -> None:
    """Refuse the tokenizer of `file` for a GGUF file that has other tokens, or begins or ends texts with others."""
    tokens, kinds = (_list(values, f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    vocab: Mapping[str, int] = tokenizer.definition["model"]["vocab"]
    ours = {number: token for token, number in vocab.items()}
    unused = {number for number, kind in enumerate(kinds) if kind == UNUSED}
    faults = [
        f"id {number}: {str(token)[:40]!r} in the model's file, {str(ours.get(number, 'none'))[:40]!r} here"
        for number, token in enumerate(tokens)
        if ours.get(number) != token and (number in ours or number not in unused)
    ]
    beyond = [(number, token) for number, token in ours.items() if tokens and number >= len(tokens)]
    faults += [f"id {number}: none in the model's file, {token[:40]!r} here" for number, token in beyond]
    more = len(faults) - 5
    faults = [*faults[:5], *([f"and {more:,} more"] if more > 0 else [])]
    eos, bos = (values.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "bos"))
    if eos is not None and eos != tokenizer.eot_id:
        faults.append(f"a text ends with id {eos} by the model's file, {tokenizer.eot_id} here")
    opens = tokenizer.bos_id if tokenizer.roles.opens else None
    if bos is not None and "tokenizer.ggml.add_bos_token" in values and (bos if puts_bos(values) else None) != opens:
        faults.append(f"a text begins with id {bos if puts_bos(values) else None} by the model's file, {opens} here")
    if faults:
        heading = f"{file}: another tokenizer than that of {origin}; name the model's own, or leave --tokenizer out"
        raise UserError("\n".join([heading, *(f"  {fault}" for fault in faults)]))


def _list(values: Mapping[str, Any], key: str) -> list[Any]:
    found = values.get(key, [])
    return found if isinstance(found, list) else []
