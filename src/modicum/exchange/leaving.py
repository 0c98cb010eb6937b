"""A checkpoint as others should find it: what training and serving do around its texts here, said in its tokenizer."""

from dataclasses import replace

from modicum.checkpoint import Checkpoint
from modicum.tokenizer import Tokenizer


def leaving(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the tokenizer to hand on: another one where it is a base model that was trained here.

    Every text that such a model read began with the token that ends one, and it is asked in this way here, so its
    tokenizer says to put that token there. And it was never taught the chat template, which its tokenizer carries for
    the tuning to come: a program that finds one asks the model in it. A chat model's template writes all that stands
    before a text. A model that no training here has touched (none that could go on lies with it) leaves as it came.
    """
    tokenizer = checkpoint.tokenizer
    if checkpoint.talks or tokenizer.roles.opens is not None or not checkpoint.was_trained:
        return checkpoint
    before = tokenizer.roles.before
    roles = replace(tokenizer.roles, bos=before, opens=before)
    return replace(checkpoint, tokenizer=Tokenizer(tokenizer.definition, None, roles))
