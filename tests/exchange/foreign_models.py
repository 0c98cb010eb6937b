"""Synthetic foreign checkpoints, and what they say: NumPy float64, in each dialect's own names and rotary layout.

Written from the dialects' descriptions alone; shares no table and no code with the program.
"""

import numpy as np
import torch

NAMES = {
    "cyberslm": {
        "table": "embedding", "norm": "final_norm", "norm1": "attn_norm", "norm2": "ffn_norm",
        "q": "attn.q_proj", "k": "attn.k_proj", "v": "attn.v_proj", "o": "attn.o_proj",
        "gate": "ffn.gate_proj", "up": "ffn.val_proj", "down": "ffn.out_proj",
    },
    "slm": {
        "table": "embed_tokens", "norm": "norm", "norm1": "input_layernorm", "norm2": "post_attention_layernorm",
        "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
        "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
    },
    "core": {
        "table": "embedding", "norm": "norm", "norm1": "attn_norm", "norm2": "ffn_norm",
        "q": "attn.q_proj", "k": "attn.k_proj", "v": "attn.v_proj", "o": "attn.out_proj",
        "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
    },
}  # fmt: skip
DIALECTS = tuple(NAMES)
HIDDEN, LAYERS, HEADS, INNER, POSITIONS = 48, 3, 4, 64, 128
KEYS = {"cyberslm": 4, "slm": 2, "core": 4}  # only slm groups its queries
INTERLEAVED = {"cyberslm": True, "slm": False, "core": True}
THETA, EPS = 5000.0, 1e-5


def config(dialect, vocab, *, tied=True, bias=False):
    """The config as that system writes it, plain values."""
    if dialect == "cyberslm":
        return {
            "vocab_size": vocab, "max_seq_len": POSITIONS, "hidden_dim": HIDDEN, "num_layers": LAYERS,
            "num_heads": HEADS, "head_dim": HIDDEN // HEADS, "ffn_hidden_dim": INNER, "rope_base": THETA,
            "norm_eps": EPS, "tie_weights": tied, "bias": bias, "dropout": 0.0, "attn_dropout": 0.0,
            "pad_token_id": None, "bos_token_id": 2, "eos_token_id": 3,
        }  # fmt: skip
    if dialect == "slm":
        return {
            "vocab_size": vocab, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS, "num_key_value_heads": KEYS["slm"], "max_position_embeddings": POSITIONS,
            "rope_theta": THETA, "rms_norm_eps": EPS, "attention_bias": bias, "mlp_bias": bias,
            "tie_word_embeddings": tied,
        }  # fmt: skip
    return {
        "n_embd": HIDDEN, "n_head": HEADS, "n_layer": LAYERS, "vocab_size": vocab, "block_size": POSITIONS,
        "dropout": 0.0, "bias": bias, "rope_theta": THETA, "norm_eps": EPS, "ffn_dim_multiplier": 0.5,
        "multiple_of": INNER, "tie_weights": tied,
    }  # fmt: skip


def state(dialect, vocab, *, tied=True, bias=False, dtype=torch.float32, seed=0):
    """Random weights by the dialect's names, large enough that each of them shows in the logits."""
    generator = torch.Generator().manual_seed(seed)
    names, keys = NAMES[dialect], KEYS[dialect] * HIDDEN // HEADS

    def matrix(out, into):
        return torch.randn(out, into, generator=generator) * 0.9 / into**0.5

    def gain(width):
        return 1 + 0.3 * torch.randn(width, generator=generator)

    shapes = {
        "q": (HIDDEN, HIDDEN), "k": (keys, HIDDEN), "v": (keys, HIDDEN), "o": (HIDDEN, HIDDEN),
        "gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER),
    }  # fmt: skip
    made = {f"{names['table']}.weight": matrix(vocab, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"layers.{layer}."
        made |= {f"{prefix}{names[norm]}.weight": gain(HIDDEN) for norm in ("norm1", "norm2")}
        for part, shape in shapes.items():
            made[f"{prefix}{names[part]}.weight"] = matrix(*shape)
            if bias:
                made[f"{prefix}{names[part]}.bias"] = 0.5 * torch.randn(shape[0], generator=generator)
    made[f"{names['norm']}.weight"] = gain(HIDDEN)
    if not tied:
        made["lm_head.weight"] = matrix(vocab, HIDDEN)
    return {name: value.to(dtype) for name, value in made.items()}


def logits(dialect, weights, ids):
    """(T, V) float64 of ids (T,)."""
    names = NAMES[dialect]
    w = {name: value.double().numpy() for name, value in weights.items()}
    heads, groups, width = HEADS, KEYS[dialect], HIDDEN // HEADS
    spin = np.exp(1j * np.arange(len(ids))[:, None] * THETA ** (-np.arange(0, width, 2) / width))

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * w[f"{name}.weight"]

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def turned(x):
        """(T, width) as complex channel pairs, so that a score is the real part of a product."""
        pairs = x[:, 0::2] + 1j * x[:, 1::2] if INTERLEAVED[dialect] else x[:, : width // 2] + 1j * x[:, width // 2 :]
        return pairs * spin

    x = w[f"{names['table']}.weight"][np.asarray(ids)]
    for layer in range(LAYERS):
        prefix = f"layers.{layer}."
        h = norm(x, prefix + names["norm1"])
        q, k, v = (linear(h, prefix + names[part]) for part in "qkv")
        outs = []
        for head in range(heads):
            group = head // (heads // groups)
            q_head, k_head = (turned(part[:, at * width : (at + 1) * width]) for part, at in ((q, head), (k, group)))
            scores = (q_head @ k_head.conj().T).real / np.sqrt(width)
            scores[np.triu_indices(len(ids), 1)] = -np.inf
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            outs.append(shares / shares.sum(-1, keepdims=True) @ v[:, group * width : (group + 1) * width])
        x = x + linear(np.concatenate(outs, -1), prefix + names["o"])
        h = norm(x, prefix + names["norm2"])
        gate = linear(h, prefix + names["gate"])
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, prefix + names["up"]), prefix + names["down"])
    head = w.get("lm_head.weight", w[f"{names['table']}.weight"])
    return norm(x, names["norm"]) @ head.T
