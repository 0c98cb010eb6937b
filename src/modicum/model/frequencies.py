"""How fast each channel pair of a head turns: rotary frequencies with linear, llama3 and YaRN scaling.

Computed in float32 step for step as transformers does, so that angles agree at long positions too.
Sources: Su et al. 2021 (RoPE), kaiokendev 2023 (linear), Llama 3.1's model card (llama3), Peng et al. 2023 (YaRN).
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from modicum.model.values import as_float, shown

_KEYS = {
    "linear": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor"}, {"original_max_position_embeddings"}),
    "yarn": (
        {"factor"},
        {
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        },
    ),
}


def rotary_frequencies(
    head_dim: int, theta: float, scaling: Mapping[str, Any] | None, max_position_embeddings: int
) -> tuple[Tensor, float]:
    """Radians per position of each pair, (head_dim/2,) float32 on the CPU, and the factor that multiplies cos and sin.

    `scaling` is what `normal_scaling` returned, or None. The factor is 1.0 except for YaRN.
    """
    channel = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    if scaling is None:
        return 1.0 / (theta**channel), 1.0
    if scaling["rope_type"] == "linear":
        return 1.0 / (theta**channel) / scaling["factor"], 1.0
    if scaling["rope_type"] == "llama3":
        return _llama3(1.0 / (theta**channel), scaling), 1.0
    return _yarn(theta**channel, theta, head_dim, scaling, max_position_embeddings)


def _llama3(frequency: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, and those between blended."""
    trained = scaling["original_max_position_embeddings"]
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    wave = 2 * math.pi / frequency
    share = (trained / wave - low) / (high - low)
    blended = (1 - share) * frequency / factor + share * frequency
    return torch.where(wave > trained / low, frequency / factor, torch.where(wave < trained / high, frequency, blended))


def _yarn(
    period: Tensor, theta: float, head_dim: int, scaling: Mapping[str, Any], max_position_embeddings: int
) -> tuple[Tensor, float]:
    """Channels that turn more than beta_fast times in the trained length are kept, fewer than beta_slow stretched."""
    factor = scaling["factor"]
    trained = scaling.get("original_max_position_embeddings") or max_position_embeddings

    def channel_with(turns: float) -> float:
        return head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel_with(scaling.get("beta_fast") or 32), channel_with(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the ramp would divide by zero; the width is transformers'
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low), 0, 1)
    kept = 1 - ramp
    frequency = 1.0 / (factor * period) * (1 - kept) + 1.0 / period * kept
    return frequency, _yarn_attention_factor(scaling)


def _yarn_attention_factor(scaling: Mapping[str, Any]) -> float:
    """What multiplies cos and sin, and so by its square the scores: sharper attention over a longer context."""

    def mscale(weight: float) -> float:
        return 1.0 if scaling["factor"] <= 1 else 0.1 * weight * math.log(scaling["factor"]) + 1.0

    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)


# Beyond these no scaling of any model is meant, and within them every step above is finite.
_LEAST, _MOST = 1e-6, 2.0**31


def normal_scaling(
    given: Mapping[str, Any], max_position_embeddings: int, theta: float
) -> tuple[dict[str, Any] | None, list[str]]:
    """The scaling with one spelling for one meaning, and its faults (then the first is not to be used).

    "type" becomes "rope_type", "default" becomes None. For llama3 the trained length is written out. For YaRN it is
    left out where it equals max_position_embeddings: older releases of transformers take max_position_embeddings /
    original_max_position_embeddings for the factor, later ones `factor`; where all three stand, they must agree.
    """
    scaling = {key: value for key, value in given.items() if value is not None and key not in ("type", "rope_theta")}
    kind = scaling.setdefault("rope_type", given.get("type", "default"))
    if kind == "default":
        return None, []
    if not isinstance(kind, str) or kind not in _KEYS:
        return None, [f"rope_scaling: rope_type {shown(kind)} is not supported; linear, llama3 and yarn are"]
    needed, optional = _KEYS[kind]
    present = set(scaling) - {"rope_type"}
    if present - needed - optional == {"partial_rotary_factor"} and scaling["partial_rotary_factor"] == 1.0:
        present.discard(scaling.pop("partial_rotary_factor", "partial_rotary_factor"))
        present.discard("partial_rotary_factor")
    faults = [f"rope_scaling: {kind} needs {key}" for key in sorted(needed - present)]
    faults += [f"rope_scaling: {key} is unknown to {kind}" for key in sorted(present - needed - optional)]
    faults += [
        f"rope_scaling: {key} must be a number above 0, from {_LEAST} to 2^31, not {shown(scaling[key])}"
        for key in sorted(present & (needed | optional) - {"truncate"})
        if not _LEAST <= as_float(scaling[key]) <= _MOST
    ]
    if "truncate" in present and not isinstance(scaling["truncate"], bool):
        faults.append(f"rope_scaling: truncate must be true or false, not {shown(scaling['truncate'])}")
    if kind == "yarn" and not theta > 1:
        faults.append(f"rope_scaling: yarn needs a rope_theta above 1, not {theta}: it divides by its logarithm")
    if faults:
        return None, faults
    trained = scaling.get("original_max_position_embeddings")
    if scaling["factor"] < 1:
        faults.append(f"rope_scaling: factor must be at least 1, not {scaling['factor']}")
    if kind == "llama3":
        scaling.setdefault("original_max_position_embeddings", max_position_embeddings)
        if scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
            faults.append("rope_scaling: low_freq_factor must be below high_freq_factor")
    if kind == "yarn" and trained == max_position_embeddings:
        del scaling["original_max_position_embeddings"]
    elif kind == "yarn" and trained and not math.isclose(trained * scaling["factor"], max_position_embeddings):
        faults.append(
            f"rope_scaling: factor {scaling['factor']} times original_max_position_embeddings {trained} must be "
            f"max_position_embeddings {max_position_embeddings}: releases of transformers read the three differently"
        )
    return scaling, faults
