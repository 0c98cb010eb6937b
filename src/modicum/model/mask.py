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
    """

    past: int
    length: int
    keep: Tensor | None = None
    query_documents: Tensor | None = None
    key_documents: Tensor | None = None

    @property
    def causal_only(self) -> bool:
        """True when there is neither padding nor more than one document to look at."""
        return self.keep is None and self.query_documents is None

    def allowed(self, start: int, stop: int, device: torch.device) -> Tensor:
        """For queries start..stop-1 and keys 0..past+stop-1, later ones being hidden: (B or 1, 1, Q, K) bool."""
        keys = self.past + stop
        key_slot = torch.arange(keys, device=device)
        seen = (key_slot <= key_slot[self.past + start :, None])[None, None]
        if self.keep is not None:
            seen = seen & self.keep[:, None, None, :keys]
        if self.query_documents is not None and self.key_documents is not None:
            query = self.query_documents[:, None, start:stop, None]
            seen = seen & (query == self.key_documents[:, None, None, :keys]) & (query >= 0)
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


def open_blind_rows(allowed: Tensor) -> tuple[Tensor, Tensor]:
    """The mask in which a query that may see nothing sees everything, and which queries are not such, (B, 1, T, 1).

    A row of only False is NaN in some kernels, forward or backward. So it is opened, and what it finds is zeroed.
    """
    seeing = allowed.any(-1, keepdim=True)
    return allowed | ~seeing, seeing


def places(allowed: Tensor) -> Tensor:
    """Each query's place among the keys it sees, (B or 1, T) int64: 0 at a document's start, and for padding."""
    return (allowed.sum(-1)[:, 0] - 1).clamp(min=0)


def visible_or_zero(out: Tensor, seeing: Tensor | None) -> Tensor:
    """Zeros for the queries (the last dimension but one) that see nothing; None: every query sees something."""
    return out if seeing is None else torch.where(seeing, out, 0.0)
