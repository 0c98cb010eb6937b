"""RMSNorm (Zhang & Sennrich 2019): x / rms(x), then a gain; no bias."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Normalises the last dimension in fp32, casts back, then scales; returns the dtype it was given.

    The square of an fp16 value above 255 overflows, so the statistics are fp32 whatever the input is. The order cast,
    then scale is Llama's: it is what makes bf16 results equal to transformers'.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        normal = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return (normal.to(x.dtype) * self.weight).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
