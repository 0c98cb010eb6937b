"""The key-value cache of the dialects: one object for all layers, each of which appends to its own part."""

from collections.abc import Hashable, Iterable

import torch
from torch import Tensor

from modicum.model.cache import check_rows
from modicum.store import UserError

Pair = tuple[Tensor, Tensor]


class KVCache:
    """Keys and values of the tokens already seen, addressed by layer.

    Made without a capacity it starts empty and grows, and reset gives its memory back. With one, each layer's memory is
    reserved at its first token and kept by reset; a pass that does not fit raises UserError and leaves the cache as it
    was (that is for inference: it writes in place). Used on without reset, it goes on: new tokens see the old ones.
    """

    def __init__(self, *, capacity: int | None = None) -> None:
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity must be at least 1 token, not {capacity}")
        self.capacity = capacity
        self._held: dict[Hashable, Pair] = {}
        self._reserved: dict[Hashable, Pair] = {}

    @classmethod
    def from_tensors(cls, pairs: Iterable[Pair]) -> "KVCache":
        """A growing cache of layers 0, 1, ... with these keys and values, each (B, heads, tokens, head_dim)."""
        cache = cls()
        cache._held = dict(enumerate(pairs))
        return cache

    def fork(self) -> "KVCache":
        """A growing cache that begins with what this one holds, for use before this one goes on; this one stays."""
        cache = KVCache()
        cache._held = dict(self._held)
        return cache

    def tensors(self) -> list[Pair]:
        """Keys and values of every layer that holds any: numbered layers in order, then others as first used."""
        return [self._held[layer] for layer in sorted(self._held, key=_place)]

    @property
    def length(self) -> int:
        """The tokens held; within a pass, those of the layer that is furthest."""
        return max((keys.shape[2] for keys, _ in self._held.values()), default=0)

    def length_of(self, layer: Hashable) -> int:
        """The tokens that one layer holds."""
        return self._held[layer][0].shape[2] if layer in self._held else 0

    def reset(self) -> None:
        """Forget every token."""
        self._held = {}

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens. ValueError when there are fewer."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot keep {length} tokens of {self.length}")
        self._held = {layer: (k[:, :, :length], v[:, :, :length]) for layer, (k, v) in self._held.items()}

    def reorder(self, index: Tensor) -> None:
        """Row i becomes what row index[i] was, (rows,) int32 or int64. Rows may repeat, as in beam search.

        A growing cache takes more or fewer rows than it has; ValueError where the memory is reserved.
        """
        check_rows(index)
        for layer, pair in self._held.items():
            if layer in self._reserved and len(index) != len(pair[0]):
                raise ValueError(f"expected {len(pair[0])} row numbers, as memory is reserved, not {len(index)}")
            rows = pair[0][index], pair[1][index]
            self._held[layer] = self._write(layer, rows, 0) if layer in self._reserved else rows

    def append(self, layer: Hashable, k_BHTK: Tensor, v_BHTK: Tensor) -> Pair:
        """Take in one layer's new keys and values; returns all of that layer's."""
        held = self._held.get(layer)
        if held is not None and (held[0].shape[:2], held[0].shape[3]) != (k_BHTK.shape[:2], k_BHTK.shape[3]):
            raise ValueError(
                f"the cache holds keys of shape {tuple(held[0].shape)} (rows, heads, tokens, head_dim), which "
                f"{tuple(k_BHTK.shape)} do not continue; reset it before other rows"
            )
        if self.capacity is not None:
            self._held[layer] = self._reserve_and_write(layer, (k_BHTK, v_BHTK))
        elif held is None:
            self._held[layer] = k_BHTK, v_BHTK
        else:
            self._held[layer] = torch.cat((held[0], k_BHTK), dim=2), torch.cat((held[1], v_BHTK), dim=2)
        return self._held[layer]

    def _reserve_and_write(self, layer: Hashable, pair: Pair) -> Pair:
        assert self.capacity is not None
        batch, heads, tokens, width = pair[0].shape
        past = self.length_of(layer)
        if past + tokens > self.capacity:
            raise UserError(
                f"the key-value cache is full: it has room for {self.capacity} tokens, and {past} + {tokens} are asked "
                "for; shorten the prompt, ask for fewer new tokens, or give it more capacity"
            )
        kind = ((batch, heads, self.capacity, width), pair[0].dtype, pair[0].device)
        memory = self._reserved[layer][0] if layer in self._reserved else None
        if not past and (memory is None or (memory.shape, memory.dtype, memory.device) != kind):
            self._reserved[layer] = pair[0].new_zeros(kind[0]), pair[1].new_zeros(kind[0])
        return self._write(layer, pair, past)

    def _write(self, layer: Hashable, pair: Pair, past: int) -> Pair:
        """Put the pair into reserved memory after `past` tokens; returns views of all that is then held."""
        keys, values = self._reserved[layer]
        end = past + pair[0].shape[2]
        keys[:, :, past:end], values[:, :, past:end] = pair
        return keys[:, :, :end], values[:, :, :end]


def _place(layer: Hashable) -> float:
    return layer if isinstance(layer, int) else float("inf")
