"""What all layers of one forward pass share: angles, mask and cache, made once for the decoder or a single block."""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from modicum.model.mask import Visibility, open_blind_rows, places
from modicum.model.rotary import RotaryEmbedding

Implementation = Literal["sdpa", "blocks", "weights"]


class Cache(Protocol):
    """What attention needs of a cache; KVCache is one."""

    def append(self, layer: int, k_BHTK: Tensor, v_BHTK: Tensor) -> tuple[Tensor, Tensor]:
        """Take in this pass's keys and values of one layer; returns them after all the cached ones."""
        ...


class Slots(Protocol):
    """A cache whose rows have lengths of their own, and that attends by itself."""

    def attend(self, layer: int, q_RH1K: Tensor, k_RG1K: Tensor, v_RG1K: Tensor) -> Tensor:
        """Take in one token's keys and values of each row; returns the mixed values (R, H, 1, head_dim)."""
        ...


@dataclass(frozen=True)
class AttentionPlan:
    """What all layers of one forward pass share.

    mask is the whole (B or 1, H or 1, T, past+T), bool or a number to add to the scores (-inf hides), or None where
    `is_causal` alone or nothing limits the queries; biases is the same for blocks (Visibility.biases); seeing tells the
    queries that see nothing, None when there are none.
    """

    cos: Tensor
    sin: Tensor
    implementation: Implementation
    mask: Tensor | None = None
    seeing: Tensor | None = None
    is_causal: bool = False
    biases: tuple[Tensor, ...] = ()
    block: int = 0
    cache: Cache | None = None
    slots: Slots | None = None

    @property
    def cached(self) -> bool:
        return self.cache is not None or self.slots is not None


def make_plan(
    rotary: RotaryEmbedding,
    x_BTD: Tensor,
    visibility: Visibility,
    *,
    positions: Tensor | None = None,
    cache: Cache | None = None,
    implementation: Implementation = "sdpa",
    block: int = 128,
) -> AttentionPlan:
    """The plan for x (B, T, hidden), of which only shape and device matter.

    positions: (B or 1, T) int64; by default a token's place among those that it sees. implementation "weights" also
    returns the attention's weights; "blocks" (of `block` queries) takes no mask of the caller's own.
    """
    device, past, length = x_BTD.device, visibility.past, visibility.length
    plain = visibility.causal_only
    needs_positions = positions is None and not plain
    needs_mask = implementation == "weights" or (
        implementation == "sdpa" and not (plain and (past == 0 or length == 1))
    )
    allowed = visibility.allowed(0, length, device) if needs_positions or needs_mask else None
    if positions is None:
        positions = torch.arange(past, past + length, device=device)[None] if allowed is None else places(allowed)
    cos, sin = rotary.table(positions)
    if implementation == "blocks":
        biases, seeing = visibility.biases(block, device)
        return AttentionPlan(cos, sin, implementation, seeing=seeing, biases=biases, block=block, cache=cache)
    if needs_mask and allowed is not None:
        mask, seeing = open_blind_rows(allowed, visibility.added)
        return AttentionPlan(cos, sin, implementation, mask=mask, seeing=seeing, cache=cache)
    return AttentionPlan(cos, sin, implementation, is_causal=past == 0, cache=cache)
