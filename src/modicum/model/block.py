"""One pre-norm layer: x + attention(norm(x)), then x + feed_forward(norm(x))."""

from torch import Tensor, nn

from modicum.model.attention import Attention
from modicum.model.config import ModelConfig
from modicum.model.mlp import FeedForward
from modicum.model.norm import RMSNorm
from modicum.model.plan import AttentionPlan


class DecoderBlock(nn.Module):
    """Sub-modules and their names are Hugging Face's."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x_BTD: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor | None]:
        """The residual stream (B, T, hidden) after this layer, and its attention weights where the plan wants them."""
        attended, weights = self.self_attn(self.input_layernorm(x_BTD), plan)
        x_BTD = x_BTD + attended
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD)), weights
