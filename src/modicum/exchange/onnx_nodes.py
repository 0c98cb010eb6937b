"""Nodes, constants and weights of an ONNX graph as they are added, each with a name of its own."""

from importlib import import_module
from typing import Any

import numpy as np

from modicum.exchange.onnx_weights import Numbers
from modicum.store import UserError

INSTALL = "pip install 'modicum[onnx]'"


def onnx_library() -> Any:
    """The onnx package. Raises UserError with the pip line where it is not installed."""
    try:
        library = import_module("onnx")
        import_module("onnx.helper"), import_module("onnx.numpy_helper"), import_module("onnx.external_data_helper")
    except ImportError as error:
        raise UserError(
            f"an ONNX file is written by the onnx package, and {error.name} is missing: {INSTALL}"
        ) from None
    return library


class Nodes:
    """Puts nodes into `graph`, a GraphProto, in their order, and weights: under the names given, constants shared by
    value. Straight into it, for the library copies all that it joins into a graph, and again into a model."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    def add(self, kind: str, *inputs: str, out: str | None = None, domain: str = "", **attributes: Any) -> str:
        """One node with one output, whose name is returned."""
        out = out or f"{kind}.{len(self.graph.node)}"
        made = onnx_library().helper.make_node(
            kind, list(inputs), [out], domain=domain, name=f"node.{out}", **attributes
        )
        self.graph.node.append(made)
        return out

    def split(self, x: str, *sizes: int) -> tuple[str, ...]:
        """The parts of the last axis."""
        outs = [f"Split.{len(self.graph.node)}.{part}" for part in range(len(sizes))]
        made = onnx_library().helper.make_node("Split", [x, self.ints(*sizes)], outs, axis=-1, name=f"node.{outs[0]}")
        self.graph.node.append(made)
        return tuple(outs)

    def cast(self, x: str, kind: str) -> str:
        return self.add("Cast", x, to=getattr(onnx_library().TensorProto, kind))

    def weight(self, name: str, numbers: Numbers) -> None:
        """An initializer of that name."""
        kind = onnx_library().helper.np_dtype_to_tensor_dtype(numbers.dtype)
        made = self.graph.initializer.add(name=name, data_type=kind, dims=numbers.shape)
        made.raw_data = numbers.astype(numbers.dtype.newbyteorder("<"), copy=False).tobytes()

    def constant(self, numbers: Numbers) -> str:
        key = (str(numbers.dtype), numbers.shape, numbers.tobytes())
        if key not in self._constants:
            self._constants[key] = f"constant.{len(self._constants)}"
            self.weight(self._constants[key], numbers)
        return self._constants[key]

    def ints(self, *values: int) -> str:
        return self.constant(np.array(values, dtype=np.int64))

    def scalar(self, value: int) -> str:
        return self.constant(np.array(value, dtype=np.int64))

    def float(self, value: float) -> str:
        return self.constant(np.array(value, dtype=np.float32))
