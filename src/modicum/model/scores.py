"""softmax(q kᵀ / sqrt(head_dim)) v in three ways that agree: PyTorch's kernel, query blocks, and with the weights.

All take q (B, H, T, head_dim), k and v (B, G, S, head_dim) with G dividing H and S = past + T, and return
(B, H, T, head_dim) in q's dtype. A query that may see nothing gets zeros.
"""

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop
from torch.nn.functional import scaled_dot_product_attention, softmax

from modicum.model.mask import Visibility, visible_or_zero


def attend_sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, allowed: Tensor | None, is_causal: bool, dropout: float = 0.0
) -> Tensor:
    """PyTorch's scaled_dot_product_attention. `allowed` (B or 1, 1, T, S) bool, or None where is_causal says it all."""
    grouped = q.shape[1] != k.shape[1]
    if allowed is None:
        return scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=is_causal, enable_gqa=grouped)
    # A row of only False is NaN in some kernels: let such a query see everything, then zero what it found.
    bias = allowed | ~allowed.any(-1, keepdim=True)
    out = scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, enable_gqa=grouped)
    return visible_or_zero(out, allowed)


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, *, visibility: Visibility, block: int) -> Tensor:
    """Blocks of `block` queries against the keys up to their own end: half the products of a full square.

    Written for torch.compile on a CPU, where the kernel's backward is the largest single cost of a training step.
    """
    batch, heads, length, width = q.shape
    groups = k.shape[1]
    q = q.reshape(batch, groups, heads // groups, length, width) * width**-0.5
    outs = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        keys = visibility.past + stop
        rows = q[:, :, :, start:stop].flatten(2, 3)
        scores = (rows @ k[:, :, :keys].transpose(-1, -2)).view(*q.shape[:3], stop - start, keys)
        allowed = visibility.allowed(start, stop, q.device)[:, :, None]
        weights = softmax(scores.float().masked_fill(~allowed, torch.finfo(torch.float32).min), dim=-1).to(v.dtype)
        out = (weights.flatten(2, 3) @ v[:, :, :keys]).view(*q.shape[:3], stop - start, width)
        outs.append(out if visibility.causal_only else visible_or_zero(out, allowed))
    return torch.cat(outs, dim=3).flatten(1, 2)


def attend_with_weights(
    q: Tensor, k: Tensor, v: Tensor, *, allowed: Tensor, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The same in plain steps, and the weights (B, H, T, S) before dropout; their rows sum to 1, or to 0 if masked."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    weights = softmax(scores.masked_fill(~allowed, torch.finfo(torch.float32).min), dim=-1)
    weights = visible_or_zero(weights, allowed).to(v.dtype)
    return drop(weights, dropout) @ v, weights
