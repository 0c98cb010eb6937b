"""A model's weights as a GGUF file has them: its names, its rotary layout, and the number type of each tensor.

Matrices take the type that was asked for; norms and biases stay float32, as llama.cpp has them. A matrix that cannot
have the type takes another, and is named.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from modicum.exchange.gguf_metadata import LAYOUTS, architecture_of, frequency_factors
from modicum.exchange.gguf_runtime import INSTALL, quantized
from modicum.exchange.layouts import relaid
from modicum.exchange.names import EMBEDDING, HEAD, foreign_names
from modicum.model import ModelConfig
from modicum.store import UserError

Quant = Literal["f32", "f16", "bf16", "q8_0", "q6_k", "q5_k", "q4_k", "q4_0"]

# ggml's number of each type, the numbers in a block, and the bytes of one.
TYPES: dict[Quant, tuple[int, int, int]] = {
    "f32": (0, 1, 4),
    "f16": (1, 1, 2),
    "bf16": (30, 1, 2),
    "q8_0": (8, 32, 34),
    "q6_k": (14, 256, 210),
    "q5_k": (13, 256, 176),
    "q4_k": (12, 256, 144),
    "q4_0": (2, 32, 18),
}
K_QUANTS: tuple[Quant, ...] = ("q6_k", "q5_k", "q4_k")  # written by ggml's own kernels, and not read here
FILE_TYPES: dict[Quant, int] = {
    "f32": 0, "f16": 1, "q4_0": 2, "q8_0": 7, "q4_k": 14, "q5_k": 16, "q6_k": 18, "bf16": 32,
}  # fmt: skip
# What an embedding and a head of its own take instead: they suffer more than they save.
_APART: dict[Quant, tuple[Quant, str]] = {"q4_0": ("q8_0", "eight"), "q4_k": ("q6_k", "six"), "q5_k": ("q6_k", "six")}
FREQUENCIES = "rope_freqs.weight"
_LARGEST_HALF = 65504.0


@dataclass(frozen=True)
class FileTensor:
    """data: uint8, (rows, bytes of a row) or (bytes,). shape: of its numbers, rows first. fallback: why the type is not
    the one that was asked for, or None."""

    name: str
    shape: tuple[int, ...]
    kind: Quant
    data: NDArray[np.uint8]
    fallback: str | None = None


def gguf_library() -> Any:
    """The gguf package. Raises UserError with the pip line where it is not installed."""
    try:
        return import_module("gguf")
    except ImportError:
        raise UserError(f"writing GGUF needs the gguf package: {INSTALL}") from None


def file_tensors(
    weights: Mapping[str, Tensor], config: ModelConfig, quant: Quant, work: Path | None = None
) -> Iterator[FileTensor]:
    """Every tensor of the file, in its order. weights: under our names, in the half layout. work: as in `quantized`."""
    if (factors := frequency_factors(config)) is not None:
        yield FileTensor(FREQUENCIES, factors.shape, "f32", factors.view(np.uint8))
    layout = LAYOUTS[architecture_of(config)]
    moved = relaid(weights, head_dim=config.head_dim, source="half", target=layout)
    plan = []
    for theirs, ours in foreign_names("gguf", config).items():
        numbers = np.ascontiguousarray(moved[ours].detach().float().numpy())
        plan.append((theirs, numbers, *_kind(ours, numbers, quant)))
    # all at once, since each time is a process
    by_ggml = [(theirs, (numbers, *TYPES[kind])) for theirs, numbers, kind, _ in plan if kind in K_QUANTS]
    results = quantized([rows for _, rows in by_ggml], work) if by_ggml else []
    done = {theirs: data for (theirs, _), data in zip(by_ggml, results, strict=True)}
    for theirs, numbers, kind, fallback in plan:
        data = done[theirs] if theirs in done else packed(numbers, kind)
        yield FileTensor(theirs, numbers.shape, kind, data, fallback)


def packed(numbers: NDArray[np.float32], kind: Quant) -> NDArray[np.uint8]:
    """float32 numbers as the bytes of a type that is no k-quant; rows stay rows."""
    library = gguf_library()
    data = library.quants.quantize(numbers, library.GGMLQuantizationType(TYPES[kind][0]))
    found: NDArray[np.uint8] = np.ascontiguousarray(data).view(np.uint8)
    return found


def unpacked(data: NDArray[np.uint8], kind: Quant) -> NDArray[np.float32]:
    """The numbers that the bytes of a type, no k-quant, stand for."""
    if kind == "q8_0":
        blocks = data.reshape(-1, 34)
        scales = blocks[:, :2].copy().view("<f2").astype(np.float32)
        return (scales * blocks[:, 2:].view(np.int8)).reshape(*data.shape[:-1], -1)
    if kind == "q4_0":
        blocks = data.reshape(-1, 18)
        scales = blocks[:, :2].copy().view("<f2").astype(np.float32)
        halves = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1).astype(np.float32) - 8
        return (scales * halves).reshape(*data.shape[:-1], -1)
    if kind == "bf16":
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return data.view("<f4" if kind == "f32" else "<f2").astype(np.float32)


def _kind(ours: str, numbers: NDArray[np.float32], quant: Quant) -> tuple[Quant, str | None]:
    """The type of a tensor, and why it is not the one that was asked for."""
    if numbers.ndim == 1:
        return "f32", None
    wanted, reason = quant, None
    if quant in _APART and ours in (EMBEDDING, HEAD):
        wanted, bits = _APART[quant]
        reason = f"the embedding and the head stay at {bits} bits"
    _, block, _ = TYPES[wanted]
    width = numbers.shape[-1]
    if width % block:
        reason = f"rows of {width} numbers, not a multiple of {block}"
        wanted = "q8_0" if block > 32 and width % 32 == 0 else "f16"
    scales = {"f16": 1, "q8_0": 127, "q4_0": 8, "q4_k": 1, "q5_k": 1, "q6_k": 1}
    largest = float(np.abs(numbers).max())
    if wanted in scales and largest / scales[wanted] > _LARGEST_HALF:
        return "f32", f"holds {largest:.3g}, more than half precision reaches"
    return wanted, reason
