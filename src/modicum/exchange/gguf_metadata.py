"""What a GGUF file says of a model's shape, and a model's shape from what a file says.

llama.cpp has two architectures for ours: "llama", whose queries and keys lie in the interleaved rotary layout, and
"qwen3", with QK-norm and the half layout. Numbers are float32 there, and read back as the decimal that was meant.
"""

import math
from typing import Any, Literal

import numpy as np
import torch

from modicum.exchange.gguf_vocabulary import Value
from modicum.model import ModelConfig
from modicum.model.frequencies import rotary_frequencies
from modicum.store import UserError

Layout = Literal["half", "interleaved"]
LLAMA3_KEYS = "modicum.rope.llama3."
TRAINED = "original_max_position_embeddings"
LLAMA3_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", TRAINED)
LAYOUTS: dict[str, Layout] = {"llama": "interleaved", "qwen3": "half"}


def architecture_of(config: ModelConfig) -> str:
    """llama, or qwen3 where queries and keys are normed."""
    return "qwen3" if config.qk_norm else "llama"


def model_metadata(config: ModelConfig) -> dict[str, Value]:
    """The keys of the architecture, in order. Raises UserError listing all that llama.cpp has no word for."""
    faults = _inexpressible(config)
    if faults:
        raise UserError("\n".join(["GGUF cannot express this model", *(f"  {fault}" for fault in faults)]))
    kind = architecture_of(config)
    values: dict[str, Value] = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(config.rope_theta),
    }
    return {
        "general.type": "model",
        "general.size_label": f"{config.parameter_count():,}",
        **{f"{kind}.{key}": value for key, value in (values | _scaling(config)).items()},
        **_llama3(config),
    }


def frequency_factors(config: ModelConfig) -> np.ndarray[Any, Any] | None:
    """rope_freqs.weight, (head_dim/2,) float32: what llama.cpp divides every pair's angle by, for llama3's scaling."""
    if config.rope_scaling is None or config.rope_scaling["rope_type"] != "llama3":
        return None
    plain, scaled = (
        rotary_frequencies(config.head_dim, config.rope_theta, scaling, config.max_position_embeddings)[0].double()
        for scaling in (None, config.rope_scaling)
    )
    factors: np.ndarray[Any, Any] = (plain / scaled).to(torch.float32).numpy()
    return factors


def _scaling(config: ModelConfig) -> dict[str, Value]:
    """Linear and YaRN by name."""
    scaling = config.rope_scaling
    if scaling is None or scaling["rope_type"] == "llama3":
        return {}
    found: dict[str, Value] = {
        "rope.scaling.type": scaling["rope_type"],
        "rope.scaling.factor": float(scaling["factor"]),
    }
    if scaling["rope_type"] == "yarn":
        trained = scaling.get("original_max_position_embeddings") or config.max_position_embeddings
        found["rope.scaling.original_context_length"] = int(trained)
        # llama.cpp multiplies cos and sin by 0.1 ln(factor) + 1 and by what is given here
        sharper = rotary_frequencies(config.head_dim, config.rope_theta, scaling, config.max_position_embeddings)[1]
        share = sharper / usual_sharpness(float(scaling["factor"]))
        found |= {} if math.isclose(share, 1.0, rel_tol=1e-9) else {"rope.scaling.attn_factor": share}
        found["rope.scaling.yarn_beta_fast"] = float(scaling.get("beta_fast") or 32)
        found["rope.scaling.yarn_beta_slow"] = float(scaling.get("beta_slow") or 1)
    return found


def _llama3(config: ModelConfig) -> dict[str, Value]:
    """What llama3's factors are made of, for whoever reads the file back; llama.cpp takes the factors themselves."""
    scaling = config.rope_scaling
    if scaling is None or scaling["rope_type"] != "llama3":
        return {}
    numbers = {key: float(scaling[key]) for key in LLAMA3_FIELDS}
    return {f"{LLAMA3_KEYS}{key}": whole(number) if key == TRAINED else number for key, number in numbers.items()}


def _inexpressible(config: ModelConfig) -> list[str]:
    faults = []
    scaling = config.rope_scaling or {"rope_type": "default"}
    if config.qk_norm and scaling["rope_type"] == "llama3":
        faults.append("rope_scaling llama3 with qk_norm: llama.cpp's qwen3 has no factors for its frequencies")
    if config.qk_norm and config.attention_bias:
        faults.append("attention_bias with qk_norm: llama.cpp's qwen3 has no biases")
    if scaling["rope_type"] == "yarn" and not scaling.get("truncate", True):
        faults.append("rope_scaling yarn with truncate false: llama.cpp rounds the edges of its ramp")
    return faults


def whole(number: float) -> float | int:
    """The same number, an integer where it is a whole one, as a length in tokens is."""
    return int(number) if number.is_integer() else number


def usual_sharpness(factor: float) -> float:
    """What YaRN multiplies cos and sin by when nothing else is said."""
    return 0.1 * math.log(factor) + 1.0
