"""Who may see whom: the one place where causality, key padding and document borders are put together."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Visibility:
    """What T queries at slots past..past+T-1 may see of the keys at slots 0..past+T-1.

    A key is seen when it is not later than the query, when `keep` (B, past+T) bool is true for it, and when both carry
    the same document number; a negative number is padding, which sees nothing and is seen by nothing. `keep` and the
    document numbers are None where there is no padding, or only one document. Slots order the tokens; positions, which
    restart in each document, do not enter here.
    own is a mask of the caller's, (B or 1, H or 1, T, past+T) bool, and `added`, of the same form, what it adds to the
    scores of the keys that are seen (split_mask makes both).
    """

    past: int
    length: int
    keep: Tensor | None = None
    query_documents: Tensor | None = None
    key_documents: Tensor | None = None
    own: Tensor | None = None
    added: Tensor | None = None

    @property
    def causal_only(self) -> bool:
        """True when there is neither padding, nor more than one document to look at, nor a mask of the caller's."""
        return self.keep is None and self.query_documents is None and self.own is None

    def allowed(self, start: int, stop: int, device: torch.device) -> Tensor:
        """For queries start..stop-1 and keys 0..past+stop-1, later ones being hidden: (B or 1, H or 1, Q, K) bool."""
        keys = self.past + stop
        key_slot = torch.arange(keys, device=device)
        seen = (key_slot <= key_slot[self.past + start :, None])[None, None]
        if self.keep is not None:
            seen = seen & self.keep[:, None, None, :keys]
        if self.query_documents is not None and self.key_documents is not None:
            query = self.query_documents[:, None, start:stop, None]
            seen = seen & (query == self.key_documents[:, None, None, :keys]) & (query >= 0)
        if self.own is not None:
            seen = seen & self.own[:, :, start:stop, :keys]
        return seen

    def biases(self, block: int, device: torch.device) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """The mask as something to add to the scores, cut for blocks of `block` queries, and who sees anything at all.

        The i-th bias covers queries i * block .. stop - 1 and keys 0 .. past + stop - 1: (B or 1, 1, Q, K) bfloat16,
        which holds its two values, 0 and the lowest number, exactly. The second part is (B, 1, T, 1) bool, None where
        every query sees at least itself.
        """
        biases, seeing = [], []
        for start in range(0, self.length, block):
            allowed = self.allowed(start, min(start + block, self.length), device)
            lowest = torch.finfo(torch.bfloat16).min
            biases.append(torch.zeros(allowed.shape, dtype=torch.bfloat16, device=device).masked_fill(~allowed, lowest))
            seeing.append(allowed.any(-1, keepdim=True))
        return tuple(biases), None if self.causal_only else torch.cat(seeing, dim=2)


def split_mask(mask: Tensor, *, batch: int, heads: int, length: int, past: int) -> tuple[Tensor, Tensor | None]:
    """Visibility's `own` and `added` from a mask broadcastable to (batch, heads, length, past + length).

    A bool mask is true where a key is seen. Any other is added to the scores, and what is at or below half of float16's
    lowest number hides: that takes in -inf, every dtype's lowest number and -1e9, and leaves no weight in any dtype.
    ValueError for a shape that does not broadcast, and for whole numbers, of which nobody can tell which they mean.
    Outside of compiled code also for NaN and +inf, and for floats of which some are 0, some 1 and none anything else.
    """
    wanted = (batch, heads, length, past + length)
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise ValueError(
            f"attention_mask must be bool or added to the scores, not {mask.dtype}; mask.bool() if 1 keeps"
        )
    shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if len(shape) > 4 or any(size not in (1, whole) for size, whole in zip(shape, wanted, strict=True)):
        raise ValueError(
            f"attention_mask {tuple(mask.shape)} does not broadcast to (batch, heads, query, key) = {wanted}; "
            "a mask (batch, key) is written mask[:, None, None, :]"
        )
    whole = mask.view(shape).expand(-1, -1, length, past + length)
    if mask.dtype == torch.bool:
        return whole, None
    if not torch.compiler.is_compiling() and not mask.is_meta:
        _check_added(mask.detach())
    own = whole > torch.finfo(torch.float16).min / 2
    return own, whole.masked_fill(~own, 0.0)


def _check_added(mask: Tensor) -> None:
    """ValueError for what cannot be meant as something to add to the scores."""
    if not bool((mask < torch.inf).all()):  # NaN is below nothing
        raise ValueError("attention_mask is added to the scores, and this one holds NaN or +inf; -inf hides")
    zero = mask == 0
    if bool((zero | (mask == 1)).all()) and bool(zero.any()) and not bool(zero.all()):
        raise ValueError(
            "attention_mask holds only 0 and 1, but floats are added to the scores; mask.bool() if 1 keeps"
        )


def open_blind_rows(allowed: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The mask in which a query that may see nothing sees everything, and which queries are not such, (B, H, T, 1).

    A row of only False is NaN in some kernels, forward or backward. So it is opened, and what it finds is zeroed. With
    `added` the mask is that, and -inf where a key is hidden.
    """
    seeing = allowed.any(-1, keepdim=True)
    opened = allowed | ~seeing
    return opened if added is None else torch.where(opened, added, -torch.inf), seeing


def places(allowed: Tensor) -> Tensor:
    """Each query's place among the keys it sees, (B or 1, T) int64: 0 at a document's start, and for padding."""
    return (allowed.sum(-1)[:, 0] - 1).clamp(min=0)


def visible_or_zero(out: Tensor, seeing: Tensor | None) -> Tensor:
    """Zeros for the queries (the last dimension but one) that see nothing; None: every query sees something."""
    return out if seeing is None else torch.where(seeing, out, 0.0)
