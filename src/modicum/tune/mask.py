"""What a conversation looks like to the loss, for a person to read."""

from itertools import groupby

from modicum.corpus import Conversation
from modicum.tokenizer import Tokenizer
from modicum.tune.examples import make_example


def explain_mask(conversation: Conversation, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """The rendered conversation in pieces, each with whether it is supervised; neighbours differ in that.

    Raises UserError as training on it would.
    """
    example = make_example(conversation, tokenizer)
    tokens = zip(example.ids, example.supervised, strict=True)
    pieces = [([token for token, _ in group], supervised) for supervised, group in groupby(tokens, key=lambda t: t[1])]
    return [(tokenizer.decode(ids), supervised) for ids, supervised in pieces]
