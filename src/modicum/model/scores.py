"""softmax(q kᵀ / sqrt(head_dim)) v in three ways that agree: PyTorch's kernel, query blocks, and with the weights.

All take q (B, H, T, head_dim), k and v (B, G, S, head_dim) with G dividing H and S = past + T, and return
(B, H, T, head_dim) in q's dtype. A query that may see nothing gets zeros.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop
from torch.nn.functional import scaled_dot_product_attention, softmax

from modicum.model.mask import visible_or_zero


def attend_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    seeing: Tensor | None = None,
    is_causal: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    """PyTorch's scaled_dot_product_attention. mask and seeing: see open_blind_rows; None where nothing is masked."""
    grouped = q.shape[1] != k.shape[1]
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(q.dtype)
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal, enable_gqa=grouped
    )
    return visible_or_zero(out, seeing)


def attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, *, biases: Sequence[Tensor], seeing: Tensor | None, block: int
) -> Tensor:
    """Blocks of `block` queries against the keys up to their own end: half the products of a full square.

    Written for torch.compile on a CPU, where the backward pass of PyTorch's kernel is the largest single cost of a
    training step. `biases` and `seeing` are Visibility.biases(block). The weights are left unnormalised and their sum
    divides the narrower output instead: one pass less over the widest tensor, forward and backward.
    """
    batch, heads, length, width = q.shape
    groups = k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    q = (q * width**-0.5).reshape(batch, groups, heads // groups, length, width)
    outs = []
    for start, bias in zip(range(0, length, block), biases, strict=True):
        stop, keys = start + bias.shape[-2], bias.shape[-1]
        rows = q[:, :, :, start:stop].flatten(2, 3)
        scores = (rows @ k[:, :, :keys].transpose(-1, -2)).view(*q.shape[:3], stop - start, keys)
        scores = scores.to(wide) + bias[:, :, None]
        shares = (scores - scores.amax(-1, keepdim=True).detach()).exp()
        mixed = (shares.to(v.dtype).flatten(2, 3) @ v[:, :, :keys]).view(*q.shape[:3], stop - start, width)
        outs.append((mixed.to(wide) / shares.sum(-1, keepdim=True)).to(v.dtype))
    return visible_or_zero(torch.cat(outs, dim=3).flatten(1, 2), seeing)


def attend_with_weights(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor, seeing: Tensor, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The same in plain steps, and the weights (B, H, T, S) before dropout; their rows sum to 1, or to 0 if masked."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.transpose(-1, -2)).to(wide) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~mask, torch.finfo(wide).min) if mask.dtype == torch.bool else scores + mask
    weights = softmax(scores, dim=-1)
    weights = visible_or_zero(weights, seeing).to(v.dtype)
    return drop(weights, dropout) @ v, weights
