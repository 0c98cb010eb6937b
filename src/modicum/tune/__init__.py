"""Supervised fine-tuning: conversations into examples, examples into packed batches. The loop is the training room's.

The loss counts assistant turns with the token that ends them, and nothing else.
"""

from modicum.tune.conversation_rows import ConversationRows
from modicum.tune.conversations import ConversationReport, ConversationSplit, Count, load_conversations
from modicum.tune.examples import Example, Examples, collect, make_example, shorten
from modicum.tune.mask import explain_mask
from modicum.tune.rows import packed_batch, packed_batches

__all__ = [
    "ConversationReport",
    "ConversationRows",
    "ConversationSplit",
    "Count",
    "Example",
    "Examples",
    "collect",
    "explain_mask",
    "load_conversations",
    "make_example",
    "packed_batch",
    "packed_batches",
    "shorten",
]
