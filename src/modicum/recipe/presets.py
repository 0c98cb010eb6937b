"""The sizes a recipe can name. Dimensions divide by 256 where the size allows (GGUF k-quants), head_dim is 64.

`cyberslm` is the shape of an existing security model, 33,531,264 parameters with tied embeddings, kept to the number
though its rows do not divide by 256: k-quants of it fall back to other types.
"""

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # for tests: learns a few sentences in seconds
    "nano": {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 384,
        "vocab_size": 1024,
        "max_position_embeddings": 512,
    },
    "micro": {
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "intermediate_size": 768,
    },
    "mini": {
        "hidden_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "intermediate_size": 1536,
    },
    "cyberslm": {
        "hidden_size": 384,
        "num_hidden_layers": 12,
        "num_attention_heads": 6,
        "intermediate_size": 1024,
        "vocab_size": 32_000,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
    },
    "small": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 2048,
    },
    "base": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 2816,
    },
}
