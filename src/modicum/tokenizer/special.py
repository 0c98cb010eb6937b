"""The tokens that are not text, and the pattern that cuts text into words before BPE.

The order of SPECIAL_TOKENS is their ids in every tokenizer trained here: checkpoints depend on it.
"""

from typing import Any

EOT = "<|endoftext|>"
PAD = "<|pad|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
THOUGHT, THOUGHT_END = "<think>", "</think>"
TOOL_MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

NEEDED_TOKENS = (EOT, PAD, IM_START, IM_END, *TOOL_MARKERS)

# Matrix products over the vocabulary want a size that divides evenly.
VOCAB_MULTIPLE = 64

# Qwen2's pattern to the byte: llama.cpp and the converters know it under the name "qwen2", and they tell a
# pre-tokenizer by what it does, so one changed character makes an export unknown to them.
PRETOKENIZER_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def reserved_token(number: int) -> str:
    """A token that stands for nothing yet: a place for a later meaning, or the filling of a row without one."""
    return f"<|reserved_{number}|>"


SPECIAL_TOKENS = (*NEEDED_TOKENS, *(reserved_token(number) for number in range(16)))


def special_entry(content: str, token_id: int) -> dict[str, Any]:
    """The entry of tokenizer.json's added_tokens for a token that is matched exactly and never inside a normalizer."""
    return {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }


def next_multiple(size: int) -> int:
    """`size` rounded up to a multiple of VOCAB_MULTIPLE."""
    return -(-size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
