"""How many trainable numbers a decoder has, by part, and the arithmetic of learning one token."""

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


def training_flops_per_token(config: "ModelConfig", sequence_length: int) -> int:
    """Floating-point operations of forward and backward for one token in a window of `sequence_length`.

    6 for each parameter that is multiplied with: the attention's and the MLP's matrices and the head (a tied head
    counts, looking a token up in the embedding does not), plus 12 · layers · heads · head_dim · length for the scores
    (Chowdhery et al. 2022, PaLM, appendix B), halved because a token attends to nothing later than itself and our
    kernels skip the rest.
    """
    parts = parameters_by_part(config)
    head = config.vocab_size * config.hidden_size
    queries = config.num_attention_heads * config.head_dim
    scores = 6 * config.num_hidden_layers * queries * sequence_length
    return 6 * (parts.attention + parts.mlp + head) + scores
