"""The core dialect: `TransformerBlock(config)` over PyTorch's own attention kernel, interleaved rotary pairs.

`LanguageModel` is the whole model of such blocks. The original had no cache; here every call takes one if it is given.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from modicum.dialects.cache import KVCache, Pair
from modicum.dialects.parts import (
    STD,
    StrictModule,
    WholeModel,
    alias,
    check_length,
    interleaved_settings,
    read_config,
    rename,
    shared_rope,
)
from modicum.model import ModelConfig as Settings
from modicum.model import RMSNorm as Norm
from modicum.model.attention import Attention
from modicum.model.config import feed_forward_width
from modicum.model.frequencies import rotary_frequencies
from modicum.model.init import init_weights
from modicum.model.linear import Embedding, Linear
from modicum.model.mask import Visibility
from modicum.model.mlp import FeedForward
from modicum.model.plan import AttentionPlan, make_plan
from modicum.model.rotary import RotaryEmbedding as Rotary
from modicum.model.rotary import rotate, spread
from modicum.model.values import is_whole, shown
from modicum.store import UserError

__all__ = [
    "CausalSelfAttention",
    "KVCache",
    "LanguageModel",
    "ModelConfig",
    "RMSNorm",
    "RotaryEmbedding",
    "SwiGLUMLP",
    "TransformerBlock",
    "config_from_dict",
    "model_config",
]


@dataclass
class ModelConfig:
    """Sizes and switches. `dropout` acts on attention weights and on what attention and feed-forward give back.

    tie_weights is ours: the head is then the embedding.
    """

    n_embd: int = 384
    n_head: int = 6
    n_layer: int = 12
    vocab_size: int = 32_000
    block_size: int = 1024
    dropout: float = 0.0
    bias: bool = False
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    ffn_dim_multiplier: float | None = None
    multiple_of: int = 256
    tie_weights: bool = False


def model_config(config: ModelConfig) -> Settings:
    """modicum's own settings of the same model. Dropout on the residual stream, which only trains, has none there.

    ValueError where n_head does not divide n_embd or leaves an odd head size, UserError for every other fault.
    """
    if not is_whole(config.n_embd) or not is_whole(config.n_head) or config.n_embd % config.n_head:
        raise ValueError(f"n_embd {shown(config.n_embd)} is not divisible by n_head {shown(config.n_head)}")
    _check_even(config.n_embd // config.n_head)
    return interleaved_settings(
        vocab_size=config.vocab_size,
        hidden_size=config.n_embd,
        num_hidden_layers=config.n_layer,
        num_attention_heads=config.n_head,
        intermediate_size=feed_forward_width(config.n_embd, config.ffn_dim_multiplier, config.multiple_of),
        max_position_embeddings=config.block_size,
        rope_theta=config.rope_theta,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tie_weights,
        attention_dropout=config.dropout,
        bias=config.bias,
    )


def config_from_dict(values: Mapping[str, Any]) -> ModelConfig:
    """A valid config from plain values. UserError lists unknown and missing keys, or what is wrong with the values.

    dropout, ffn_dim_multiplier, multiple_of and tie_weights may be missing.
    """
    config = read_config(ModelConfig, values, {"dropout", "ffn_dim_multiplier", "multiple_of", "tie_weights"})
    try:
        model_config(config)
    except ValueError as error:
        raise UserError(f"the config is not that of a core ModelConfig: {error}") from None
    return config


def _check_even(head_dim: int) -> None:
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim must be even and at least 2, not {head_dim}: rotary embedding turns pairs")


class RMSNorm(Norm):
    """x / rms(x) with a gain, in fp32 whatever the dtype is."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__(dim, eps)


class RotaryEmbedding(Rotary):
    """Rotary positions in interleaved pairs (2i, 2i + 1). inv_freq is in no state dict and keeps its fp32."""

    inv_freq: Tensor
    frequencies = alias("inv_freq")

    def __init__(self, head_dim: int, theta: float = 10_000.0) -> None:
        _check_even(head_dim)
        nn.Module.__init__(self)
        self.layout = "interleaved"
        self.factor = 1.0
        self.register_buffer("inv_freq", rotary_frequencies(head_dim, theta, None, 0)[0], persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> "RotaryEmbedding":
        # the device follows the model's and the dtype does not: frequencies rounded by .half() turn far tokens wrongly
        exact = self.inv_freq
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.inv_freq = exact.to(self.inv_freq.device)
        return self

    def get_cos_sin(
        self, seq_len: int, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
    ) -> Pair:
        """cos and sin of each pair at positions 0..seq_len-1: two (1, 1, seq_len, head_dim/2) of `dtype`.

        device: that of inv_freq where None.
        """
        device = self.inv_freq.device if device is None else device
        positions = torch.arange(seq_len, device=device, dtype=torch.float32)
        angles = (positions[:, None] * self.inv_freq.to(device))[None, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)

    @staticmethod
    def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Turn each pair of (B, H, T, head_dim) by its angle, in fp32; returns x's dtype."""
        return rotate(x, *spread(cos.float(), sin.float(), "interleaved"), "interleaved")

    def forward(self, q: Tensor, k: Tensor) -> Pair:  # type: ignore[override]  # the dialect's call
        """Queries and keys (B, H, T, head_dim), turned for positions 0..T-1."""
        cos, sin = self.get_cos_sin(q.shape[2], q.device, torch.float32)
        return self.apply_rope(q, cos, sin), self.apply_rope(k, cos, sin)


class CausalSelfAttention(StrictModule, Attention):
    """Projections q_proj, k_proj, v_proj, out_proj, their rows in interleaved pairs."""

    o_proj = alias("out_proj")

    def __init__(self, config: ModelConfig, layer_idx: int | None = None, rope: Rotary | None = None) -> None:
        settings = model_config(config)
        super().__init__(settings, 0 if layer_idx is None else layer_idx)
        rename(self, o_proj="out_proj")
        self.layer_idx = layer_idx
        self.rope = shared_rope(rope or RotaryEmbedding(settings.head_dim, config.rope_theta), settings)
        self.residual_dropout = config.dropout
        init_weights(self, std=STD, layers=config.n_layer)

    def forward(  # type: ignore[override]  # the dialect's call
        self, x: Tensor, cache: KVCache | None = None, *, plan: AttentionPlan | None = None
    ) -> Tensor:
        """As TransformerBlock's, for the attention alone."""
        if plan is None:
            part = None if cache is None else _Part(cache, self if self.layer_idx is None else self.layer_idx)
            past = 0 if part is None else part.cache.length_of(part.key)
            plan = make_plan(self.rope, x, Visibility(past, x.shape[1]), cache=part)
        return dropout(super().forward(x, plan)[0], self.residual_dropout, self.training)


@dataclass(frozen=True)
class _Part:
    """One block's part of a cache. A block without a number is its own key, so that no two can share a part."""

    cache: KVCache
    key: Hashable

    def append(self, layer: int, k_BHTK: Tensor, v_BHTK: Tensor) -> Pair:  # noqa: ARG002  # the key stands for it
        return self.cache.append(self.key, k_BHTK, v_BHTK)


class SwiGLUMLP(StrictModule, FeedForward):
    """down_proj(silu(gate_proj(x)) * up_proj(x)), as wide as the config's rule says."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(model_config(config))
        self.residual_dropout = config.dropout
        init_weights(self, std=STD, layers=config.n_layer)

    def forward(self, x: Tensor) -> Tensor:
        return dropout(super().forward(x), self.residual_dropout, self.training)


class TransformerBlock(StrictModule):
    """x + attn(attn_norm(x)), then x + mlp(ffn_norm(x))."""

    def __init__(self, config: ModelConfig, layer_idx: int | None = None, rope: Rotary | None = None) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.n_embd, config.norm_eps)
        self.ffn_norm = RMSNorm(config.n_embd, config.norm_eps)
        self.attn = CausalSelfAttention(config, layer_idx, rope)
        self.mlp = SwiGLUMLP(config)

    def forward(self, x: Tensor, cache: KVCache | None = None, *, plan: AttentionPlan | None = None) -> Tensor:
        """x (B, T, n_embd) after this layer.

        cache: what it holds of this block comes before x, and x is added to it. One cache serves all blocks of a model,
        numbered by layer_idx or not. plan: made once for all numbered layers, instead of the cache.
        """
        x = x + self.attn(self.attn_norm(x), cache, plan=plan)
        return cast(Tensor, x + self.mlp(self.ffn_norm(x)))


class LanguageModel(WholeModel):
    """The language model: embedding, layers, norm, and lm_head unless it is tied."""

    table = "embedding"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.n_embd)
        self.rope = RotaryEmbedding(model_config(config).head_dim, config.rope_theta)
        self.layers = nn.ModuleList(TransformerBlock(config, layer, self.rope) for layer in range(config.n_layer))
        self.norm = RMSNorm(config.n_embd, config.norm_eps)
        self.lm_head = None if config.tie_weights else Linear(config.n_embd, config.vocab_size, bias=False)
        init_weights(self, std=STD, layers=config.n_layer)

    def forward(self, input_ids: Tensor, cache: KVCache | None = None) -> Tensor:
        """Logits (B, T, V) of ids (B, T) int64, after what the cache holds; it takes them in.

        UserError for an id outside the vocabulary, a sequence beyond block_size and a full cache.
        """
        x, past = self.embed(input_ids), 0 if cache is None else cache.length
        check_length(past + x.shape[1], self.config.block_size, "block_size")
        plan = make_plan(self.rope, x, Visibility(past, x.shape[1]), cache=cache)
        for block in self.layers:
            x = block(x, plan=plan)
        return self.head(self.norm(x))
