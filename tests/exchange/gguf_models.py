"""Small checkpoints whose every weight shows in the logits, for files that llama.cpp runs."""

import torch

from modicum.checkpoint import save_checkpoint
from modicum.model import Decoder, ModelConfig

SIZES = {
    "vocab_size": 384, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
    "max_position_embeddings": 64, "initializer_range": 0.3,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
SHAPES = {
    "plain": {},
    "grouped, untied": {"num_key_value_heads": 2, "tie_word_embeddings": False},
    "biases": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2},
    "QK-norm": {"qk_norm": True, "head_dim": 24, "num_key_value_heads": 2},
    "own head width": {"head_dim": 24},
    "no even rows": {"hidden_size": 36, "num_attention_heads": 6, "head_dim": 6, "intermediate_size": 50},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "yarn": {"rope_scaling": YARN},
    "yarn of its own sharpness": {"rope_scaling": {**YARN, "attention_factor": 1.3, "beta_fast": 16.0}},
    "yarn with mscale": {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}},
    "yarn with QK-norm": {"rope_scaling": YARN, "qk_norm": True},
    "llama3": {"rope_scaling": LLAMA3},
    "rows without a token": {"vocab_size": 448, "rope_theta": 500000.0, "rms_norm_eps": 1e-6},
}


def config(**changes):
    return ModelConfig(**{**SIZES, **changes})


def save(tokenizer, folder, *, dtype=torch.float32, chat=True, **changes):
    """A checkpoint below `folder`, with gains and biases that are not all alike."""
    model = Decoder(config(**changes))
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: weight + 0.3 * torch.randn(weight.shape, generator=generator) if weight.ndim == 1 else weight
        for name, weight in model.state_dict().items()
    }
    weights = {name: weight.to(dtype) for name, weight in weights.items()}
    return save_checkpoint(
        folder, 1, config=model.config, weights=weights, tokenizer=tokenizer, chat=chat, training=None
    )
