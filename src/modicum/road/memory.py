"""Peak memory of a training stage by part: measured where there was a trial, estimated where there was none."""

from dataclasses import dataclass, replace

from modicum.model import ModelConfig, parameters_by_part
from modicum.road.sizes import logits_bytes, training_state
from modicum.road.trial import Trial
from modicum.road.works import TrainingWork
from modicum.train.loss import chunk_rows

# Python, torch and modicum as they are loaded, and what torch.compile's own modules add; resident bytes on Linux.
_PROGRAM, _COMPILER = 300_000_000, 160_000_000
_EARLIER = 100_000_000  # what earlier stages leave in the process's heap, in a run of the shipped corpus
_TRY_SHARE = 0.5  # of the free memory: what a trial may be expected to take


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the stage's fullest moment. activations: what the layers keep for their backward pass, and
    work space; measured: whether the sum was, from a trial, or is an estimate. After a trial on a GPU
    the program's own memory, which is the machine's, is not counted. whole: what ranks that share the state out hold
    more than their share of, an estimate in any case."""

    stage: str
    program: int
    weights: int
    gradients: int
    optimizer: int
    logits: int
    activations: int
    measured: bool
    whole: int = 0

    @property
    def total(self) -> int:
        state = self.weights + self.gradients + self.optimizer
        return self.program + state + self.whole + self.logits + self.activations


def expected_memory(config: ModelConfig, work: TrainingWork, trial: Trial | None) -> Memory:
    """The parts that follow from sizes, and activations: the rest of what a trial took, or an estimate.

    A trial with fewer rows than the stage has is scaled up: activations grow with rows, nothing else does. It is of one
    process, which holds the whole state; ranks that share that out hold a part each.
    """
    state = training_state(config, work.optimizer)
    parts = work.ranks if work.sharded else 1
    logits = logits_bytes(config, chunk_rows(config.vocab_size, work.rows * work.length), bytes_each=4)
    fixed = state.weights + state.gradients + state.optimizer + logits
    if trial is None:
        program = _PROGRAM + _COMPILER * work.compiles + _EARLIER
        activations = round(activation_bytes(config, work) * work.rows * work.length)
    else:
        on_device = trial.device_bytes > 0
        program = 0 if on_device else trial.program_bytes
        peak = trial.device_bytes if on_device else trial.peak_bytes
        tried = logits_bytes(config, chunk_rows(config.vocab_size, trial.rows * trial.length), bytes_each=4)
        activations = max(0, peak - program - (fixed - logits + tried)) * work.rows // trial.rows
        program += 0 if on_device else _EARLIER
    whole = 0
    if work.sharded:
        # a checkpoint is written when gradients, logits and activations are gone
        idle = state.gradients // parts + logits + activations
        whole = max(whole_in_update(config, work), 0 if work.on_cuda else state.weights + state.optimizer - idle)
    return Memory(
        work.stage,
        program,
        state.weights // parts,
        state.gradients // parts,
        state.optimizer // parts,
        logits,
        activations,
        trial is not None,
        whole,
    )


def whole_in_update(config: ModelConfig, work: TrainingWork) -> int:
    """Bytes that are whole on each of the ranks that share the state out: fp32 weights and gradients of embedding, head
    and one layer, as FSDP2 gathers them; and of the matrices that a rank orthogonalises, with what it sends and gets of
    them. A checkpoint is gathered, weights and moments, in the memory of the first rank's processor."""
    parts = parameters_by_part(config)
    layers = parts.total - parts.embedding - parts.head
    gathered = 2 * 4 * (parts.embedding + parts.head + layers // config.num_hidden_layers)
    return gathered + (3 * 4 * (parts.attention + parts.mlp) // work.ranks if work.optimizer == "muon" else 0)


def activation_bytes(config: ModelConfig, work: TrainingWork) -> float:
    """Estimated bytes that the backward pass needs of one token: of every layer, or with activation checkpointing of
    one layer and what each other keeps (selectively: as compiled; a tenth more where it is not).

    In a layer: the fp32 residual stream at both norms; what the norms, the projections (before and after rotation), the
    attention and the feed-forward give, in bf16 or fp32; and half a row of attention weights for each head, with its
    softmax in fp32, but on a CUDA device, whose attention keeps none.
    """
    number = work.number_bytes
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    stream = 2 * 4 * hidden
    given = number * (2 * hidden + (queries + 2 * keys) + (queries + keys) + queries + 4 * inner)
    scores = 0.0 if work.on_cuda else config.num_attention_heads * work.length / 2 * (4 + number)
    layer = stream + given + scores
    if work.wishes.activation_checkpointing == "none":
        return config.num_hidden_layers * layer
    kept = 4 * hidden
    if work.wishes.activation_checkpointing == "selective":
        kept += number * (queries + 2 * keys + hidden + 2 * inner)
    return layer + (config.num_hidden_layers - 1) * kept


def rows_to_try(config: ModelConfig, work: TrainingWork, free: int) -> int:
    """Rows of a trial: the stage's micro-batch, halved until it is expected to leave room for what else runs here.

    free: bytes, of the stage's device. 0 where ranks share out a state that leaves no such room when it is whole, as it
    is in a trial.
    """
    rows = work.rows
    fixed = expected_memory(config, replace(work, sharded=False), None)
    if work.sharded and fixed.total - fixed.activations > _TRY_SHARE * free:
        return 0
    while rows > 1 and fixed.total - fixed.activations * (1 - rows / work.rows) > _TRY_SHARE * free:
        rows //= 2
    return rows
