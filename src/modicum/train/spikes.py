"""Sudden jumps of the loss or the gradient's norm, against the median of the updates before."""

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

# Runs that spiked (Chowdhery et al. 2022, PaLM) showed several times their usual norm; one nat more is a perplexity e
# times worse.
NORM_FACTOR = 4.0
LOSS_JUMP = 1.0
_REMEMBERED, _NEEDED = 64, 10


class Spikes:
    """Remembers the last 64 updates. Says nothing before it has seen 10."""

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=_REMEMBERED)
        self._losses: deque[float] = deque(maxlen=_REMEMBERED)

    def observe(self, loss: float, norm: float) -> dict[str, float] | None:
        """Take in an update's loss and gradient norm; returns both with their medians when one of them jumped."""
        found = None
        if len(self._norms) >= _NEEDED:
            usual_norm, usual_loss = median(self._norms), median(self._losses)
            if norm > NORM_FACTOR * usual_norm or loss > usual_loss + LOSS_JUMP:
                found = {
                    "loss": loss,
                    "median_loss": usual_loss,
                    "gradient_norm": norm,
                    "median_gradient_norm": usual_norm,
                }
        self._norms.append(norm)
        self._losses.append(loss)
        return found

    def state_dict(self) -> dict[str, list[float]]:
        return {"norms": list(self._norms), "losses": list(self._losses)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._norms.extend(state["norms"])
        self._losses.extend(state["losses"])
