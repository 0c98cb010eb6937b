"""The cyberslm dialect's config: its names, its constraints, and what they mean in ours."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modicum.dialects.parts import interleaved_settings, read_config
from modicum.model import ModelConfig
from modicum.model.values import (
    LARGEST_SIZE,
    MOST_LAYERS,
    is_whole,
    positive_fault,
    share_fault,
    shown,
    switch_fault,
    whole_fault,
)
from modicum.store import UserError


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
        if is_whole(self.head_dim, least=0, most=0) and is_whole(self.hidden_dim) and is_whole(self.num_heads):
            object.__setattr__(self, "head_dim", self.hidden_dim // self.num_heads)

    def validate(self) -> None:
        """ValueError naming every violated constraint at once, and none that only follows from another."""
        sizes = ("vocab_size", "max_seq_len", "hidden_dim", "num_heads", "ffn_hidden_dim")
        found = {name: whole_fault(getattr(self, name)) for name in sizes}
        found["num_layers"] = whole_fault(self.num_layers, most=MOST_LAYERS)
        # 0 stays where it cannot be filled in, and the reason is then told
        found["head_dim"] = whole_fault(self.head_dim, least=0)
        if not found["head_dim"] and self.head_dim % 2:
            found["head_dim"] = f"must be even, not {self.head_dim}: rotary embedding turns pairs"
        found |= {name: positive_fault(getattr(self, name)) for name in ("rope_base", "norm_eps")}
        found |= {name: share_fault(getattr(self, name)) for name in ("dropout", "attn_dropout")}
        found |= {name: switch_fault(getattr(self, name)) for name in ("tie_weights", "bias")}
        found |= {name: self._id_fault(name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
        faults = [f"{name} {fault}" for name, fault in found.items() if fault]
        whole = is_whole(self.hidden_dim) and is_whole(self.num_heads) and is_whole(self.head_dim, least=0)
        if whole and self.hidden_dim != self.num_heads * self.head_dim:
            faults.append(f"hidden_dim {self.hidden_dim} is not num_heads {self.num_heads} * head_dim {self.head_dim}")
        if faults:
            raise ValueError("\n".join(["the CyberSLMConfig is not valid:", *(f"  {fault}" for fault in faults)]))

    def _id_fault(self, name: str) -> str | None:
        value = getattr(self, name)
        known = is_whole(self.vocab_size)  # where it is not, an id can only be no id at all
        if value is None or is_whole(value, least=0, most=self.vocab_size - 1 if known else LARGEST_SIZE):
            return None
        return f"must be None or an id below vocab_size, not {shown(value)}"


def model_config(config: CyberSLMConfig) -> ModelConfig:
    """modicum's own settings of the same model. Dropout on the residual stream, which only trains, has none there."""
    config.validate()
    return interleaved_settings(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        intermediate_size=config.ffn_hidden_dim,
        max_position_embeddings=config.max_seq_len,
        rope_theta=config.rope_base,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tie_weights,
        attention_dropout=config.attn_dropout,
        bias=config.bias,
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
