"""Blocks and models of every dialect as exported graphs: caches are flat inputs and outputs, all sizes are open."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnxruntime
import torch
from dialect_models import Called, block, config, lively, some_hidden, some_ids, whole
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from modicum.dialects import core, slm
from modicum.dialects.cache import KVCache

BATCH, SEQ, PAST, TOTAL = Dim("batch"), Dim("seq"), Dim("past"), Dim("total")
# (batch, seq, past), the last of each kind a first pass and a single step
SHAPES = [(3, 6, 4), (1, 1, 9), (2, 7, 1), (1, 5, 0)]


def flat(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
    return tuple(part for pair in pairs for part in pair)


def pairs(parts: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(parts[::2], parts[1::2], strict=True))


class CyberSLM(nn.Module):
    """x or ids, a mask over past and new tokens, then keys and values."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.is_block = not hasattr(inner, "layers")

    def forward(self, x: Tensor, mask: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        if self.is_block:
            out, _, present = self.inner(x, mask, False, (past[0], past[1]), True)
            return out, *present
        logits, presents = self.inner(x, mask, pairs(past), True)
        return logits, *flat(presents)


class SLM(nn.Module):
    """x or ids, position ids, a mask (B, 1, T, past+T), then keys and values."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, position_ids: Tensor, mask: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        out, cache = self.inner(x, position_ids, mask, KVCache.from_tensors(pairs(past)), True)
        return out, *flat(cache.tensors())


class Core(nn.Module):
    """x or ids, then keys and values."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        cache = KVCache.from_tensors(pairs(past))
        out = self.inner(x, cache)
        return out, *flat(cache.tensors())


class Plain(nn.Module):
    """A block of any dialect from hidden states to hidden states, with neither cache nor mask."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return Called(self.inner)(x)


@dataclass
class Exportable:
    """A module with flat inputs, what to call it with at any size, and which of its sizes are open."""

    module: nn.Module
    inputs: Callable[[int, int, int], tuple[Tensor, ...]]
    dynamic: tuple[object, ...]

    def export(self) -> ExportedProgram:
        return torch.export.export(self.module, self.inputs(2, 5, 3), dynamic_shapes=self.dynamic)


def exportable(dialect: str, part: str) -> Exportable:
    made = lively(numbered(dialect) if part == "block" else whole(dialect))
    layers, heads, width = (1 if part == "block" else 2), (2 if dialect == "slm" else 3), (4 if dialect == "slm" else 8)

    def tokens(batch: int, seq: int) -> Tensor:
        return some_hidden(batch, seq) if part == "block" else some_ids(batch, seq)

    def inputs(batch: int, seq: int, past: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(batch + seq + past)
        held = [torch.randn(batch, heads, past, width, generator=generator) for _ in range(2 * layers)]
        keep = torch.rand(batch, past + seq, generator=generator) > 0.3
        if dialect == "cyberslm":
            return tokens(batch, seq), keep, *held
        if dialect == "slm":
            places = torch.randint(0, 90, (batch, seq), generator=generator)
            seen = torch.rand(batch, 1, seq, past + seq, generator=generator) > 0.3
            return tokens(batch, seq), places, seen, *held
        return tokens(batch, seq), *held

    caches = ({0: BATCH, 2: PAST},) * (2 * layers)
    x = {0: BATCH, 1: SEQ}
    if dialect == "cyberslm":
        return Exportable(CyberSLM(made).eval(), inputs, (x, {0: BATCH, 1: TOTAL}, caches))
    if dialect == "slm":
        return Exportable(SLM(made).eval(), inputs, (x, x, {0: BATCH, 2: SEQ, 3: TOTAL}, caches))
    return Exportable(Core(made).eval(), inputs, (x, caches))


def numbered(dialect: str) -> nn.Module:
    """A block whose part of the cache is the first."""
    if dialect == "cyberslm":
        return block(dialect)
    return core.TransformerBlock(config(dialect), 0) if dialect == "core" else slm.DecoderBlock(config(dialect), 0)


def onnx_run(program: ExportedProgram, path: Path) -> Callable[[tuple[Tensor, ...]], list[Tensor]]:
    """The program as ONNX in onnxruntime."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter tells its own deprecations and which axis names it merged
        torch.onnx.export(program, dynamo=True, opset_version=23, verbose=False).save(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]

    def run(inputs: tuple[Tensor, ...]) -> list[Tensor]:
        feed = {name: given.numpy() for name, given in zip(names, inputs, strict=True)}
        return [torch.from_numpy(out) for out in session.run(None, feed)]

    return run
