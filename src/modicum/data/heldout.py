"""The windows on which a held-out loss is measured: the same ones, in the same order, every time."""

from collections.abc import Iterator

import numpy as np

from modicum.data.batch import Batch, window_batch
from modicum.data.shards import Shards


def eval_windows(
    shards: Shards,
    sequence_length: int,
    max_tokens: int,
    *,
    batch_size: int = 16,
    separate_documents: bool = True,
) -> Iterator[Batch]:
    """Batches of windows worth at most `max_tokens` inputs (but one window at least); none when the shards are empty.

    Each source gives as many windows as any other, or all it has, and takes them at even distances over its text.
    Every batch has the same number of rows; what the last one lacks is padding, which supervises nothing. How many
    targets a batch counts is its `supervised_tokens`.
    """
    rows = _chosen(shards.windows(sequence_length), max(1, max_tokens // sequence_length))
    batch_size = min(batch_size, len(rows))
    for first in range(0, len(rows), batch_size or 1):
        yield window_batch(
            shards,
            rows[first : first + batch_size],
            sequence_length=sequence_length,
            separate_documents=separate_documents,
            pad_rows_to=batch_size,
        )


def _chosen(windows: dict[str, int], budget: int) -> list[tuple[str, int]]:
    """(source, window) of the windows that the budget reaches, sources in the order of their names."""
    shares = dict.fromkeys(windows, 0)
    # the smallest sources choose first, and leave what they do not have to the larger ones
    for place, name in enumerate(sorted(windows, key=lambda name: (windows[name], name))):
        shares[name] = min(windows[name], budget // (len(windows) - place))
        budget -= shares[name]
    return [
        (name, int(window))
        for name, share in sorted(shares.items())
        for window in np.arange(share) * windows[name] // max(share, 1)
    ]
