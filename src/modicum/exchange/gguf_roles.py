"""What a GGUF file says of its special tokens: which it has, what stands around a text, and where an answer ends.

What it does not say is what llama.cpp takes then, or is refused where that cannot be told.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from modicum.store import UserError
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
