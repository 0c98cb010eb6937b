"""What a decoder costs on paper: FLOPs a token, bytes by part. Pure arithmetic, no measurement."""

from dataclasses import dataclass, replace

from modicum.model import ModelConfig, parameters_by_part
from modicum.train.optimizer import Kind

# Hoffmann et al. 2022, "Training Compute-Optimal Large Language Models": about 20 tokens a parameter spend a given
# amount of training compute best. A model that is used for long deserves more.
OPTIMAL_TOKENS_PER_PARAMETER = 20

# Of a checkpoint that training can go on from: an fp32 weight and AdamW's two fp32 moments.
CHECKPOINT_BYTES_PER_PARAMETER = 12


def training_flops_per_token(config: ModelConfig, sequence_length: int) -> int:
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


@dataclass(frozen=True)
class TrainingState:
    """Bytes that training holds from the first update to the last, whatever the batch."""

    weights: int
    gradients: int
    optimizer: int


def training_state(config: ModelConfig, optimizer: Kind = "adamw") -> TrainingState:
    """fp32 master weights, fp32 gradients, and the moments: AdamW's two in fp32, Muon's one of the layers' matrices."""
    count = config.parameter_count()
    matrices = parameters_by_part(replace(config, attention_bias=False, mlp_bias=False))
    spared = 4 * (matrices.attention + matrices.mlp) if optimizer == "muon" else 0
    return TrainingState(weights=4 * count, gradients=4 * count, optimizer=8 * count - spared)


def logits_bytes(config: ModelConfig, tokens: int, *, bytes_each: int) -> int:
    """Bytes of the logits of `tokens` tokens, and of their gradient, at `bytes_each` bytes a number."""
    return 2 * tokens * config.vocab_size * bytes_each
