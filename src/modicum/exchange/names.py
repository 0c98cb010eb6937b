"""What the weights of a decoder are called: in our files, which have Hugging Face's names, and in each dialect.

The one table of names for reading and for writing, and the shapes that belong to them.
"""

from typing import Literal

from modicum.model import ModelConfig

Dialect = Literal["cyberslm", "slm", "core", "hf", "gguf"]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"  # the head is called so everywhere but in GGUF

# A row a module: ours, cyberslm's, slm's, core's, GGUF's; those of a layer stand behind `model.layers.N.`, `layers.N.`
# there, `blk.N.` in GGUF.
_DIALECTS = ("cyberslm", "slm", "core", "gguf")
_MODULES = (
    ("model.embed_tokens", "embedding", "embed_tokens", "embedding", "token_embd"),
    ("input_layernorm", "attn_norm", "input_layernorm", "attn_norm", "attn_norm"),
    ("self_attn.q_proj", "attn.q_proj", "self_attn.q_proj", "attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn.k_proj", "self_attn.k_proj", "attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn.v_proj", "self_attn.v_proj", "attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn.o_proj", "self_attn.o_proj", "attn.out_proj", "attn_output"),
    ("self_attn.q_norm", "", "", "", "attn_q_norm"),
    ("self_attn.k_norm", "", "", "", "attn_k_norm"),
    ("post_attention_layernorm", "ffn_norm", "post_attention_layernorm", "ffn_norm", "ffn_norm"),
    ("mlp.gate_proj", "ffn.gate_proj", "mlp.gate_proj", "mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn.val_proj", "mlp.up_proj", "mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn.out_proj", "mlp.down_proj", "mlp.down_proj", "ffn_down"),
    ("model.norm", "final_norm", "norm", "norm", "output_norm"),
)


def foreign_names(dialect: Dialect, config: ModelConfig) -> dict[str, str]:
    """The dialect's name of every weight of such a model -> ours. A tied head is not among them."""
    return {_translated(dialect, name): name for name in weight_shapes(config)}


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Our name of every weight of such a model -> its shape; by arithmetic, so that no size can exhaust memory."""
    hidden, inner, width = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * width, config.num_key_value_heads * width
    linear = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    for module, shape in linear.items():
        layer[f"{module}.weight"] = shape
        if config.attention_bias if module.startswith("self_attn") else config.mlp_bias:
            layer[f"{module}.bias"] = shape[:1]
    if config.qk_norm:
        layer |= {"self_attn.q_norm.weight": (width,), "self_attn.k_norm.weight": (width,)}
    layer["post_attention_layernorm.weight"] = (hidden,)
    table = (config.vocab_size, hidden)
    layers = range(config.num_hidden_layers)
    return {
        EMBEDDING: table,
        **{f"model.layers.{number}.{name}": shape for number in layers for name, shape in layer.items()},
        "model.norm.weight": (hidden,),
        **({} if config.tie_word_embeddings else {HEAD: table}),
    }


def _translated(dialect: Dialect, name: str) -> str:
    if dialect == "hf":
        return name
    if name == HEAD:
        return "output.weight" if dialect == "gguf" else HEAD
    prefix, inside = "", name
    if name.startswith("model.layers."):
        _, _, number, inside = name.split(".", 3)
        prefix = f"blk.{number}." if dialect == "gguf" else f"layers.{number}."
    module, kind = inside.rsplit(".", 1)
    theirs = {row[0]: row[1 + _DIALECTS.index(dialect)] for row in _MODULES}
    return f"{prefix}{theirs[module]}.{kind}"


def shown(text: str) -> str:
    """The first 80 characters of what a file says, escaped, so that a terminal shows them and does no more."""
    return text[:80].encode("unicode_escape").decode("ascii")[:80]
