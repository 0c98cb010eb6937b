"""What rounding does to a model: its answers on held-out text beside full precision's, matrix by matrix and in all."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from modicum.evaluate.beside import Judged, judged
from modicum.evaluate.divergence import Quality, quality
from modicum.evaluate.texts import Texts
from modicum.model import Decoder, ModelConfig
from modicum.model.packing import RoundedMatrix
from modicum.model.quantized import install, matrix_names
from modicum.tokenizer import Tokenizer

Matrices = Mapping[str, RoundedMatrix]


class Judge:
    """Holds what the full model says of some texts, float32 (T, V) each: in a file of `folder` that has no name."""

    def __init__(self, full: Decoder, texts: Texts, folder: Path) -> None:
        self.texts = texts
        self._rows = [torch.from_numpy(row) for row in texts.rows]
        self._said = _mapped(_say(full, self._rows), folder)

    def beside(self, model: Decoder, tokenizer: Tokenizer) -> Judged:
        """All that is told of `model`, bits per byte too."""
        return judged(self.texts, tokenizer, self._said, _say(model, self._rows))

    def __call__(self, model: Decoder, *, rows: int | None = None) -> Quality:
        """How far `model` is from it, on the first `rows` of them, or all."""
        return quality(self._said[:rows], _say(model, self._rows[:rows]))

    def mean_kl(self, model: Decoder, matrices: Matrices, *, rows: int | None = None) -> float:
        """Of the model with these matrices in their places."""
        with rounded(model, matrices):
            return self(model, rows=rows).mean_kl


@contextmanager
def rounded(model: Decoder, matrices: Matrices) -> Iterator[Decoder]:
    """Inside, the model has these matrices; afterwards its own again."""
    before = {name: install(model, name, matrix) for name, matrix in matrices.items()}
    try:
        yield model
    finally:
        for name, module in before.items():
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module)


def sensitivities(judge: Judge, model: Decoder, matrices: Matrices, *, rows: int) -> dict[str, float]:
    """Mean KL divergence (nats) that each matrix alone costs when it is rounded, beside the model with none rounded."""
    ground = judge.mean_kl(model, {}, rows=rows)
    return {name: judge.mean_kl(model, {name: matrix}, rows=rows) - ground for name, matrix in matrices.items()}


def moment_bytes(config: ModelConfig) -> int:
    """Bytes that input_moments returns, and rounding by the largest of them takes besides: five times it in float64."""
    width, head = config.hidden_size, config.num_attention_heads * config.head_dim
    layer = 2 * width**2 + head**2 + config.intermediate_size**2
    largest = max(width, head, config.intermediate_size) ** 2
    return 4 * (config.num_hidden_layers * layer + width**2) + 5 * 8 * largest


@torch.no_grad()
def input_moments(model: Decoder, rows: Sequence[Tensor]) -> dict[str, Tensor]:
    """The mean of the products of any two inputs of each linear layer, (inputs, inputs), on these rows.

    Layers that are called one after the other with the same input have one tensor together.
    """
    sums: dict[str, Tensor] = {}
    first: dict[str, str] = {}  # of those that have one input
    given_last: tuple[str, Tensor | None] = "", None

    def note(name: str, x: Tensor) -> None:
        nonlocal given_last
        if x is given_last[1]:
            first[name] = given_last[0]
            return
        given_last = name, x
        flat = x.flatten(0, -2)
        sums[name] = sums.get(name, 0) + flat.T @ flat

    names = [name for name in matrix_names(model) if isinstance(model.get_submodule(name), nn.Linear)]
    handles = [
        model.get_submodule(name).register_forward_pre_hook(lambda _, given, name=name: note(name, given[0]))
        for name in names
    ]
    for row in rows:
        model(row[None])
    for handle in handles:
        handle.remove()
    tokens = sum(len(row) for row in rows)
    means = {name: total.div_(tokens) for name, total in sums.items()}
    return {name: means[first.get(name, name)] for name in names}


def _say(model: Decoder, rows: Iterable[Tensor]) -> Iterator[Tensor]:
    for row in rows:
        with torch.no_grad():
            logits: Tensor = model(row[None])[0]
        yield logits.float()


def _mapped(said: Iterable[Tensor], folder: Path) -> list[NDArray[np.float32]]:
    """The same (T, V) each, on the disk: those of a large vocabulary are gigabytes. Nothing of it stays after us."""
    lengths = []
    with TemporaryFile(dir=folder) as file:
        for logits in said:
            file.write(logits.cpu().numpy().tobytes())
            lengths.append(len(logits))
        file.flush()
        whole = np.memmap(file, np.float32, mode="c").reshape(sum(lengths), -1)
    return np.split(whole, np.cumsum(lengths)[:-1])
