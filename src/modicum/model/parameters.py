"""How many trainable numbers a decoder has, by part."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modicum.model.config import ModelConfig


@dataclass(frozen=True)
class Parameters:
    """Trainable numbers by part; `head` is 0 where it is tied to the embedding."""

    embedding: int
    attention: int
    mlp: int
    norms: int
    head: int

    @property
    def total(self) -> int:
        return self.embedding + self.attention + self.mlp + self.norms + self.head


def parameters_by_part(config: "ModelConfig") -> Parameters:
    """Weights and biases; QK-norm's gains count as norms."""
    hidden, layers = config.hidden_size, config.num_hidden_layers
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    inner = config.intermediate_size
    attention = 2 * hidden * queries + 2 * hidden * keys + config.attention_bias * (queries + 2 * keys + hidden)
    mlp = 3 * hidden * inner + config.mlp_bias * (2 * inner + hidden)
    return Parameters(
        embedding=config.vocab_size * hidden,
        attention=layers * attention,
        mlp=layers * mlp,
        norms=layers * (2 * hidden + config.qk_norm * 2 * config.head_dim) + hidden,
        head=0 if config.tie_word_embeddings else config.vocab_size * hidden,
    )
