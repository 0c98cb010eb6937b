"""Tokens on disk and on their way into the model: shards, packed windows, the stateful loader.

Text becomes ids in the tokenizer's room; what is done with a batch is the training room's affair.
"""

from modicum.data.batch import Batch, split, window_batch
from modicum.data.heldout import eval_windows
from modicum.data.index import ShardsInfo, SourceInfo
from modicum.data.loader import Loader, Rows
from modicum.data.mixture import Mixture
from modicum.data.order import Permutation, order_key
from modicum.data.prefetch import Prefetcher
from modicum.data.shards import Shards, open_shards
from modicum.data.windows import WindowRows
from modicum.data.write import write_shards

__all__ = [
    "Batch",
    "Loader",
    "Mixture",
    "Permutation",
    "Prefetcher",
    "Rows",
    "Shards",
    "ShardsInfo",
    "SourceInfo",
    "WindowRows",
    "eval_windows",
    "open_shards",
    "order_key",
    "split",
    "window_batch",
    "write_shards",
]
