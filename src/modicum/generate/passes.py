"""What a Decoding asks of a model: forward passes over slots of its own, in PyTorch or in another runtime."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from modicum.model import Decoder
from modicum.model.slots import SlotCache
from modicum.model.stepper import cache_dtype, make_reader, make_step
from modicum.store import UserError, free_memory


class ModelFault(UserError):  # noqa: N818  named for its owner, like UserError
    """The model is at fault, whatever was asked of it."""


class Passes(Protocol):
    """A model over `slots` sequences of at most `capacity` tokens. device: where its logits are."""

    slots: int
    capacity: int
    device: torch.device

    def read(self, ids: Sequence[int], slot: int, start: int, *, last: bool) -> Tensor | None:
        """Take ids that come after the first `start` of a slot, whatever stood there. The logits after the last of
        them, (1, V) float32, where `last` asks for them."""
        ...

    def step(self, ids: Sequence[int], slots: Sequence[int], places: Sequence[int]) -> Tensor:
        """Take one token more for each of R slots, at `places`, the first being 0; logits (R, V) float32."""
        ...

    def copy(self, source: int, target: int, length: int) -> None:
        """Give slot `target` the first `length` tokens of slot `source`."""
        ...

    def clear(self, slot: int) -> None:
        """Forget a slot, with what is not finite in it."""
        ...

    def warm(self) -> None:
        """Have everything made that the first request would wait for."""
        ...


class Sizes(Protocol):
    """vocab_size: the width of the logits. max_position_embeddings: the context in tokens."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int: ...


class Runtime(Protocol):
    """A model that another runtime runs."""

    @property
    def config(self) -> Sizes: ...

    def slot_bytes(self, slots: int, capacity: int) -> int:
        """The memory that so many slots take."""
        ...

    def passes(self, *, slots: int, capacity: int, longest: int) -> Passes:
        """Its passes, over at most `longest` tokens at once."""
        ...


def make_passes(model: Decoder | Runtime, *, slots: int, capacity: int, longest: int, compiled: bool) -> Passes:
    """The passes of a model. compiled: as make_step has it; a runtime of its own knows no other way."""
    if isinstance(model, Decoder):
        return DecoderPasses(model, slots=slots, capacity=capacity, compiled=compiled)
    return model.passes(slots=slots, capacity=capacity, longest=longest)


def slot_bytes(model: Decoder | Runtime, slots: int, capacity: int, *, compiled: bool) -> int:
    """The memory that so many slots of so many tokens take beside the model."""
    if not isinstance(model, Decoder):
        return model.slot_bytes(slots, capacity)
    return SlotCache.bytes(model.config, slots, capacity, cache_dtype(model, compiled=compiled))


def check_memory(model: Decoder | Runtime, slots: int, capacity: int, *, compiled: bool) -> None:
    """UserError when the slots do not fit beside the model."""
    needed = slot_bytes(model, slots, capacity, compiled=compiled)
    device = model.model.norm.weight.device if isinstance(model, Decoder) else torch.device("cpu")
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
    if needed > free:
        raise UserError(
            f"{slots} slots of {capacity} tokens take {needed / 1e9:.2f} GB of memory, and {free / 1e9:.2f} GB are "
            "free; take fewer slots or a smaller context"
        )


class DecoderPasses:
    """Those of our own decoder."""

    def __init__(self, model: Decoder, *, slots: int, capacity: int, compiled: bool) -> None:
        self.slots, self.capacity, self.device = slots, capacity, model.device
        self._model = model
        dtype = cache_dtype(model, compiled=compiled)
        self.cache = SlotCache(model.config, slots, capacity, dtype=dtype, device=model.device)
        with torch.inference_mode():
            self._step = make_step(model, self.cache, compiled=compiled)
            self._read = make_reader(model, self.cache, compiled=compiled)

    def read(self, ids: Sequence[int], slot: int, start: int, *, last: bool) -> Tensor | None:
        hidden_1D = self._read(torch.tensor([ids], device=self.device), slot, start)
        return self._model.head(hidden_1D).float() if last else None

    def step(self, ids: Sequence[int], slots: Sequence[int], places: Sequence[int]) -> Tensor:
        ids_R, slots_R, places_R = (torch.tensor(column, device=self.device) for column in (ids, slots, places))
        return self._step(ids_R, slots_R, places_R, max(places) + 1)

    def copy(self, source: int, target: int, length: int) -> None:
        self.cache.copy(source, target, length)

    def clear(self, slot: int) -> None:
        self.cache.clear(slot)

    def warm(self) -> None:
        nothing_11 = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        self._model.head(self._read(nothing_11, 0, 0))
        for rows in (1, 2):
            nothing_R = torch.zeros(rows, dtype=torch.int64, device=self.device)
            self._step(nothing_R, nothing_R, nothing_R + self.capacity, 2)
