"""Linear layers and embeddings whose weights are whole numbers of 8 or 4 bits times scales.

On a CPU the product is one operation, `modicum::quantized_linear`, which torch.compile takes as it is: in the kernel of
native.py activations are rounded too, to 8 bits by blocks of 32, which is what makes it fast. Elsewhere, and without a
compiler, weights are widened and multiplied as usual. Such a model is asked, never trained.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from modicum.model.native import kernel_fault
from modicum.model.packing import LANES, RoundedMatrix, pack_scale, pack_values, unpack_scale, unpack_values

_SCHEMA = "quantized_linear(Tensor x, Tensor packed, Tensor scale, int bits, int outputs) -> Tensor"


def _plain(x: Tensor, packed: Tensor, scale: Tensor, bits: int, outputs: int) -> Tensor:
    """(..., inputs) -> (..., outputs) in x's dtype, with exact activations."""
    values = unpack_values(packed, bits, outputs, x.shape[-1])
    return linear(x, RoundedMatrix(values, unpack_scale(scale, outputs), bits).wide().to(x.dtype))


def _fake(x: Tensor, packed: Tensor, scale: Tensor, bits: int, outputs: int) -> Tensor:  # noqa: ARG001
    return x.new_empty((*x.shape[:-1], outputs))


_LIBRARY = torch.library.Library("modicum", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(_SCHEMA)  # type: ignore[no-untyped-call]
_LIBRARY.impl("quantized_linear", _plain, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("modicum::quantized_linear", _fake, lib=_LIBRARY)


class _Rounded(nn.Module):
    """A matrix (outputs, inputs) in the kernel's layout. Its buffers are not of the state dict: files hold others."""

    packed: Tensor
    scale: Tensor

    def __init__(self, matrix: RoundedMatrix) -> None:
        super().__init__()
        self.outputs, self.inputs = matrix.values.shape
        self.bits = matrix.bits
        self.register_buffer("packed", pack_values(matrix.values, matrix.bits), persistent=False)
        self.register_buffer("scale", pack_scale(matrix.scale), persistent=False)
        if matrix.values.device.type == "cpu":
            kernel_fault()  # loads it, where there is one

    def matrix(self) -> RoundedMatrix:
        """What it was made of."""
        values = unpack_values(self.packed, self.bits, self.outputs, self.inputs)
        return RoundedMatrix(values, unpack_scale(self.scale, self.outputs), self.bits)

    def multiply(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs), in x's dtype."""
        if x.device.type != "cpu":
            return _plain(x, self.packed, self.scale, self.bits, self.outputs)
        out: Tensor = torch.ops.modicum.quantized_linear(x.float(), self.packed, self.scale, self.bits, self.outputs)
        return out.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.inputs} to {self.outputs}, {self.bits} bits, {self.scale.shape[1]} scales an output"


class QuantizedLinear(_Rounded):
    """Called as nn.Linear is. bias: (outputs,) or None."""

    bias: Tensor | None

    def __init__(self, matrix: RoundedMatrix, bias: Tensor | None = None) -> None:
        super().__init__(matrix)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        out = self.multiply(x)
        return out if self.bias is None else out + self.bias.to(out.dtype)


class QuantizedEmbedding(_Rounded):
    """Called as nn.Embedding is; `project` multiplies by the same rows, where head and embedding are tied."""

    def __init__(self, matrix: RoundedMatrix, dtype: torch.dtype = torch.float32) -> None:
        if matrix.bits != 8 or matrix.scale.shape[1] != 1:
            raise ValueError("rows of an embedding have 8 bits and one scale each")
        super().__init__(matrix)
        self.dtype = dtype  # of what comes out

    def forward(self, ids: Tensor) -> Tensor:
        """(..., inputs) of ids (...)."""
        panel, lane = ids // LANES, ids % LANES
        rows = self.packed[panel, :, lane].flatten(-2)[..., : self.inputs]
        return ((rows.float() - 128) * self.scale[panel, 0, lane][..., None]).to(self.dtype)

    def project(self, x: Tensor) -> Tensor:
        """Logits (..., V) of (..., hidden)."""
        return self.multiply(x)


def matrix_names(model: nn.Module) -> list[str]:
    """The modules that can be rounded, by name: every linear layer, and the embedding."""
    return [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Embedding))]


def install(model: nn.Module, name: str, matrix: RoundedMatrix, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Put a rounded module in the place of the full one called `name`, which is returned. A bias stays as it is.

    dtype: what an embedding gives.
    """
    parent, _, child = name.rpartition(".")
    before = model.get_submodule(name)
    bias = getattr(before, "bias", None)
    embeds = isinstance(before, (nn.Embedding, QuantizedEmbedding))
    after = QuantizedEmbedding(matrix, dtype) if embeds else QuantizedLinear(matrix, bias)
    setattr(model.get_submodule(parent), child, after)
    return before
