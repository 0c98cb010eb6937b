"""The numbers of an ONNX file: weights by the names of their nodes, as float32, float16, or 8 bits in blocks of 32.

8 bits are those of onnxruntime's MatMulNBits without zero points: BLOCK inputs of an output share a scale, a number is
(byte - 128) * scale. A tied head and the embedding are one table in every type.
"""

from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from modicum.exchange.names import EMBEDDING, HEAD
from modicum.store import UserError

OnnxQuant = Literal["fp32", "fp16", "int8"]
BLOCK, MIDDLE = 32, 128
ROUNDED, SCALES = ".rounded", ".scales"
Numbers = NDArray[np.generic]


def onnx_tensors(weights: Mapping[str, Tensor], quant: OnnxQuant) -> Iterator[tuple[str, Numbers]]:
    """Name and numbers of every weight in the file, one at a time.

    Matrices are (inputs, outputs), but for the embedding and the head, (vocabulary, hidden). Raises UserError for a
    number beyond half precision.
    """
    for name, tensor in weights.items():
        weight = tensor.float().numpy()
        if weight.ndim == 1:
            yield name, weight
        elif quant == "int8":
            values, scales = rounded(weight)
            yield name + ROUNDED, values
            yield name + SCALES, scales
        else:
            plain = weight if name in (EMBEDDING, HEAD) else np.ascontiguousarray(weight.T)
            yield name, plain if quant == "fp32" else _half(name, plain)


def rounded(weight: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Of a matrix (outputs, inputs) the bytes (outputs, blocks, BLOCK) and the scales (outputs, blocks)."""
    outputs, inputs = weight.shape
    blocks = -(-inputs // BLOCK)
    filled = np.zeros((outputs, blocks * BLOCK), dtype=np.float32)
    filled[:, :inputs] = weight
    in_blocks = filled.reshape(outputs, blocks, BLOCK)
    scales = (np.abs(in_blocks).max(-1) / 127).astype(np.float32)
    whole = np.rint(in_blocks / np.where(scales == 0, 1, scales)[..., None])
    return (np.clip(whole, -127, 127) + MIDDLE).astype(np.uint8), scales


def _half(name: str, weight: NDArray[np.float32]) -> NDArray[np.float16]:
    largest = float(np.abs(weight).max(initial=0))
    if largest > float(np.finfo(np.float16).max):
        raise UserError(f"{name}: holds {largest:.3g}, more than half precision reaches; take --quant fp32 or int8")
    return weight.astype(np.float16)
