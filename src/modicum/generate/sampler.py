"""From logits to a token, for rows that share their settings; every row is decided by its own numbers alone."""

import math

import torch
from torch import Tensor

# A top-p set is mostly within so many tokens. torch.topk finds them in 55 us where a sort of 16,384 takes 1,000; for
# rows that are flatter, four times as many are tried next (220 us).
_LIKELY_ENOUGH = 1024

_LIBRARY = torch.library.Library("modicum", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("sample(Tensor logits, Tensor settings) -> Tensor")  # type: ignore[no-untyped-call]


def sample(logits_RV: Tensor, settings_R5: Tensor) -> Tensor:
    """A token id (int64) for each row of float32 logits, in a kernel where there is one, which is ten times as fast.

    settings: float64 on the CPU, a row's temperature, top_k, top_p, min_p and what it is drawn by, in [0, 1).
    Temperature 0 takes the first of the largest. A row that is not finite gets any id.
    """
    ids_R: Tensor = torch.ops.modicum.sample(logits_RV, settings_R5)
    return ids_R


def penalize_repetition(logits_BV: Tensor, seen_BV: Tensor, penalty: float | Tensor) -> Tensor:
    """Keskar et al. 2019 (CTRL): where `seen_BV` (bool), positive logits over `penalty`, others times it."""
    penalized = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    return torch.where(seen_BV, penalized, logits_BV)


def probabilities(
    logits_BV: Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """The distribution (B, V, float32) that a token is drawn from; temperature above 0. Tokens at -inf get 0.

    Each filter works on what the one before left: top_k, then top_p, then min_p. Exactly k tokens survive top_k; which
    of equals at its border is `torch.topk`'s choice.
    """
    logits_BV = logits_BV.float()
    if 0 < top_k < logits_BV.shape[-1]:
        values, index = logits_BV.topk(top_k)
        logits_BV = torch.full_like(logits_BV, -torch.inf).scatter_(-1, index, values)
    # once the maximum is taken away nothing overflows, and the bounds keep 0 * inf out
    inverse = min(max(1 / temperature, 1e-30), 1e30)
    scaled_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)) * inverse
    probs_BV = scaled_BV.softmax(-1)
    if top_p < 1:
        probs_BV = probs_BV * _nucleus(probs_BV, top_p)
    if min_p > 0:
        probs_BV = probs_BV * (scaled_BV >= math.log(min_p))
    if top_p < 1 or min_p > 0:
        probs_BV = probs_BV / probs_BV.sum(-1, keepdim=True)
    return probs_BV


def draw(probs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """One token id a row (int64): the inverse of the cumulative distribution at `uniforms_B` (float64, in [0, 1)).

    A token of probability 0 is never drawn. The rows need not sum to 1.
    """
    cumulative_BV = probs_BV.cumsum(-1, dtype=torch.float64)
    # u <= 1 - 2**-53, so the product rounds to less than the total: some token always exceeds it
    target_B1 = uniforms_B[:, None] * cumulative_BV[:, -1:]
    return torch.searchsorted(cumulative_BV, target_B1, right=True)[:, 0]


def _sample(logits_RV: Tensor, settings_R5: Tensor) -> Tensor:
    """The same from the functions above, which say what it means."""
    groups: dict[tuple[float, float, float, float], list[int]] = {}
    for row, (temperature, top_k, top_p, min_p, _) in enumerate(settings_R5.tolist()):
        groups.setdefault((temperature, top_k, top_p, min_p), []).append(row)
    tokens_R = torch.zeros(len(logits_RV), dtype=torch.int64, device=logits_RV.device)
    for (temperature, top_k, top_p, min_p), rows in groups.items():
        part = logits_RV[rows]
        if temperature == 0:
            tokens_R[rows] = part.argmax(-1)
            continue
        probs = probabilities(part, temperature=temperature, top_k=int(top_k), top_p=top_p, min_p=min_p)
        tokens_R[rows] = draw(probs, settings_R5[rows, 4].to(part.device))
    # a row of NaN is drawn beyond its end
    return tokens_R.clamp_(max=logits_RV.shape[-1] - 1)


_LIBRARY.impl("sample", _sample, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


def _nucleus(probs_BV: Tensor, top_p: float, candidates: int = _LIKELY_ENOUGH) -> Tensor:
    """Mask (B, V, bool) of the fewest most probable tokens whose mass reaches top_p, never none."""
    if probs_BV.shape[-1] <= candidates:
        return _nucleus_of(probs_BV, *probs_BV.sort(descending=True), top_p)
    values, index = probs_BV.topk(candidates)
    kept_BV = _nucleus_of(probs_BV, values, index, top_p)
    flat_B = values.sum(-1, dtype=torch.float64) < top_p
    if flat_B.any():
        kept_BV[flat_B] = _nucleus(probs_BV[flat_B], top_p, 4 * candidates)
    return kept_BV


def _nucleus_of(probs_BV: Tensor, values_BK: Tensor, index_BK: Tensor, top_p: float) -> Tensor:
    before_BK = values_BK.cumsum(-1, dtype=torch.float64) - values_BK
    keep_BK = before_BK < top_p
    keep_BK[:, 0] = True
    return torch.zeros_like(probs_BV, dtype=torch.bool).scatter_(-1, index_BK, keep_BK)
