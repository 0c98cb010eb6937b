"""SwiGLU feed-forward (Shazeer 2020): down(silu(gate(x)) * up(x))."""

from torch import Tensor, nn
from torch.nn.functional import silu

from modicum.model.config import ModelConfig
from modicum.model.linear import Linear


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(hidden, inner, bias=bias)
        self.up_proj = Linear(hidden, inner, bias=bias)
        self.down_proj = Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return out
