"""config.json of a stock Llama or Qwen3, written from and read into our settings; Qwen2 and Mistral are read too.

What is read is checked against everything those classes can switch on that our decoder does not do: each refusal names
the key. Missing keys take the defaults of the model's own class, since transformers leaves defaults out of the file.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from modicum.model.values import shown
from modicum.store import UserError

if TYPE_CHECKING:
    from modicum.model.config import ModelConfig

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# What our decoder expresses, but would write as one of the two above: for importing only.
FOREIGN_ARCHITECTURES = {**_ARCHITECTURES, "qwen2": "Qwen2ForCausalLM", "mistral": "MistralForCausalLM"}

# The classes' own defaults (transformers 4.51 to 5.24) for what a file may leave out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "num_key_value_heads": None, "head_dim": None},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": None},
    "mistral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": None,
        "sliding_window": 4096,
    },
}
# These two have no such key: their code has biases on query, key and value, or none at all.
_FIXED: dict[str, dict[str, Any]] = {"qwen2": {"attention_bias": True}, "mistral": {"attention_bias": False}}
_COMMON_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
}
_TYPES: dict[str, tuple[type | None, ...]] = {
    "rope_parameters": (dict, None),
    "rope_scaling": (dict, None),
    "rope_theta": (int, float, None),
    "partial_rotary_factor": (int, float, None),
    "layer_types": (list, None),
    "sliding_window": (int, None),
    "max_position_embeddings": (int,),
    "attention_dropout": (int, float, None),
    "num_key_value_heads": (int, None),
    "head_dim": (int, None),
}
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


def hf_config(config: "ModelConfig", tokens: Mapping[str, int | list[int] | None], dtype: str) -> dict[str, Any]:
    """The dictionary for config.json; `tokens` holds the bos, eos and pad ids. Files are always in the half layout."""
    kind = "qwen3" if config.qk_norm else "llama"
    rope = config.rope_scaling or {"rope_type": "default"}
    written: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "initializer_range": config.initializer_range,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {**rope, "rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,
        "rope_scaling": dict(config.rope_scaling) if config.rope_scaling else None,
        "attention_bias": config.attention_bias,
        "attention_dropout": config.attention_dropout,
        "tie_word_embeddings": config.tie_word_embeddings,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
        **tokens,
    }
    if kind == "llama":
        return {**written, "mlp_bias": config.mlp_bias, "pretraining_tp": 1}
    return {
        **written,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": config.num_hidden_layers,
    }


def fields_from_hf(given: Mapping[str, Any], *, foreign: bool = False) -> dict[str, Any]:
    """ModelConfig's arguments from a config.json. Raises UserError naming every key that we do not support.

    foreign: read Qwen2 and Mistral too. A Qwen2's attention_bias is then true, though it has no bias on o_proj.
    """
    known = FOREIGN_ARCHITECTURES if foreign else _ARCHITECTURES
    kind = given.get("model_type")
    if not isinstance(kind, str) or kind not in known:
        *others, last = known
        raise UserError(f"config.json: model_type {shown(kind)} is not supported; {', '.join(others)} and {last} are")
    values = {**_COMMON_DEFAULTS, **_DEFAULTS[kind], **given, **_FIXED.get(kind, {})}
    faults = [f"{size} is missing" for size in _SIZES if size not in values]
    wrong = _wrong_types(values)
    rope: dict[str, Any] = {}
    if not wrong:
        rope, wrong = _rope(given)
        faults += _unsupported(values, kind)
    faults += wrong
    if faults:
        raise UserError("config.json describes a model that is not supported:\n" + "\n".join(f"  {f}" for f in faults))
    names = (*_SIZES, "max_position_embeddings", *_COMMON_DEFAULTS)
    fields = {name: values[name] for name in names}
    fields["num_key_value_heads"] = values["num_key_value_heads"] or 0
    fields["head_dim"] = values["head_dim"] or 0
    mlp_bias = values.get("mlp_bias") if kind == "llama" else None
    fields["mlp_bias"] = False if mlp_bias is None else mlp_bias
    fields["attention_dropout"] = values["attention_dropout"] or 0.0
    return {**fields, **rope, "qk_norm": kind == "qwen3"}


def _wrong_types(values: Mapping[str, Any]) -> list[str]:
    """What would not survive being looked at; the sizes are ModelConfig's to check."""
    faults = []
    for key, kinds in _TYPES.items():
        value = values.get(key)
        if type(value) not in kinds and not (value is None and None in kinds) and key in values:
            named = " or ".join("null" if kind is None else kind.__name__ for kind in kinds)
            faults.append(f"{key} must be {named}, not {shown(value)}")
    return faults


def _unsupported(values: Mapping[str, Any], kind: str) -> list[str]:
    faults = []
    wanted = FOREIGN_ARCHITECTURES[kind]
    architectures = values.get("architectures") or [wanted]
    if architectures != [wanted]:
        faults.append(f"architectures {shown(architectures)}: only [{wanted!r}] is a {kind} language model")
    if values.get("hidden_act", "silu") != "silu":
        faults.append(f"hidden_act {shown(values['hidden_act'])}: the feed-forward is SwiGLU, silu")
    if kind == "qwen3" and values.get("mlp_bias"):
        faults.append("mlp_bias: a Qwen3 has no MLP biases")
    layers = [layer for layer in values.get("layer_types") or [] if layer != "full_attention"]
    windows = {layer if isinstance(layer, str) else shown(layer) for layer in layers}
    window = values.get("sliding_window")
    # a Mistral's window that no sequence outgrows hides nothing
    active = window < values["max_position_embeddings"] if kind == "mistral" and window else window
    if windows:
        faults.append(f"layer_types {shown(sorted(windows))}: every layer attends fully")
    elif active and values.get("use_sliding_window", kind in ("llama", "mistral")):
        faults.append(f"sliding_window {shown(window)}: every layer attends fully")
    if values.get("quantization_config"):
        faults.append("quantization_config: the weights must be stored unquantized")
    return faults


def _rope(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """rope_theta and rope_scaling from either spelling; transformers lets the older one win where both stand."""
    parameters = dict(given.get("rope_scaling") or given.get("rope_parameters") or {})
    both = {**(given.get("rope_parameters") or {}), **parameters}
    own = {name: parameters.pop(name, None) for name in ("rope_theta", "partial_rotary_factor")}
    theta = _first(own["rope_theta"], given.get("rope_theta"), both.get("rope_theta"), 10_000.0)
    partial = _first(own["partial_rotary_factor"], given.get("partial_rotary_factor"), 1.0)
    faults = []
    if partial != 1.0:
        faults.append(f"partial_rotary_factor {shown(partial)}: the whole head is rotated")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "dynamic":
        faults.append("rope_type 'dynamic' (dynamic NTK): its frequencies change with the length, so a cache would lie")
    elif kind not in ("default", "linear", "llama3", "yarn"):
        faults.append(f"rope_type {shown(kind)}: linear, llama3 and yarn are supported")
    return {"rope_theta": theta, "rope_scaling": None if kind == "default" else parameters}, faults


def _first(*values: Any) -> Any:
    """The first that was given: a zero is given, and wrong, where a missing one is not."""
    return next(value for value in values if value is not None)
