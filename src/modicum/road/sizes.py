"""What training a decoder takes on paper: bytes by part. Pure arithmetic, no measurement."""

from dataclasses import dataclass, replace

from modicum.model import ModelConfig, parameters_by_part
from modicum.train.optimizer import Kind

# Hoffmann et al. 2022, "Training Compute-Optimal Large Language Models": about 20 tokens a parameter spend a given
# amount of training compute best. A model that is used for long deserves more.
OPTIMAL_TOKENS_PER_PARAMETER = 20


@dataclass(frozen=True)
class TrainingState:
    """Bytes that training holds from the first update to the last, whatever the batch."""

    weights: int
    gradients: int
    optimizer: int


def training_state(config: ModelConfig, optimizer: Kind = "adamw") -> TrainingState:
    """fp32 master weights, fp32 gradients, and the moments: AdamW's two in fp32, of the layers' matrices Muon's one and
    a number a row."""
    count = config.parameter_count()
    matrices = parameters_by_part(replace(config, attention_bias=False, mlp_bias=False))
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    rows = config.num_hidden_layers * (heads * config.head_dim + 2 * config.intermediate_size + 2 * config.hidden_size)
    spared = 4 * (matrices.attention + matrices.mlp - rows) if optimizer == "muon" else 0
    return TrainingState(weights=4 * count, gradients=4 * count, optimizer=8 * count - spared)


def checkpoint_bytes(config: ModelConfig, optimizer: Kind = "adamw") -> int:
    """Bytes of a checkpoint that training can go on from: fp32 weights, and what the optimizer remembers."""
    state = training_state(config, optimizer)
    return state.weights + state.optimizer


def logits_bytes(config: ModelConfig, tokens: int, *, bytes_each: int) -> int:
    """Bytes of the logits of `tokens` tokens, and of their gradient, at `bytes_each` bytes a number."""
    return 2 * tokens * config.vocab_size * bytes_each
