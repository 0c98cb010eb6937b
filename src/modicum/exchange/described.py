"""What a foreign config says the model is: one of ours in other words, or refused by name with the reason."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from modicum.dialects import core, cyberslm, slm
from modicum.exchange.names import Dialect
from modicum.model import ModelConfig
from modicum.model.hf_config import FOREIGN_ARCHITECTURES
from modicum.store import UserError

_DIALECTS: dict[str, tuple[str, Callable[[Mapping[str, Any]], ModelConfig]]] = {
    "cyberslm": ("CyberSLM", lambda values: cyberslm.model_config(cyberslm.config_from_dict(values))),
    "slm": ("SLM", lambda values: slm.model_config(slm.config_from_dict(values))),
    "core": ("LanguageModel", lambda values: core.model_config(core.config_from_dict(values))),
}

# Why a well-known kind is none of ours: what its blocks do that this decoder does not.
_REASONS = {
    "bloom": "ALiBi instead of rotary positions, LayerNorm",
    "cohere": "attention and feed-forward side by side, LayerNorm",
    "deepseek_v3": "latent attention and experts",
    "falcon": "attention and feed-forward side by side, LayerNorm",
    "gemma": "GeGLU, norms that add one to their gain, scaled embeddings",
    "gemma2": "GeGLU, four norms a layer, soft-capped logits, sliding windows",
    "gemma3_text": "GeGLU, four norms a layer, sliding windows",
    "gpt2": "learned positions, LayerNorm, a feed-forward without a gate",
    "gpt_neox": "rotates a part of the head, LayerNorm, a feed-forward without a gate",
    "mixtral": "a mixture of experts",
    "mpt": "ALiBi instead of rotary positions, LayerNorm",
    "olmo2": "norms after attention and feed-forward, not before",
    "opt": "learned positions, LayerNorm, a feed-forward without a gate",
    "phi": "rotates a part of the head, LayerNorm",
    "phi3": "query, key and value in one matrix, long-range rotary scaling",
    "qwen2_moe": "a mixture of experts",
    "qwen3_moe": "a mixture of experts",
    "smollm3": "layers without rotary positions",
}


@dataclass(frozen=True)
class Described:
    """config: in the rotary layout of the weights as they lie. lacking: how our names of those weights end that it is
    without, and that are zero here. token_ids: which token begins and ends a text, where a dialect's config says so.
    notes: what of it is not kept."""

    architecture: str
    config: ModelConfig
    lacking: tuple[str, ...] = ()
    token_ids: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def describe(values: Any, dialect: Dialect, origin: str) -> Described:
    """The model of a foreign config. Raises UserError, `origin` in front, for one that cannot be expressed."""
    if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
        raise UserError(f"{origin}: expected the config as a mapping of names to values, found {type(values).__name__}")
    try:
        if dialect == "hf":
            return _hugging_face(values)
        architecture, read = _DIALECTS[dialect]
        config = read(values)
    except UserError as error:
        raise UserError(f"{origin}: {error}") from None
    ids = {name: values[name] for name in ("bos_token_id", "eos_token_id") if values.get(name) is not None}
    return Described(architecture, config, token_ids=ids, notes=_lost(values))


def _lost(values: Mapping[str, Any]) -> tuple[str, ...]:
    dropout = values.get("dropout")
    if not dropout:
        return ()
    return (
        f"dropout {dropout} of what attention and feed-forward give back is not kept: training here has none there",
    )


def _hugging_face(values: Mapping[str, Any]) -> Described:
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in FOREIGN_ARCHITECTURES:
        named = values.get("architectures") or "an unnamed architecture"
        name = ", ".join(map(str, named)) if isinstance(named, list) else str(named)
        reason = _REASONS.get(kind, "its blocks are not known here") if isinstance(kind, str) else "it names no kind"
        raise UserError(
            f"{name} (model_type {kind!r}) cannot be imported: {reason}. What can: Llama (SmolLM2 is one), Qwen2, "
            "Qwen3, and Mistral without an active sliding window"
        )
    config = ModelConfig.from_hf(values, foreign=True)
    # a Llama with biases has one there, so that a Qwen2 is one with zeros
    lacking = (".self_attn.o_proj.bias",) if kind == "qwen2" else ()
    return Described(FOREIGN_ARCHITECTURES[kind], config, lacking)
