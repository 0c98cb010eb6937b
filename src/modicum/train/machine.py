"""How a run is carried out on this machine: device, dtype, compiled or not, threads. Chosen once, then kept.

What was chosen stands in the run's checkpoints, because another kernel gives other last bits.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from modicum.model import ActivationCheckpointing
from modicum.store import UserError, processor_flags, processor_name
from modicum.train.attention import USUAL_BLOCK, AttentionShape, fastest_block
from modicum.train.compiler import compiler_fault
from modicum.train.parallel import Parallel
from modicum.train.ranks import ALONE, Ranks

# A compiled step takes a third less time than an eager one (micro, bf16: 4,100 against 2,800 tokens/s on two cores,
# which is 140 GFLOP/s eager), and making it takes half a minute. Below this much arithmetic that does not come back.
COMPILE_PAYS_FLOPS = 2e13


@dataclass(frozen=True)
class Wishes:
    """What the user asks for; "auto" and None leave it to the machine."""

    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    compile: Literal["auto", "on", "off"] = "auto"
    threads: int | None = None
    activation_checkpointing: ActivationCheckpointing = "none"
    parallel: Parallel = "ddp"


@dataclass(frozen=True)
class Choices:
    """What the run does. `machine` and `torch_version` only say where that was; parallel is None for one process.

    attention_block: queries a block in compiled training on a CPU, 0 for PyTorch's kernel. micro_batch_size: rows that
    a rank learns from at once; None where nothing was said of them.
    """

    device: str
    dtype: str
    compile: bool
    threads: int
    activation_checkpointing: ActivationCheckpointing
    machine: str
    torch_version: str
    ranks: int = 1
    parallel: Parallel | None = None
    attention_block: int = USUAL_BLOCK
    micro_batch_size: int | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of matrix products; weights are fp32 in any case."""
        return torch.bfloat16 if self.dtype == "bfloat16" else torch.float32

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        return asdict(self)


def choose(
    wishes: Wishes,
    *,
    flops: float,
    earlier: Mapping[str, Any] | None,
    say: Callable[[str], None],
    ranks: Ranks = ALONE,
    shape: AttentionShape | None = None,
    micro_batch_size: int | None = None,
) -> Choices:
    """Decide what the user left open. flops: arithmetic of the whole run, which decides whether compiling pays.
    shape: of one rank's attention, to take the fastest one for it where the run is compiled; None takes the usual one.
    micro_batch_size: rows that a rank learns from at once, which is not decided here but kept beside the rest.

    earlier: `Choices.plain()` of the run that goes on; those stand where nothing else is asked for, except for threads,
    which follow the machine, and the dtype, which follows another kind of device. When the machine or a wish forces
    another choice, `say` is told that the run is no longer the same bit for bit. Raises UserError for a device that is
    not there.
    """
    before = dict(earlier or {})
    device = _device(wishes.device, before.get("device"))
    moved = before.get("device", device) != device  # to where bfloat16 may have no hardware
    dtype = wishes.dtype if wishes.dtype != "auto" else None if moved else before.get("dtype")
    if dtype is None:
        dtype = "bfloat16" if has_fast_bfloat16(device) else "float32"
    compiled = bool(before.get("compile", device != "mps" and flops >= COMPILE_PAYS_FLOPS))
    if wishes.compile != "auto":
        compiled = wishes.compile == "on"
    fault = compiler_fault(device) if compiled else None
    if fault is not None:
        say(f"torch.compile is off, so training takes about half as long again: {fault}")
        compiled = False
    threads = wishes.threads or torch.get_num_threads()
    block = before.get("attention_block", USUAL_BLOCK)
    if shape is not None and compiled and device == "cpu" and not before:
        block = fastest_block(shape, torch.bfloat16 if dtype == "bfloat16" else torch.float32, threads, say)
    chosen = Choices(
        device=device,
        dtype=dtype,
        compile=compiled,
        threads=threads,
        activation_checkpointing=wishes.activation_checkpointing,
        machine=torch.cuda.get_device_name() if device == "cuda" else processor_name(),
        torch_version=torch.__version__,
        ranks=ranks.world_size,
        parallel=None if ranks.group is None else wishes.parallel,
        attention_block=int(block),
        micro_batch_size=micro_batch_size,
    )
    now = chosen.plain()
    changed = [f"{name} {before[name]} -> {now[name]}" for name in now if before.get(name, now[name]) != now[name]]
    if changed:
        say(f"warning: the run goes on, but not bit for bit as it would have without the stop ({', '.join(changed)})")
    return chosen


def has_fast_bfloat16(device: str) -> bool:
    """Whether bf16 products run in hardware: CUDA from Ampere on, x86 with AVX512-BF16 or AMX, Arm with BF16."""
    if device == "cuda":
        return torch.cuda.get_device_capability()[0] >= 8
    onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return device == "cpu" and onednn and bool(processor_flags() & {"avx512_bf16", "amx_bf16", "bf16"})


@contextmanager
def prepared(choices: Choices) -> Iterator[None]:
    """Inside, PyTorch has the chosen threads and takes the algorithms that give the same bits each time."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    if choices.device == "cuda":
        # cuBLAS reads this when it starts; without it two equal products may take different paths
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        torch.set_num_threads(choices.threads)
        # On CUDA a warning would leave attention with the algorithms that add in another order each time.
        torch.use_deterministic_algorithms(True, warn_only=choices.device != "cuda")
        memory.fill_uninitialized_memory = False  # costs a pass over each block and hides no fault of ours
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        memory.fill_uninitialized_memory = fill


def _device(wish: str, before: str | None) -> str:
    present = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if wish != "auto":
        if not present[wish]:
            raise UserError(f"device {wish}: PyTorch {torch.__version__} finds none here; take cpu or auto")
        return wish
    if before is not None and present.get(before, False):
        return before
    return next(name for name in ("cuda", "mps", "cpu") if present[name])
