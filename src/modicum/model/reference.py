"""The decoder once more, in NumPy float64 and in the plainest words, to check the fast one against.

Shares no code with it: frequencies, masks and positions are written from their definitions, with loops where a loop
says it best. Slow on purpose; for tests, import and doctor.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modicum.model.config import ModelConfig

Array = NDArray[np.float64]

_HEAD_ROWS = 8192  # of the head at a time: the whole of a large vocabulary in float64 is gigabytes


def reference_logits(
    state: Mapping[str, Any],
    config: ModelConfig,
    ids: Any,
    *,
    positions: Any = None,
    documents: Any = None,
    attention_mask: Any = None,
) -> Array:
    """Logits (B, T, V) float64 of ids (B, T), from arrays or tensors under Hugging Face's names, in any float type.

    positions, documents and attention_mask mean what they mean for Decoder.forward. The weights are read in
    config.rotary_layout, and widened one layer at a time: a model that fits into memory can be checked there.
    """
    ids = np.asarray(ids)
    batch, length = ids.shape
    documents = np.zeros((batch, length)) if documents is None else np.asarray(documents)
    keep = np.ones((batch, length)) if attention_mask is None else np.asarray(attention_mask)
    seen = [_seen(documents[row], keep[row]) for row in range(batch)]
    places = [np.maximum(see.sum(1) - 1, 0) for see in seen] if positions is None else list(np.asarray(positions))
    rows = [_widened(state["model.embed_tokens.weight"][ids[row]]) for row in range(batch)]
    for layer in range(config.num_hidden_layers):
        part = {
            name.removeprefix(f"model.layers.{layer}."): _widened(value)
            for name, value in state.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        rows = [_block(part, config, x, see, place) for x, see, place in zip(rows, seen, places, strict=True)]
    x = _norm(np.stack(rows), _widened(state["model.norm.weight"]), config.rms_norm_eps)
    head = state["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    parts = [x @ _widened(head[start : start + _HEAD_ROWS]).T for start in range(0, config.vocab_size, _HEAD_ROWS)]
    return np.concatenate(parts, -1)


def _widened(value: Any) -> Array:
    """`value` in float64. NumPy has no bfloat16, so a tensor is widened before it becomes an array."""
    return np.asarray(value.double() if hasattr(value, "double") else value, dtype=np.float64)


def _seen(documents: NDArray[Any], keep: NDArray[Any]) -> NDArray[np.bool_]:
    """seen[q, k]: whether the token at q may look at the one at k."""
    length = len(documents)
    seen = np.zeros((length, length), dtype=bool)
    for q in range(length):
        for k in range(q + 1):
            seen[q, k] = bool(keep[k]) and documents[q] == documents[k] and documents[k] >= 0
    return seen


def _block(
    part: Mapping[str, Array], config: ModelConfig, x: Array, seen: NDArray[np.bool_], place: NDArray[Any]
) -> Array:
    x = x + _attention(part, config, _norm(x, part["input_layernorm.weight"], config.rms_norm_eps), seen, place)
    h = _norm(x, part["post_attention_layernorm.weight"], config.rms_norm_eps)
    gate, up = _linear(h, part, "mlp.gate_proj"), _linear(h, part, "mlp.up_proj")
    out: Array = x + _linear(gate / (1 + np.exp(-gate)) * up, part, "mlp.down_proj")
    return out


def _norm(x: Array, gain: Array, eps: float) -> Array:
    normal: Array = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * gain
    return normal


def _linear(x: Array, weights: Mapping[str, Array], name: str) -> Array:
    out: Array = x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", np.float64(0))
    return out


def _attention(
    part: Mapping[str, Array], config: ModelConfig, x: Array, seen: NDArray[np.bool_], place: NDArray[Any]
) -> Array:
    width = config.head_dim
    q, k, v = (_linear(x, part, f"self_attn.{name}_proj") for name in "qkv")
    outs = []
    for head in range(config.num_attention_heads):
        group = head * config.num_key_value_heads // config.num_attention_heads
        q_head, k_head, v_head = (
            part_of[:, at * width : (at + 1) * width] for part_of, at in ((q, head), (k, group), (v, group))
        )
        if config.qk_norm:
            q_head = _norm(q_head, part["self_attn.q_norm.weight"], config.rms_norm_eps)
            k_head = _norm(k_head, part["self_attn.k_norm.weight"], config.rms_norm_eps)
        q_head, k_head = _turn(q_head, config, place), _turn(k_head, config, place)
        out = np.zeros_like(v_head)
        for t in range(len(x)):
            keys = np.flatnonzero(seen[t])
            if len(keys):
                scores = k_head[keys] @ q_head[t] / math.sqrt(width)
                shares = np.exp(scores - scores.max())
                out[t] = shares / shares.sum() @ v_head[keys]
        outs.append(out)
    return _linear(np.concatenate(outs, -1), part, "self_attn.o_proj")


def _turn(x: Array, config: ModelConfig, place: NDArray[Any]) -> Array:
    """Each channel pair as a complex number, times e^(i * position * frequency), times YaRN's factor."""
    frequency, factor = _frequencies(config)
    spin = factor * np.exp(1j * place[:, None] * frequency)
    half = config.head_dim // 2
    interleaved = config.rotary_layout == "interleaved"
    first, second = (x[:, 0::2], x[:, 1::2]) if interleaved else (x[:, :half], x[:, half:])
    turned = (first + 1j * second) * spin
    out = np.empty_like(x)
    if interleaved:
        out[:, 0::2], out[:, 1::2] = turned.real, turned.imag
    else:
        out[:, :half], out[:, half:] = turned.real, turned.imag
    return out


def _frequencies(config: ModelConfig) -> tuple[Array, float]:
    """Radians per position of every pair; the definitions of each scaling's own paper or model card."""
    width, theta, scaling = config.head_dim, config.rope_theta, config.rope_scaling or {"rope_type": "default"}
    plain = np.array([theta ** (-2 * pair / width) for pair in range(width // 2)])
    factor = scaling.get("factor", 1.0)
    trained = scaling.get("original_max_position_embeddings", config.max_position_embeddings)
    if scaling["rope_type"] == "linear":
        return plain / factor, 1.0
    if scaling["rope_type"] == "llama3":
        turns = trained * plain / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return kept * plain + (1 - kept) * plain / factor, 1.0
    if scaling["rope_type"] == "yarn":
        edges = [
            width * math.log(trained / (2 * math.pi * turns)) / (2 * math.log(theta))
            for turns in (scaling.get("beta_fast", 32), scaling.get("beta_slow", 1))
        ]
        if scaling.get("truncate", True):
            edges = [math.floor(edges[0]), math.ceil(edges[1])]
        start, end = max(edges[0], 0), min(edges[1], width - 1)
        stretched = np.clip((np.arange(width // 2) - start) / max(end - start, 0.001), 0, 1)
        return plain * (1 - stretched) + plain / factor * stretched, _yarn_factor(scaling)
    return plain, 1.0


def _yarn_factor(scaling: Mapping[str, Any]) -> float:
    """0.1 ln(factor) + 1, unless given outright or as the quotient of two such terms."""
    if "attention_factor" in scaling:
        return float(scaling["attention_factor"])
    log = 0.1 * math.log(scaling["factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return float((scaling["mscale"] * log + 1) / (scaling["mscale_all_dim"] * log + 1))
    return float(log + 1)
