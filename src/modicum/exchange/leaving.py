"""A checkpoint as others should find it: what training and serving do around its texts here, said in its tokenizer."""

from dataclasses import replace

from modicum.checkpoint import Checkpoint
from modicum.tokenizer import Tokenizer
from modicum.tokenizer.load import template_in


def leaving(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the tokenizer to hand on: another one where it is a base model.

    Every text that one trained here read began with the token that ends one, and it is asked in this way here, so its
    tokenizer says to put that token there. And it was never taught the chat template, which its tokenizer carries for
    the tuning to come: a program that finds one asks the model in it. A base model that no training here has touched
    leaves as it came, with the template that lies in its folder alone. A chat model's template writes all that stands
    before a text.
    """
    if checkpoint.talks:
        return checkpoint
    tokenizer = checkpoint.tokenizer
    if not checkpoint.was_trained:
        template, roles = template_in(checkpoint.path), tokenizer.roles
    elif tokenizer.roles.opens is None:
        before = tokenizer.roles.before
        template, roles = None, replace(tokenizer.roles, bos=before, opens=before)
    else:
        template, roles = None, tokenizer.roles
    if (template, roles) == (tokenizer.chat_template, tokenizer.roles):
        return checkpoint
    return replace(checkpoint, tokenizer=Tokenizer(tokenizer.definition, template, roles))
