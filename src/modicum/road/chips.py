"""What a run would take on accelerators that are not here: computed from published peaks, and said to be so.

Dense bf16 peaks and memory sizes are those of the makers' data sheets; rates with sparsity are twice as high and mean
nothing here.
"""

from dataclasses import dataclass

from modicum.road.memory import Memory
from modicum.store import UserError

# Of the peak, what training reaches: PaLM 46 %, Llama 3 38 to 43 % (Chowdhery et al. 2022; Dubey et al. 2024). Models
# below 1 B parameters on one chip often reach less.
ASSUMED_SHARE = 0.4


@dataclass(frozen=True)
class Chip:
    """flops: dense bf16 operations a second. memory_bytes: of one chip."""

    name: str
    flops: float
    memory_bytes: int


CHIPS = {
    "a100": Chip("A100 80 GB", 312e12, 80 * 10**9),
    "h100": Chip("H100 SXM", 989e12, 80 * 10**9),
    "h200": Chip("H200 SXM", 989e12, 141 * 10**9),
    "b200": Chip("B200", 2250e12, 180 * 10**9),
    "l4": Chip("L4", 121e12, 24 * 10**9),
    "l40s": Chip("L40S", 362e12, 48 * 10**9),
    "rtx4090": Chip("RTX 4090", 165e12, 24 * 10**9),
    "mi300x": Chip("MI300X", 1307e12, 192 * 10**9),
}


@dataclass(frozen=True)
class Elsewhere:
    """Training on `gpus` of a chip. seconds: of all training stages, at ASSUMED_SHARE of the peak.

    replicated_bytes and sharded_bytes: a chip's memory when each holds all weights, gradients and moments (DDP), and
    when they are shared out but for what is gathered for use (FSDP2); activations of its share of the micro-batch
    included.
    """

    chip: Chip
    gpus: int
    seconds: float
    replicated_bytes: int
    sharded_bytes: int

    @property
    def fits(self) -> str:
        """How it fits, in words."""
        if self.replicated_bytes <= self.chip.memory_bytes:
            return "fits with a whole copy on each chip (DDP)"
        if self.sharded_bytes <= self.chip.memory_bytes:
            return "fits when the state is shared out (FSDP2)"
        return "does not fit: smaller micro-batches, activation checkpointing, or more chips"


def elsewhere(
    chip_name: str, gpus: int, *, flops: float, memory: Memory, whole: int, rows: int, batch_size: int
) -> Elsewhere:
    """flops: of all training. memory: here, of the stage that needs most, with micro-batches of `rows` rows; a chip's
    have as many, but no more than its share of the batch. whole: bytes that each of the chips gathers for use where
    they share the state out. Raises UserError for an unknown chip."""
    chip = CHIPS.get(chip_name.lower())
    if chip is None:
        raise UserError(f"--chip {chip_name}: not known; known are {', '.join(CHIPS)}")
    state, working = memory.weights + memory.gradients + memory.optimizer, memory.activations + memory.logits
    here = working * min(rows, -(-batch_size // gpus)) // rows
    return Elsewhere(
        chip,
        gpus,
        flops / (gpus * chip.flops * ASSUMED_SHARE),
        state + here,
        state // gpus + (whole if gpus > 1 else 0) + here,
    )
