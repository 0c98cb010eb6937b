"""Causal self-attention with grouped keys and values, optional QK-norm and biases, rotary positions and a cache."""

from torch import Tensor, nn

from modicum.model.config import ModelConfig
from modicum.model.linear import Linear
from modicum.model.norm import RMSNorm
from modicum.model.plan import AttentionPlan
from modicum.model.rotary import rotate
from modicum.model.scores import attend_blocks, attend_sdpa, attend_with_weights


class Attention(nn.Module):
    """Sub-modules and their names are Hugging Face's. Dropout acts on the weights, and only while training."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.layout = config.rotary_layout
        self.dropout = config.attention_dropout
        hidden, bias = config.hidden_size, config.attention_bias
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(hidden, queries, bias=bias)
        self.k_proj = Linear(hidden, keys, bias=bias)
        self.v_proj = Linear(hidden, keys, bias=bias)
        self.o_proj = Linear(queries, hidden, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x_BTD: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor | None]:
        """(B, T, hidden) of the same shape, and the weights (B, H, T, S) where the plan asks for them."""
        # one product with the three matrices joined, and gate with up, measured 2 % slower: 3.42 against 3.36 s for a
        # step of 8192 tokens through 8 layers of width 256
        q, k, v = (self._heads(part(x_BTD)) for part in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, plan.cos, plan.sin, self.layout), rotate(k, plan.cos, plan.sin, self.layout)
        if plan.slots is not None:
            out = plan.slots.attend(self.layer, q, k, v)
            return self.o_proj(out.transpose(1, 2).flatten(2)), None
        if plan.cache is not None:
            k, v = plan.cache.append(self.layer, k, v)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if plan.implementation == "weights":
            assert plan.mask is not None
            assert plan.seeing is not None
            out, weights = attend_with_weights(q, k, v, mask=plan.mask, seeing=plan.seeing, dropout=dropout)
        elif plan.implementation == "blocks":
            out = attend_blocks(q, k, v, biases=plan.biases, seeing=plan.seeing, block=plan.block)
        else:
            out = attend_sdpa(q, k, v, mask=plan.mask, seeing=plan.seeing, is_causal=plan.is_causal, dropout=dropout)
        return self.o_proj(out.transpose(1, 2).flatten(2)), weights

    def _heads(self, x_BTE: Tensor) -> Tensor:
        """(B, T, heads * head_dim) -> (B, heads, T, head_dim)."""
        return x_BTE.view(*x_BTE.shape[:2], -1, self.head_dim).transpose(1, 2)
