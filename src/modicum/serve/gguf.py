"""A GGUF file to be served: what it holds is read without trust, and llama.cpp is heard on it before it comes in here.

A faulty file may end the process that reads it, so another one loads it first. Its ids of texts must be those of the
tokenizer that is made of the file here, or prompts, grammars and answers would be of different tokens. Texts with the
name of a marker that llama.cpp looks for in any text are left out: here they stay text, and it is given ids alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modicum.exchange.gguf_file import read_keys
from modicum.exchange.gguf_roles import USER_DEFINED
from modicum.exchange.gguf_runtime import ask
from modicum.exchange.gguf_vocabulary import spoken_ids, tokenizer_of
from modicum.exchange.strings import agreed_strings
from modicum.store import UserError
from modicum.tokenizer import Tokenizer
from modicum.tokenizer.vocabulary import is_control

_FLOAT32 = 0  # general.file_type
_STRINGS = 1000


@dataclass(frozen=True)
class FileSizes:
    """vocab_size: the width of the logits. max_position_embeddings: the context in tokens."""

    vocab_size: int
    max_position_embeddings: int


@dataclass(frozen=True)
class GgufSource:
    """A file that llama.cpp runs. stop_ids: where it ends an answer. float32: whether its weights are, and so keys and
    values should be. cache_numbers: of keys and values that one token leaves behind, in all layers; 0 when the file
    does not say."""

    path: Path
    tokenizer: Tokenizer
    stop_ids: tuple[int, ...]
    sizes: FileSizes
    float32: bool
    cache_numbers: int


def read_source(path: Path) -> GgufSource:
    """Read and check a file. Raises UserError for one that is unsound, that llama.cpp does not load or that it spells
    in other ids, and when xllamacpp is not installed."""
    values = read_keys(path)
    try:
        tokenizer = tokenizer_of(values, str(path))
    except UserError as error:
        raise UserError(
            f"{error}\n  (--tokenizer is an option of modicum import, whose result can be served)"
        ) from None
    markers = _markers_in_text(values)
    asked = agreed_strings(tokenizer, _STRINGS, composed=True)
    strings = [text for text in asked if not any(marker in text for marker in markers)]
    answer = ask(path, texts=strings)
    ours = spoken_ids(tokenizer, strings)
    differing = [(text, a, b) for text, a, b in zip(strings, answer.ids, ours, strict=True) if a != b]
    if differing:
        text, there, here = differing[0]
        raise UserError(
            f"{path}: llama.cpp gives other ids to {len(differing)} of {len(strings)} texts than are given here, so it "
            f"cannot be served. The first text: {text[:60]!r}, {there[:12]} there, {here[:12]} here"
        )
    if not answer.ends:
        raise UserError(f"{path}: names no token that ends an answer (tokenizer.ggml.eos_token_id), so none would end")
    return GgufSource(
        path=path,
        tokenizer=tokenizer,
        stop_ids=tuple(answer.ends),
        sizes=FileSizes(answer.tokens, answer.context),
        float32=values.get("general.file_type") == _FLOAT32,
        cache_numbers=_cache_numbers(values),
    )


def _markers_in_text(values: Mapping[str, Any]) -> list[str]:
    """The control tokens that the file has as user-defined ones (Qwen's `<think>`, `<tool_call>`), which llama.cpp
    finds in every text."""
    pairs = zip(values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"], strict=True)
    return [token for token, kind in pairs if kind == USER_DEFINED and is_control({"content": token, "special": False})]


def _cache_numbers(values: Mapping[str, Any]) -> int:
    kind = values.get("general.architecture")

    def number(key: str, otherwise: int = 0) -> int:
        found = values.get(f"{kind}.{key}")
        if isinstance(found, list):  # of each layer
            found = max((one for one in found if type(one) is int), default=0)
        return found if type(found) is int else otherwise

    heads = number("attention.head_count")
    width = number("embedding_length") // heads if heads else 0
    lengths = number("attention.key_length", width) + number("attention.value_length", width)
    return number("block_count") * number("attention.head_count_kv", heads) * lengths
