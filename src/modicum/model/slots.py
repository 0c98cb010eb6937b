"""A cache of slots: many conversations in one reserved memory, each of its own length, and the passes over it.

Who owns a slot, and which of its tokens still count, is the caller's to know: a pass is told where to write, and reads
up to there.
"""

import torch
from torch import Tensor

from modicum.model.config import ModelConfig
from modicum.model.decoder import Decoder
from modicum.model.plan import AttentionPlan
from modicum.model.scores import attend_sdpa


class SlotCache:
    """Keys and values of `slots` sequences of at most `capacity` tokens, (slots, kv heads, capacity + 1, head_dim).

    The column after the last takes what rows write that only fill a batch up.
    """

    def __init__(
        self,
        config: ModelConfig,
        slots: int,
        capacity: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (slots, config.num_key_value_heads, capacity + 1, config.head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
        self.slots, self.capacity = slots, capacity

    @staticmethod
    def bytes(config: ModelConfig, slots: int, capacity: int, dtype: torch.dtype) -> int:
        """What it will take."""
        width = config.num_key_value_heads * config.head_dim * dtype.itemsize
        return 2 * config.num_hidden_layers * slots * (capacity + 1) * width

    def copy(self, source: int, target: int, length: int) -> None:
        """Give slot `target` the first `length` tokens of slot `source`."""
        for layer in (*self.keys, *self.values):
            layer[target, :, :length] = layer[source, :, :length]

    @torch.inference_mode()
    def clear(self, slot: int) -> None:
        """Forget what is not finite too: masked, it would still be multiplied, and 0 times NaN is NaN."""
        for layer in (*self.keys, *self.values):
            layer[slot] = 0


class _Sequence:
    """One pass's view of a cache: T tokens of one slot, from `start` on."""

    def __init__(self, cache: SlotCache, slot: int, start: int) -> None:
        self._cache, self._slot, self._start = cache, slot, start

    def append(self, layer: int, k_1HTK: Tensor, v_1HTK: Tensor) -> tuple[Tensor, Tensor]:
        end = self._start + k_1HTK.shape[2]
        keys, values = (c[layer][self._slot, :, :end][None] for c in (self._cache.keys, self._cache.values))
        keys[:, :, self._start :] = k_1HTK
        values[:, :, self._start :] = v_1HTK
        return keys, values


class _Rows:
    """One pass's view of a cache: one token for each of R slots, at places of their own."""

    def __init__(self, cache: SlotCache, slots_R: Tensor, places_R: Tensor, attended: int) -> None:
        self._cache, self._slots_R, self._places_R, self._attended = cache, slots_R, places_R, attended
        self._picked = _picked(slots_R)

    def attend(self, layer: int, q_RH1K: Tensor, k_RG1K: Tensor, v_RG1K: Tensor) -> Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        slots_R, places_R = self._slots_R, self._places_R
        keys[slots_R, :, places_R] = k_RG1K[:, :, 0]
        values[slots_R, :, places_R] = v_RG1K[:, :, 0]
        seen = (torch.arange(self._attended, device=places_R.device) <= places_R[:, None])[:, None, None]
        return attend_sdpa(
            q_RH1K, keys[self._picked, :, : self._attended], values[self._picked, :, : self._attended], mask=seen
        )


def _picked(slots_R: Tensor) -> Tensor | slice:
    """The same slots; as a range where they stand side by side, for an index makes a copy of what it picks. On other
    devices to look at them would be to wait for them."""
    if slots_R.device.type != "cpu":
        return slots_R
    slots = slots_R.tolist()
    side_by_side = slice(slots[0], slots[0] + len(slots))
    return side_by_side if slots == list(range(side_by_side.start, side_by_side.stop)) else slots_R


def extend(model: Decoder, ids_1T: Tensor, cache: SlotCache, slot: int, start: int) -> Tensor:
    """What the head reads, (1, T, hidden), of T tokens that come after the first `start` of a slot."""
    length = ids_1T.shape[1]
    places = torch.arange(start, start + length, device=ids_1T.device)
    mask = None
    if start and length > 1:
        mask = (torch.arange(start + length, device=ids_1T.device) <= places[:, None])[None, None]
    cos, sin = model.model.rotary.table(places[None])
    view = _Sequence(cache, slot, start)
    return _walk(model, ids_1T, AttentionPlan(cos, sin, "sdpa", mask=mask, is_causal=start == 0, cache=view))


def advance(
    model: Decoder, ids_R: Tensor, cache: SlotCache, slots_R: Tensor, places_R: Tensor, attended: int
) -> Tensor:
    """What the head reads, (R, hidden), of one token for each of R slots, at `places_R`, the first being 0.

    attended: above the largest place that matters. A row at place `capacity` only fills the batch up.
    """
    cos, sin = model.model.rotary.table(places_R[:, None])
    rows = _Rows(cache, slots_R, places_R, attended)
    return _walk(model, ids_R[:, None], AttentionPlan(cos, sin, "sdpa", slots=rows))[:, 0]


def _walk(model: Decoder, ids_BT: Tensor, plan: AttentionPlan) -> Tensor:
    x_BTD = model.embed(ids_BT)
    for block in model.model.layers:
        x_BTD, _ = block(x_BTD, plan)
    out: Tensor = model.model.norm(x_BTD)
    return out
