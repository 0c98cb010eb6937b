"""What a decoder is: sizes and switches under Hugging Face's names, checked once, so that all parts may trust them.

Anything that a stock LlamaForCausalLM or Qwen3ForCausalLM could not express is refused here, by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

from modicum.model.frequencies import normal_scaling
from modicum.model.hf_config import fields_from_hf, hf_config
from modicum.model.parameters import parameters_by_part
from modicum.model.values import (
    LARGEST_SIZE,
    MOST_LAYERS,
    as_float,
    positive_fault,
    share_fault,
    shown,
    switch_fault,
    whole_fault,
)
from modicum.recipe import ModelSettings
from modicum.store import UserError


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and switches of a decoder. Raises UserError naming every fault at once.

    num_key_value_heads 0 means as many as num_attention_heads, head_dim 0 means hidden_size / num_attention_heads;
    after construction both are filled in. rope_scaling is None or Hugging Face's dictionary (rope_type linear, llama3
    or yarn). rotary_layout says how the live weights pair the channels of a head: (i, i + head_dim/2) for "half", which
    is what files hold, and (2i, 2i + 1) for "interleaved".
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    num_key_value_heads: int = 0
    head_dim: int = 0
    max_position_embeddings: int = 2048
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    rms_norm_eps: float = 1e-5
    qk_norm: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = True
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    rotary_layout: Literal["half", "interleaved"] = "half"

    def __post_init__(self) -> None:
        faults = self._wrong_values()
        if not faults:
            faults += self._fill_heads()
        if self.qk_norm and self.mlp_bias:
            faults.append("qk_norm with mlp_bias: Llama has no QK-norm and Qwen3 no MLP biases; switch one of them off")
        if self.rotary_layout not in ("half", "interleaved"):
            faults.append(f"rotary_layout must be half or interleaved, not {shown(self.rotary_layout)}")
        given: Any = self.rope_scaling
        if given is not None and not isinstance(given, Mapping):
            faults.append(f"rope_scaling must be a dictionary or None, not {shown(given)}")
        if given is not None and not faults:
            scaling, wrong = normal_scaling(given, self.max_position_embeddings, self.rope_theta)
            object.__setattr__(self, "rope_scaling", scaling)
            faults += wrong
        if faults:
            raise UserError("the model cannot be built:\n" + "\n".join(f"  {fault}" for fault in faults))

    def _wrong_values(self) -> list[str]:
        """What is of the wrong type or out of its range. Whole numbers where floats are meant become floats."""
        faults = []
        for field in fields(self):
            value = getattr(self, field.name)
            fault = None
            if field.type is int:
                least = 0 if field.name in ("num_key_value_heads", "head_dim") else 1
                most = MOST_LAYERS if field.name == "num_hidden_layers" else LARGEST_SIZE
                fault = whole_fault(value, least=least, most=most)
            elif field.type is bool:
                fault = switch_fault(value)
            elif field.type is float:
                fault = share_fault(value) if field.name == "attention_dropout" else positive_fault(value)
                object.__setattr__(self, field.name, as_float(value))
            if fault:
                faults.append(f"{field.name} {fault}")
        return faults

    def _fill_heads(self) -> list[str]:
        """Put the derived head sizes in; returns what does not fit."""
        faults = []
        divides, own_width = self.hidden_size % self.num_attention_heads == 0, bool(self.head_dim)
        if not self.num_key_value_heads:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        if not divides and not self.qk_norm:
            # LlamaConfig checks this even where head_dim is given; Qwen3Config does not
            faults.append(
                f"num_attention_heads {self.num_attention_heads} does not divide hidden_size {self.hidden_size}: "
                "a stock Llama needs that (with qk_norm and an explicit head_dim it is a Qwen3, which does not)"
            )
        elif not divides and not own_width:
            faults.append(f"num_attention_heads {self.num_attention_heads} does not divide hidden_size: give head_dim")
        if self.head_dim < 2 or self.head_dim % 2:
            faults.append(f"head_dim must be even and at least 2, not {self.head_dim}: rotary embedding turns pairs")
        if self.num_key_value_heads < 1 or self.num_attention_heads % self.num_key_value_heads:
            faults.append(
                f"num_key_value_heads {self.num_key_value_heads} does not divide "
                f"num_attention_heads {self.num_attention_heads}"
            )
        return faults

    @classmethod
    def from_settings(cls, settings: ModelSettings, vocab_size: int) -> Self:
        """The decoder that a recipe's model section describes, for a tokenizer with `vocab_size` ids."""
        return cls(
            vocab_size=vocab_size,
            hidden_size=settings.hidden_size,
            num_hidden_layers=settings.num_hidden_layers,
            num_attention_heads=settings.num_attention_heads,
            intermediate_size=settings.intermediate_size
            or feed_forward_width(settings.hidden_size, settings.ffn_dim_multiplier, settings.multiple_of),
            num_key_value_heads=settings.num_key_value_heads or 0,
            head_dim=settings.head_dim or 0,
            max_position_embeddings=settings.max_position_embeddings,
            rope_theta=settings.rope_theta,
            rope_scaling=settings.rope_scaling,
            rms_norm_eps=settings.rms_norm_eps,
            qk_norm=settings.qk_norm,
            attention_bias=settings.attention_bias,
            mlp_bias=settings.mlp_bias,
            tie_word_embeddings=settings.tie_word_embeddings,
            attention_dropout=settings.attention_dropout,
            initializer_range=settings.initializer_range,
        )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, foreign: bool = False) -> Self:
        """The decoder that a config.json of a Llama or Qwen3 describes; UserError names what we do not support.

        foreign: of a Qwen2 or a Mistral too, for importing one.
        """
        return cls(**fields_from_hf(config, foreign=foreign))

    def to_hf(
        self,
        *,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        dtype: str = "float32",
    ) -> dict[str, Any]:
        """The config.json of this decoder: a LlamaForCausalLM, or a Qwen3ForCausalLM where qk_norm is on.

        Carries `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (4.51 and later) side by side.
        ValueError for the interleaved layout, which no file may hold: its reader would pair the wrong channels.
        """
        if self.rotary_layout != "half":
            raise ValueError("files hold the half layout: permute the rows of q_proj and k_proj before writing")
        tokens = {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id, "pad_token_id": pad_token_id}
        return hf_config(self, tokens, dtype)

    def parameter_count(self) -> int:
        """Trainable numbers; a tied embedding counts once."""
        return parameters_by_part(self).total


def feed_forward_width(hidden_size: int, multiplier: float | None, multiple_of: int) -> int:
    """SwiGLU's width when none is given: 2/3 of 4 d, times the multiplier, rounded up (Touvron et al. 2023, LLaMA).

    UserError for a size that is no whole number above 0, and a multiplier that is no finite number above 0.
    """
    found = {
        "the hidden size": whole_fault(hidden_size),
        "multiple_of": whole_fault(multiple_of),
        "ffn_dim_multiplier": None if multiplier is None else positive_fault(multiplier),
    }
    faults = [f"  {name} {fault}" for name, fault in found.items() if fault]
    if faults:
        raise UserError("\n".join(["the feed-forward has no width:", *faults]))
    width = int(2 * 4 * hidden_size / 3)
    if multiplier is not None:
        width = int(multiplier * width)
    return -(-width // multiple_of) * multiple_of
