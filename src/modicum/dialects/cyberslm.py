"""The cyberslm dialect: key-padding masks, caches as pairs of tensors, interleaved rotary pairs.

`DecoderBlock(config, layer_idx, rope)` is what its users' scripts call; `CyberSLM` is the whole model of such blocks.
Packed rows have no mask and attend across their documents, as that system's did.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from modicum.dialects.cache import KVCache, Pair
from modicum.dialects.cyberslm_config import CyberSLMConfig, config_from_dict, model_config
from modicum.dialects.parts import STD, StrictModule, WholeModel, alias, check_length, rename, shared_rope
from modicum.model import RMSNorm
from modicum.model.attention import Attention
from modicum.model.init import init_weights
from modicum.model.linear import Embedding, Linear
from modicum.model.mask import Visibility
from modicum.model.mlp import FeedForward
from modicum.model.plan import AttentionPlan, Implementation, make_plan
from modicum.model.rotary import RotaryEmbedding as Rotary

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


class RotaryEmbedding(Rotary):
    """The rotary table, in interleaved pairs; one can serve all layers."""

    def __init__(self, config: CyberSLMConfig) -> None:
        super().__init__(model_config(config))


class MultiHeadSelfAttention(StrictModule, Attention):
    """Projections q_proj, k_proj, v_proj, o_proj, their rows in interleaved pairs."""

    def __init__(self, config: CyberSLMConfig, layer_idx: int = 0, rope: Rotary | None = None) -> None:
        settings = model_config(config)
        super().__init__(settings, layer_idx)
        self.rope = shared_rope(rope, settings)
        self.residual_dropout = config.dropout
        init_weights(self, std=STD, layers=config.num_layers)

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
            plan = padded_plan(self.rope, x, attention_mask, past_of([kv_cache]), return_attn_weights)
        cache = KVCache()
        if kv_cache is not None:
            cache.append(self.layer, *kv_cache)
        out, weights = super().forward(x, replace(plan, cache=cache))
        out = dropout(out, self.residual_dropout, self.training)
        return out, weights, cache.tensors()[0] if use_cache else None


class SwiGLUFeedForward(StrictModule, FeedForward):
    """out_proj(silu(gate_proj(x)) * val_proj(x))."""

    up_proj = alias("val_proj")
    down_proj = alias("out_proj")

    def __init__(self, config: CyberSLMConfig) -> None:
        super().__init__(model_config(config))
        rename(self, up_proj="val_proj", down_proj="out_proj")
        self.residual_dropout = config.dropout
        init_weights(self, std=STD, layers=config.num_layers)

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
        init_weights(self, std=STD, layers=config.num_layers)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        kv_cache: Sequence[Pair | None] | None = None,
        use_cache: bool = False,
    ) -> Any:
        """Logits (B, T, V) of ids (B, T) int64; with use_cache also the tuple of all layers' (keys, values).

        Masks and caches are DecoderBlock's, a pair for each layer, or None for all where nothing is cached yet.
        UserError for an id outside the vocabulary and for a sequence beyond max_seq_len.
        """
        pairs = [None] * len(self.layers) if kv_cache is None else kv_cache
        if len(pairs) != len(self.layers):
            raise ValueError(f"kv_cache has {len(pairs)} pairs for {len(self.layers)} layers")
        x, past = self.embed(input_ids), past_of(pairs)
        check_length(past + x.shape[1], self.config.max_seq_len, "max_seq_len")
        plan, presents = padded_plan(self.rope, x, attention_mask, past), []
        for block, held in zip(self.layers, pairs, strict=True):
            x, _, present = block(x, kv_cache=held, use_cache=use_cache, plan=plan)
            presents.append(present)
        logits = self.head(self.final_norm(x))
        return (logits, tuple(presents)) if use_cache else logits


def past_of(pairs: Sequence[Pair | None]) -> int:
    """The tokens that each layer's (keys, values) hold; None holds none. ValueError where they are not alike."""
    held = [pair for pair in pairs if pair is not None]
    if held and not torch.compiler.is_compiling():
        shapes = [tuple(part.shape) for pair in held for part in pair]
        if len(set(shapes)) > 1 or len(shapes[0]) != 4 or (len(held) < len(pairs) and shapes[0][2]):
            told = ", ".join("None" if pair is None else str([tuple(part.shape) for part in pair]) for pair in pairs)
            raise ValueError(f"keys and values must be of one shape, (rows, heads, tokens, head_dim), not {told}")
    return held[0][0].shape[2] if held else 0


def padded_plan(
    rope: Rotary, x: Tensor, attention_mask: Tensor | None, past: int, return_attn_weights: bool = False
) -> AttentionPlan:
    """The plan of x (B, T, hidden) after `past` cached tokens. ValueError for a mask of another form.

    Outside of compiled code that takes in what is neither 0 nor 1, and floats of 0 alone.
    """
    batch, length = x.shape[:2]
    if attention_mask is not None and not torch.compiler.is_compiling() and not attention_mask.is_meta:
        _check_keep(attention_mask)
    keep = None if attention_mask is None else attention_mask.bool()
    # the whole mask is asked for first: an exported graph then holds for an empty past too
    if keep is not None and keep.shape != (batch, past + length):
        if keep.shape != (batch, length):
            raise ValueError(f"attention_mask {tuple(keep.shape)} fits neither {length} nor {past + length} tokens")
        keep = torch.cat((keep.new_ones(batch, past), keep), dim=1)
    positions = torch.arange(past, past + length, device=x.device)[None]
    implementation: Implementation = "weights" if return_attn_weights else "sdpa"
    return make_plan(rope, x, Visibility(past, length, keep), positions=positions, implementation=implementation)


def _check_keep(mask: Tensor) -> None:
    """A mask that is added to the scores says 0 for keep, and would be taken for its opposite."""
    if mask.dtype == torch.bool or mask.numel() == 0:
        return
    if bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError("attention_mask is 1 for keep and 0 for pad; this one holds other numbers")
    if mask.is_floating_point() and not bool(mask.any()):
        raise ValueError(
            "attention_mask is 1 for keep and 0 for pad; this one is 0 throughout, as one that is added to the scores "
            "and hides nothing: leave it out if all is kept"
        )
