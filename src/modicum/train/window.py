"""Sums over the updates since the last line of metrics: every figure in it is a mean over all of them."""

from dataclasses import asdict, dataclass
from typing import Any

from modicum.train.update import Update


@dataclass
class Window:
    """seconds: of training alone, without evaluation and saving. tokens: inputs that are no padding."""

    updates: int = 0
    loss_sum: float = 0.0
    targets: int = 0
    tokens: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    norm_sum: float = 0.0
    norm_max: float = 0.0

    def add(self, update: Update, *, seconds: float, waited: float) -> None:
        """Take in one update: how long it took, how long of that it waited for data."""
        self.updates += 1
        self.loss_sum += update.loss_sum
        self.targets += update.targets
        self.tokens += update.tokens
        self.seconds += seconds
        self.waited += waited
        self.norm_sum += update.gradient_norm
        self.norm_max = max(self.norm_max, update.gradient_norm)

    def record(self) -> dict[str, Any]:
        """What a line of metrics says of these updates; loss in nats a supervised token."""
        return {
            "loss": self.loss_sum / self.targets,
            "gradient_norm": self.norm_sum / self.updates,
            "gradient_norm_max": self.norm_max,
            "tokens_per_second": round(self.tokens / max(self.seconds, 1e-9), 1),
            "data_wait_share": round(self.waited / max(self.seconds, 1e-9), 4),
        }

    def plain(self) -> dict[str, Any]:
        """As JSON data; `Window(**data)` is it again."""
        return asdict(self)
