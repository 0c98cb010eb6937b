"""The cyberslm dialect: key-padding masks, caches as pairs of tensors, interleaved rotary pairs.

`DecoderBlock(config, layer_idx, rope)` is what its users' scripts call; `CyberSLM` is the whole model of such blocks.
Packed rows have no mask and attend across their documents, as that system's did.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from modicum.dialects.cache import KVCache, Pair
from modicum.dialects.parts import StrictModule, WholeModel, alias, check_length, read_config, rename, shared_rope
from modicum.model import ModelConfig, RMSNorm
from modicum.model.attention import Attention
from modicum.model.init import init_weights
from modicum.model.linear import Embedding, Linear
from modicum.model.mask import Visibility
from modicum.model.mlp import FeedForward
from modicum.model.plan import AttentionPlan, Implementation, make_plan
from modicum.model.rotary import RotaryEmbedding as Rotary
from modicum.store import UserError

__all__ = [
    "CyberSLM",
    "CyberSLMConfig",
    "DecoderBlock",
    "MultiHeadSelfAttention",
    "RMSNorm",
    "RotaryEmbedding",
    "SwiGLUFeedForward",
    "config_from_dict",
    "model_config",
]

_STD = 0.02


@dataclass(frozen=True)
class CyberSLMConfig:
    """Sizes and switches; head_dim 0 means hidden_dim / num_heads and is filled in. `validate` checks them."""

    vocab_size: int = 32_000
    max_seq_len: int = 4096
    hidden_dim: int = 384
    num_layers: int = 12
    num_heads: int = 6
    head_dim: int = 0
    ffn_hidden_dim: int = 1024
    rope_base: float = 10_000.0
    norm_eps: float = 1e-6
    tie_weights: bool = True
    bias: bool = False
    dropout: float = 0.0
    attn_dropout: float = 0.0
    pad_token_id: int | None = None
    bos_token_id: int | None = 2
    eos_token_id: int | None = 3

    def __post_init__(self) -> None:
        if self.head_dim == 0 and _is_size(self.hidden_dim) and _is_size(self.num_heads):
            object.__setattr__(self, "head_dim", self.hidden_dim // self.num_heads)

    def validate(self) -> None:
        """ValueError naming every violated constraint at once."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        sizes = [name for name in values if name.endswith(("_size", "_len", "_dim", "_layers", "_heads"))]
        faults = [f"{name} must be a whole number above 0, not {values[name]!r}" for name in sizes]
        faults = [fault for fault, name in zip(faults, sizes, strict=True) if not _is_size(values[name])]
        if not faults and self.hidden_dim != self.num_heads * self.head_dim:
            faults.append(f"hidden_dim {self.hidden_dim} is not num_heads {self.num_heads} * head_dim {self.head_dim}")
        if _is_size(self.head_dim) and self.head_dim % 2:
            faults.append(f"head_dim must be even, not {self.head_dim}: rotary embedding turns pairs")
        for name in ("rope_base", "norm_eps"):
            if not _is_number(values[name]) or not 0 < values[name] < float("inf"):
                faults.append(f"{name} must be a number above 0, not {values[name]!r}")
        for name in ("dropout", "attn_dropout"):
            if not _is_number(values[name]) or not 0 <= values[name] < 1:
                faults.append(f"{name} must be at least 0 and below 1, not {values[name]!r}")
        for name in ("tie_weights", "bias"):
            if not isinstance(values[name], bool):
                faults.append(f"{name} must be true or false, not {values[name]!r}")
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            inside = _is_size(self.vocab_size) and (values[name] == 0 or _is_size(values[name], self.vocab_size))
            if values[name] is not None and not inside:
                faults.append(f"{name} must be None or an id below vocab_size, not {values[name]!r}")
        if faults:
            raise ValueError("\n".join(["the CyberSLMConfig is not valid:", *(f"  {fault}" for fault in faults)]))


def _is_size(value: Any, below: float = float("inf")) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < below


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def model_config(config: CyberSLMConfig) -> ModelConfig:
    """modicum's own settings of the same model. Dropout on the residual stream, which only trains, has none there."""
    config.validate()
    return ModelConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        intermediate_size=config.ffn_hidden_dim,
        max_position_embeddings=config.max_seq_len,
        rope_theta=config.rope_base,
        rms_norm_eps=config.norm_eps,
        attention_bias=config.bias,
        mlp_bias=config.bias,
        tie_word_embeddings=config.tie_weights,
        attention_dropout=config.attn_dropout,
        initializer_range=_STD,
        rotary_layout="interleaved",
    )


def config_from_dict(values: Mapping[str, Any]) -> CyberSLMConfig:
    """A valid config from plain values. UserError lists unknown and missing keys, or every violated constraint.

    head_dim, dropouts and token ids may be missing.
    """
    optional = {"head_dim", "dropout", "attn_dropout", "pad_token_id", "bos_token_id", "eos_token_id"}
    config = read_config(CyberSLMConfig, values, optional)
    try:
        config.validate()
    except ValueError as error:
        raise UserError(str(error)) from None
    return config


class RotaryEmbedding(Rotary):
    """The rotary table, in interleaved pairs; one can serve all layers."""

    def __init__(self, config: CyberSLMConfig) -> None:
        super().__init__(model_config(config))


class MultiHeadSelfAttention(Attention):
    """Projections q_proj, k_proj, v_proj, o_proj, their rows in interleaved pairs."""

    def __init__(self, config: CyberSLMConfig, layer_idx: int = 0, rope: Rotary | None = None) -> None:
        settings = model_config(config)
        super().__init__(settings, layer_idx)
        self.rope = shared_rope(rope, settings)
        self.residual_dropout = config.dropout
        init_weights(self, std=_STD, layers=config.num_layers)

    def forward(  # type: ignore[override]  # the dialect's call
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        return_attn_weights: bool = False,
        kv_cache: Pair | None = None,
        use_cache: bool = False,
        *,
        plan: AttentionPlan | None = None,
    ) -> tuple[Tensor, Tensor | None, Pair | None]:
        """As DecoderBlock's, for the attention alone."""
        if plan is None:
            past = 0 if kv_cache is None else kv_cache[0].shape[2]
            plan = padded_plan(self.rope, x, attention_mask, past, return_attn_weights)
        cache = KVCache()
        if kv_cache is not None:
            cache.append(self.layer, *kv_cache)
        out, weights = super().forward(x, replace(plan, cache=cache))
        out = dropout(out, self.residual_dropout, self.training)
        return out, weights, cache.tensors()[0] if use_cache else None


class SwiGLUFeedForward(FeedForward):
    """out_proj(silu(gate_proj(x)) * val_proj(x))."""

    up_proj = alias("val_proj")
    down_proj = alias("out_proj")

    def __init__(self, config: CyberSLMConfig) -> None:
        super().__init__(model_config(config))
        rename(self, up_proj="val_proj", down_proj="out_proj")
        self.residual_dropout = config.dropout
        init_weights(self, std=_STD, layers=config.num_layers)

    def forward(self, x: Tensor) -> Tensor:
        return dropout(super().forward(x), self.residual_dropout, self.training)


class DecoderBlock(StrictModule):
    """x + attn(attn_norm(x)), then x + ffn(ffn_norm(x)). layer_idx is for display; rope may be shared by all layers."""

    def __init__(self, config: CyberSLMConfig, layer_idx: int = 0, rope: Rotary | None = None) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.attn_norm = RMSNorm(config.hidden_dim, config.norm_eps)
        self.attn = MultiHeadSelfAttention(config, layer_idx, rope)
        self.ffn_norm = RMSNorm(config.hidden_dim, config.norm_eps)
        self.ffn = SwiGLUFeedForward(config)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        return_attn_weights: bool = False,
        kv_cache: Pair | None = None,
        use_cache: bool = False,
        *,
        plan: AttentionPlan | None = None,
    ) -> tuple[Tensor, Tensor | None, Pair | None]:
        """x (B, T, hidden) after this layer; the weights (B, H, T, past+T) if asked for; (keys, values) if use_cache.

        attention_mask: 1 keep, 0 pad, (B, T) or (B, past+T); of (B, T) with a cache, all that is cached is kept.
        kv_cache: (keys, values) of the past, each (B, H, past, head_dim). Positions count slots, padding included, and
        continue after it. plan: made once for all layers (padded_plan), instead of attention_mask and
        return_attn_weights.
        """
        attended, weights, present = self.attn(
            self.attn_norm(x), attention_mask, return_attn_weights, kv_cache, use_cache, plan=plan
        )
        x = x + attended
        return x + self.ffn(self.ffn_norm(x)), weights, present

    def extra_repr(self) -> str:
        return f"layer_idx={self.layer_idx}"


class CyberSLM(WholeModel):
    """The language model: embedding, layers, final_norm, and lm_head unless it is tied."""

    table = "embedding"

    def __init__(self, config: CyberSLMConfig) -> None:
        super().__init__()
        config.validate()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.hidden_dim)
        self.rope = RotaryEmbedding(config)
        self.layers = nn.ModuleList(DecoderBlock(config, layer, self.rope) for layer in range(config.num_layers))
        self.final_norm = RMSNorm(config.hidden_dim, config.norm_eps)
        self.lm_head = None if config.tie_weights else Linear(config.hidden_dim, config.vocab_size, bias=False)
        init_weights(self, std=_STD, layers=config.num_layers)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        kv_cache: Sequence[Pair] | None = None,
        use_cache: bool = False,
    ) -> Any:
        """Logits (B, T, V) of ids (B, T) int64; with use_cache also the tuple of all layers' (keys, values).

        Masks and caches are DecoderBlock's, a pair for each layer. UserError for an id outside the vocabulary and for a
        sequence beyond max_seq_len.
        """
        x, past = self.embed(input_ids), 0 if kv_cache is None else kv_cache[0][0].shape[2]
        check_length(past + x.shape[1], self.config.max_seq_len, "max_seq_len")
        plan, presents = padded_plan(self.rope, x, attention_mask, past), []
        for layer, block in enumerate(self.layers):
            held = None if kv_cache is None else kv_cache[layer]
            x, _, present = block(x, kv_cache=held, use_cache=use_cache, plan=plan)
            presents.append(present)
        logits = self.head(self.final_norm(x))
        return (logits, tuple(presents)) if use_cache else logits


def padded_plan(
    rope: Rotary, x: Tensor, attention_mask: Tensor | None, past: int, return_attn_weights: bool = False
) -> AttentionPlan:
    """The plan of x (B, T, hidden) after `past` cached tokens. ValueError for a mask of another form."""
    batch, length = x.shape[:2]
    if attention_mask is not None and not torch.compiler.is_compiling():
        # a mask that is added to the scores says 0 for keep, and would be taken for its opposite
        other = (attention_mask != 0) & (attention_mask != 1) if attention_mask.is_floating_point() else None
        if other is not None and bool(other.any()):
            raise ValueError("attention_mask is 1 for keep and 0 for pad; this one holds other numbers")
    keep = None if attention_mask is None else attention_mask.bool()
    # the whole mask is asked for first: an exported graph then holds for an empty past too
    if keep is not None and keep.shape != (batch, past + length):
        if keep.shape != (batch, length):
            raise ValueError(f"attention_mask {tuple(keep.shape)} fits neither {length} nor {past + length} tokens")
        keep = torch.cat((keep.new_ones(batch, past), keep), dim=1)
    positions = torch.arange(past, past + length, device=x.device)[None]
    implementation: Implementation = "weights" if return_attn_weights else "sdpa"
    return make_plan(rope, x, Visibility(past, length, keep), positions=positions, implementation=implementation)
