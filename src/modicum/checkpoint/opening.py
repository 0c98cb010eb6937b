"""What stands before a text that a model is to go on from."""

from dataclasses import replace

from modicum.tokenizer import Tokenizer
from modicum.tokenizer.roles import OWN_ROLES


def opening_of(tokenizer: Tokenizer, *, learnt: bool = False) -> list[int]:
    """The token before a text to be continued, or none.

    It is what the tokenizer puts there by itself, or the one that ends a text where the model learnt to find it there:
    as all do whose tokenizer was made here, and others that were trained here (`learnt`). Models from elsewhere whose
    tokenizers put nothing there, as Qwen's, get nothing: so they are asked by transformers and llama.cpp.
    """
    made_here = replace(tokenizer.roles, bos=None) == OWN_ROLES
    return [tokenizer.bos_id] if tokenizer.roles.opens is not None or made_here or learnt else []
