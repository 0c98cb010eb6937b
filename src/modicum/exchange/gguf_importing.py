"""A GGUF file as a foreign checkpoint: its config, its weights as numbers, and its tokenizer, each checked."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modicum.exchange.described import Described
from modicum.exchange.foreign import Foreign, read_weights
from modicum.exchange.gguf_file import GgufFile
from modicum.exchange.gguf_metadata import (
    LAYOUTS,
    LLAMA3_FIELDS,
    LLAMA3_KEYS,
    TRAINED,
    frequency_factors,
    usual_sharpness,
    whole,
)
from modicum.exchange.gguf_weights import FREQUENCIES, Quant, unpacked
from modicum.exchange.names import shown
from modicum.exchange.stored import Claim, Stored
from modicum.model import ModelConfig
from modicum.store import UserError

_DTYPES: dict[Quant, torch.dtype] = {"f16": torch.float16, "bf16": torch.bfloat16}
# Behind the architecture's name: what must be a whole number, what a number, and what says nothing of the model.
_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
}
_NUMBERS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta"}
_OPTIONAL = {"attention.head_count_kv", "attention.key_length", "rope.freq_base"}
_READ_ELSEWHERE = {"vocab_size", "attention.value_length", "rope.dimension_count", "expert_count", "expert_used_count"}
_SCALING = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
# GGUF keeps llama3's factors, not the numbers they were made of: those of Llama 3.1 and of 3.2.
_LLAMA3 = {
    "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip


def foreign_of(file: GgufFile) -> Foreign:
    """The model of a file, its weights in float32 unless all of them are of one half type.

    Raises UserError, naming key and tensor, for whatever is not exactly such a model.
    """
    config = _config(file)
    names = [name for name in file.tensors if name != FREQUENCIES]
    claims = {
        name: Claim(file.tensors[name].shape, _DTYPES.get(file.tensors[name].kind, torch.float32)) for name in names
    }
    # read_gguf knows that the file has room for its tensors, which may be smaller there than they become
    size = sum(4 * math.prod(claim.shape) for claim in claims.values())
    stored = Stored(file.path, size, claims, lambda: {name: _tensor(file, name) for name in names})
    architecture = f"{file.values['general.architecture']} (GGUF)"
    described = Described(architecture, config)
    return Foreign(file.path, architecture, config, read_weights(stored, described, "gguf"), ())


def _tensor(file: GgufFile, name: str) -> Tensor:
    kind, data = file.tensors[name].kind, file.bytes_of(name)
    if kind == "bf16":
        return torch.from_numpy(data).view(torch.bfloat16)
    return torch.from_numpy(data.view("<f2") if kind == "f16" else unpacked(data, kind))


def _config(file: GgufFile) -> ModelConfig:
    kind = file.values.get("general.architecture")
    if not isinstance(kind, str) or kind not in LAYOUTS:
        raise UserError(f"{file.path}: architecture {str(kind)[:60]!r} cannot be imported; {' and '.join(LAYOUTS)} can")
    values = {key.removeprefix(f"{kind}."): value for key, value in file.values.items() if key.startswith(f"{kind}.")}
    fields, faults = _fields(values)
    scaling, wrong = _scaling(values)
    faults += wrong
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        faults.append("token_embd.weight: missing")
    elif values.get("vocab_size", embedding.shape[0]) != embedding.shape[0]:
        faults.append(
            f"vocab_size: {shown(str(values['vocab_size']))}, and the embedding has {embedding.shape[0]:,} rows"
        )
    if faults or embedding is None:
        raise UserError("\n".join([f"{file.path}: not a model that is known here", *(f"  {f}" for f in faults)]))
    try:
        config = ModelConfig(
            vocab_size=embedding.shape[0],
            qk_norm=kind == "qwen3",
            attention_bias="blk.0.attn_q.bias" in file.tensors,
            mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
            tie_word_embeddings="output.weight" not in file.tensors,
            rope_scaling=scaling,
            rotary_layout=LAYOUTS[kind],
            **fields,
        )
        config = _with_factors(file, config)
    except UserError as error:
        raise UserError(f"{file.path}: {error}") from None
    rotated = values.get("rope.dimension_count", config.head_dim)
    if rotated != config.head_dim or values.get("attention.value_length", config.head_dim) != config.head_dim:
        raise UserError(f"{file.path}: heads of {config.head_dim} of which {rotated} are rotated; all must be")
    return config


def _fields(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """ModelConfig's arguments, and what is missing, of the wrong kind, or not known and so perhaps decisive."""
    found: dict[str, Any] = {}
    faults = []
    for key, field in (_SIZES | _NUMBERS).items():
        value = values.get(key)
        if value is None:
            faults += [] if key in _OPTIONAL else [f"{key}: missing"]
        elif type(value) is not int and (key in _SIZES or type(value) is not float):
            faults.append(f"{key}: expected a number, found {shown(str(value))}")
        else:
            found[field] = value if key in _SIZES else float(value)
    known = {*_SIZES, *_NUMBERS, *_READ_ELSEWHERE}
    faults += [
        f"{shown(key)}: not known here" for key in values if key not in known and not key.startswith("rope.scaling.")
    ]
    if values.get("expert_count"):
        faults.append(f"expert_count {values['expert_count']}: a mixture of experts")
    return found, faults


def _scaling(values: Mapping[str, Any]) -> tuple[dict[str, Any] | None, list[str]]:
    """Linear and YaRN from their keys."""
    given = {k.removeprefix("rope.scaling."): v for k, v in values.items() if k.startswith("rope.scaling.")}
    kind = given.pop("type", "none")
    given.pop("finetuned", None)
    if kind == "none":
        return None, [f"rope.scaling.{shown(key)}: without a type" for key in given]
    if kind not in ("linear", "yarn"):
        return None, [f"rope.scaling.type {str(kind)[:60]!r}: linear and yarn are read"]
    share = given.pop("attn_factor", None)
    wrong = {key: value for key, value in given.items() if key not in _SCALING or type(value) not in (int, float)}
    if share is not None and type(share) not in (int, float):
        wrong["attn_factor"] = share
    if wrong or not isinstance(given.get("factor"), int | float) or not given["factor"] > 0:
        return None, [f"rope.scaling of type {kind}: {str({**given, **wrong})[:200]} is not known here"]
    found: dict[str, Any] = {"rope_type": kind, **{_SCALING[key]: value for key, value in given.items()}}
    if share is not None:
        found["attention_factor"] = _sharpness(float(share), usual_sharpness(found["factor"]))
    if kind == "yarn":
        found = {
            key: value for key, value in found.items() if (key, value) not in (("beta_fast", 32), ("beta_slow", 1))
        }
    return found, []


def _sharpness(share: float, usual: float) -> float:
    """The shortest decimal of which a file would give this share of the usual sharpness."""
    tried = (float(f"{share * usual:.{digits}g}") for digits in range(1, 18))
    return next((found for found in tried if np.float32(found / usual) == np.float32(share)), share * usual)


def _with_factors(file: GgufFile, config: ModelConfig) -> ModelConfig:
    """The config with the scaling that the file's frequency factors are of."""
    if FREQUENCIES not in file.tensors:
        return config
    place = file.tensors[FREQUENCIES]
    if (
        place.kind != "f32"
        or place.shape != (config.head_dim // 2,)
        or config.rope_scaling is not None
        or config.qk_norm
    ):
        raise UserError(f"{FREQUENCIES}: {place.kind} {list(place.shape)} do not belong to this model")
    found = file.bytes_of(FREQUENCIES).view("<f4")
    own = {key: file.values.get(LLAMA3_KEYS + key) for key in LLAMA3_FIELDS}
    length = own[TRAINED]
    own[TRAINED] = whole(length) if isinstance(length, float) else length
    for scaling in ({"rope_type": "llama3", **own}, {**_LLAMA3, "factor": 8.0}, {**_LLAMA3, "factor": 32.0}):
        if None in scaling.values():
            continue  # the file says nothing of it, or not all
        tried = ModelConfig(**{**vars(config), "rope_scaling": scaling})
        factors = frequency_factors(tried)
        if factors is not None and np.allclose(factors, found, rtol=1e-5):
            return tried
    raise UserError(f"{FREQUENCIES}: not the factors of Llama 3.1 or 3.2, and nothing in the file says what of")
