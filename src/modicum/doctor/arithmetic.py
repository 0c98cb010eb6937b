"""Properties that every decoder must have on the device it runs on, probed with random ids.

A kernel that lets the future leak, a cache that is off by one or documents that see each other all run without an error
and only make the model worse; here each has a probe.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor

from modicum.doctor.finding import Finding, judged
from modicum.model import Decoder, KVCache

# Largest difference of a logit between two ways to compute it in fp32. Logits of a fresh model are of the order of 1, a
# trained one's of 10; a wrong mask or position moves them by more than 0.01.
TOLERANCE = 2e-3


def probe_all(model: Decoder) -> list[Finding]:
    """All probes of this model, in evaluation mode, on its own device. Lengths fit its max_position_embeddings."""
    was_training = model.training
    model.eval()
    try:
        probes = (causality, causality_with_cache, cache_against_full, packed_against_separate)
        return [probe(model) for probe in probes]
    finally:
        model.train(was_training)


def causality(model: Decoder) -> Finding:
    """A later token may not change an earlier logit: both kernels, in fp32 and as training does in bf16, bit for bit.

    Both forward passes have equal shapes, so equal inputs give equal bits; a tolerance would hide a small leak.
    """
    ways = [(kernel, dtype) for kernel in ("sdpa", "blocks") for dtype in (torch.float32, torch.bfloat16)]
    return _causality("causality", model, model, ways)


def causality_with_cache(model: Decoder) -> Finding:
    """The same when the tokens come in three pieces through a cache, with the changed one in each of them in turn."""

    def in_pieces(ids: Tensor) -> Tensor:
        length = ids.shape[1]
        return _cached(model, ids, [length // 4, 3 * length // 4])

    return _causality("causality with a cache", model, in_pieces, [("sdpa", torch.float32)])


def _causality(
    name: str, model: Decoder, logits_of: Callable[[Tensor], Tensor], ways: list[tuple[str, torch.dtype]]
) -> Finding:
    ids = _random_ids(model, rows=2)
    length = ids.shape[1]
    for kernel, dtype in ways:
        how = f"{kernel} attention, {str(dtype).removeprefix('torch.')}"
        autocast = torch.autocast(ids.device.type, dtype, enabled=dtype != torch.float32)
        with _attention(model, kernel), torch.no_grad(), autocast:
            before = logits_of(ids)
            for place in sorted({1, length // 2, length - 1}):
                changed = ids.clone()
                changed[:, place] = (changed[:, place] + 1) % model.config.vocab_size
                moved = (logits_of(changed) - before).abs().amax((0, 2))
                if moved[:place].any():
                    leak = int(moved[:place].nonzero()[0])
                    return judged(name, False, f"token {place} of {length} changed the logits at place {leak} ({how})")
                if not moved[place] > 0:
                    return judged(name, False, f"token {place} does not change its own logits: nothing was probed")
    kernels = ", ".join(f"{kernel} {str(dtype).removeprefix('torch.')}" for kernel, dtype in ways)
    return judged(name, True, f"{length} tokens, none changes an earlier logit ({kernels})")


def cache_against_full(model: Decoder) -> Finding:
    """Logits of tokens that come one by one through the cache, against those of one full pass."""
    ids = _random_ids(model, rows=2)
    length = ids.shape[1]
    with torch.no_grad(), _attention(model, "sdpa"):
        full = model(ids)
        start = max(1, length - 24)
        cached = _cached(model, ids, list(range(start, length)))
    return _compared("cache against full", full, cached, f"{start} tokens at once, then {length - start} one by one")


def packed_against_separate(model: Decoder) -> Finding:
    """Two documents packed into one row give the logits that each gives alone, in both kernels."""
    ids = _random_ids(model, rows=1)
    length = ids.shape[1]
    cut = max(1, length * 2 // 5)
    documents = (torch.arange(length, device=ids.device) >= cut).int()[None]
    with torch.no_grad():
        with _attention(model, "sdpa"):
            apart = torch.cat([model(ids[:, :cut]), model(ids[:, cut:])], dim=1)
        for kernel in ("sdpa", "blocks"):
            with _attention(model, kernel):
                packed = model(ids, documents=documents)
            finding = _compared(
                "packed against separate", apart, packed, f"documents of {cut} and {length - cut} tokens"
            )
            if finding.outcome != "ok":
                break
    return finding


def _compared(name: str, expected: Tensor, found: Tensor, what: str) -> Finding:
    difference = float((expected - found).abs().max())
    return judged(name, difference < TOLERANCE, f"{what}: logits differ by at most {difference:.1e}")


def _cached(model: Decoder, ids: Tensor, cuts: list[int]) -> Tensor:
    """Logits of all tokens, read through one cache in pieces that end at `cuts` and at the end."""
    rows, length = ids.shape
    cache = KVCache(model.config, rows, length, dtype=model.dtype, device=model.device)
    edges = sorted({0, *cuts, length})
    pieces = [model(ids[:, start:stop], cache=cache) for start, stop in pairwise(edges)]
    return torch.cat(pieces, dim=1)


def _random_ids(model: Decoder, rows: int) -> Tensor:
    """(rows, length) ids, long enough for two blocks of the training kernel where the model's positions allow it."""
    length = min(model.config.max_position_embeddings, 160)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (rows, length), generator=generator)
    return ids.to(model.device)


@contextmanager
def _attention(model: Decoder, kernel: str) -> Iterator[None]:
    before = model.attention_impl
    model.attention_impl = kernel  # type: ignore[assignment]
    try:
        yield
    finally:
        model.attention_impl = before
