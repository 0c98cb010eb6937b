"""The slm dialect: explicit position ids, any mask that broadcasts, one cache object for all layers.

`DecoderBlock(config, layer_idx)` is what its users' scripts call; `SLM` is the whole model of such blocks. No state
crosses layers but through the cache, whose tensors can be flat inputs and outputs of an exported graph.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from modicum.dialects.cache import KVCache
from modicum.dialects.parts import StrictModule, WholeModel, check_length, read_config, shared_rope
from modicum.model import ModelConfig, RMSNorm
from modicum.model.attention import Attention
from modicum.model.init import init_weights
from modicum.model.linear import Embedding, Linear
from modicum.model.mask import Visibility, split_mask
from modicum.model.mlp import FeedForward as SwiGLU
from modicum.model.plan import AttentionPlan, make_plan
from modicum.model.rotary import RotaryEmbedding as Rotary
from modicum.model.values import is_whole
from modicum.store import UserError

__all__ = [
    "SLM",
    "DecoderBlock",
    "FeedForward",
    "KVCache",
    "MultiHeadAttention",
    "RMSNorm",
    "RotaryEmbedding",
    "SLMConfig",
    "config_from_dict",
    "model_config",
]


@dataclass
class SLMConfig:
    """Sizes and switches under Hugging Face's names. num_key_value_heads and head_dim are filled in where None."""

    vocab_size: int = 32_000
    hidden_size: int = 512
    intermediate_size: int = 1408
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: float = 0.0
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None and is_whole(self.hidden_size) and is_whole(self.num_attention_heads):
            self.head_dim = self.hidden_size // self.num_attention_heads


def model_config(config: SLMConfig) -> ModelConfig:
    """modicum's own settings of the same model. UserError names every fault at once."""
    derived = {name: 0 for name in ("num_key_value_heads", "head_dim") if getattr(config, name) is None}
    return ModelConfig(**{**asdict(config), **derived, "rotary_layout": "half"})


def config_from_dict(values: Mapping[str, Any]) -> SLMConfig:
    """A valid config from plain values. UserError lists unknown and missing keys, or every fault of the values.

    num_key_value_heads, head_dim, attention_dropout and initializer_range may be missing.
    """
    optional = {"num_key_value_heads", "head_dim", "attention_dropout", "initializer_range"}
    config = read_config(SLMConfig, values, optional)
    model_config(config)
    return config


class RotaryEmbedding(Rotary):
    """The rotary table in the half layout; one can serve all layers."""

    def __init__(self, config: SLMConfig) -> None:
        super().__init__(model_config(config))


class MultiHeadAttention(StrictModule, Attention):
    """Projections q_proj, k_proj, v_proj, o_proj; keys and values may be grouped."""

    def __init__(self, config: SLMConfig, layer_idx: int, rope: Rotary | None = None) -> None:
        settings = model_config(config)
        super().__init__(settings, layer_idx)
        self.config = config
        self.rope = shared_rope(rope, settings)
        init_weights(self, std=config.initializer_range, layers=config.num_hidden_layers)

    def forward(  # type: ignore[override]  # the dialect's call
        self,
        hidden_states: Tensor,
        position_ids: Tensor | None,
        attention_mask: Tensor | None = None,
        kv_cache: KVCache | None = None,
        use_cache: bool = False,
        *,
        plan: AttentionPlan | None = None,
    ) -> tuple[Tensor, KVCache | None]:
        """As DecoderBlock's, for the attention alone."""
        if plan is None:
            kv_cache = KVCache() if kv_cache is None and use_cache else kv_cache
            past = 0 if kv_cache is None else kv_cache.length_of(self.layer)
            plan = masked_plan(
                self.rope,
                self.config,
                hidden_states,
                position_ids,
                past=past,
                attention_mask=attention_mask,
                kv_cache=kv_cache,
                use_cache=use_cache,
            )
        return super().forward(hidden_states, plan)[0], kv_cache


class FeedForward(StrictModule, SwiGLU):
    """down_proj(silu(gate_proj(x)) * up_proj(x))."""

    def __init__(self, config: SLMConfig) -> None:
        super().__init__(model_config(config))
        init_weights(self, std=config.initializer_range, layers=config.num_hidden_layers)


class DecoderBlock(StrictModule):
    """hidden + self_attn(input_layernorm(hidden)), then hidden + mlp(post_attention_layernorm(hidden))."""

    def __init__(self, config: SLMConfig, layer_idx: int, rope: Rotary | None = None) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = MultiHeadAttention(config, layer_idx, rope)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(
        self,
        hidden_states: Tensor,
        position_ids: Tensor | None,
        attention_mask: Tensor | None = None,
        kv_cache: KVCache | None = None,
        use_cache: bool = False,
        *,
        plan: AttentionPlan | None = None,
    ) -> tuple[Tensor, KVCache | None]:
        """hidden_states (B, T, hidden) after this layer, and the cache (a new one if use_cache and none was given).

        position_ids: (B or 1, T) int64, each row its own; None goes on from the cache.
        attention_mask: bool (true is seen) or added to the scores, broadcastable to (B, heads, T, past+T); causality
        holds beside it, and a row that sees nothing gives zeros.
        kv_cache: what it holds of this layer is seen; this pass is added to it only with use_cache.
        plan: made once for all layers (masked_plan), instead of position_ids, attention_mask and use_cache.
        """
        attended, kv_cache = self.self_attn(
            self.input_layernorm(hidden_states), position_ids, attention_mask, kv_cache, use_cache, plan=plan
        )
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states)), kv_cache

    def extra_repr(self) -> str:
        return f"layer_idx={self.layer_idx}"


class SLM(WholeModel):
    """The language model: embed_tokens, layers, norm, and lm_head unless it is tied."""

    table = "embed_tokens"

    def __init__(self, config: SLMConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rope = RotaryEmbedding(config)
        self.layers = nn.ModuleList(DecoderBlock(config, layer, self.rope) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size, bias=False)
        init_weights(self, std=config.initializer_range, layers=config.num_hidden_layers)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        kv_cache: KVCache | None = None,
        use_cache: bool = False,
    ) -> Any:
        """Logits (B, T, V) of ids (B, T) int64; with use_cache also the cache.

        Positions, masks and caches are DecoderBlock's; without position_ids the tokens stand after the cached ones.
        UserError for an id outside the vocabulary, a sequence beyond max_position_embeddings and a full cache.
        """
        x = self.embed(input_ids)
        kv_cache = KVCache() if kv_cache is None and use_cache else kv_cache
        past = 0 if kv_cache is None else kv_cache.length
        check_length(past + x.shape[1], self.config.max_position_embeddings, "max_position_embeddings")
        plan = masked_plan(
            self.rope,
            self.config,
            x,
            position_ids,
            past=past,
            attention_mask=attention_mask,
            kv_cache=kv_cache,
            use_cache=use_cache,
        )
        for block in self.layers:
            x, _ = block(x, position_ids, plan=plan)
        logits = self.head(self.norm(x))
        return (logits, kv_cache) if use_cache else logits


def masked_plan(
    rope: Rotary,
    config: SLMConfig,
    x: Tensor,
    position_ids: Tensor | None = None,
    *,
    past: int = 0,
    attention_mask: Tensor | None = None,
    kv_cache: KVCache | None = None,
    use_cache: bool = False,
) -> AttentionPlan:
    """The plan of x (B, T, hidden) after `past` cached tokens, where it stands without position_ids.

    ValueError for positions or a mask that do not fit; outside of compiled code UserError for a position that the model
    has not.
    """
    batch, length = x.shape[:2]
    if position_ids is None:
        position_ids = torch.arange(past, past + length, device=x.device)[None]
    else:
        _check_positions(position_ids, batch, length, config.max_position_embeddings)
    own, added = None, None
    if attention_mask is not None:
        heads = config.num_attention_heads
        own, added = split_mask(attention_mask, batch=batch, heads=heads, length=length, past=past)
    cache = kv_cache if kv_cache is None or use_cache else kv_cache.fork()
    return make_plan(rope, x, Visibility(past, length, own=own, added=added), positions=position_ids, cache=cache)


def _check_positions(ids: Tensor, batch: int, length: int, limit: int) -> None:
    """Below 0 is left alone: a running count gives padding before the first token -1, and nothing looks there."""
    if ids.dim() != 2 or ids.shape[0] not in (1, batch) or ids.shape[1] != length:
        raise ValueError(f"position_ids {tuple(ids.shape)} do not fit an input of {(batch, length)}")
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"position_ids count tokens in int64 or int32, not {ids.dtype}")
    if not torch.compiler.is_compiling() and not ids.is_meta and ids.numel() and int(ids.max()) >= limit:
        raise UserError(
            f"position {int(ids.max())} is beyond the model's {limit} positions, of which the first is 0 "
            "(max_position_embeddings)"
        )
