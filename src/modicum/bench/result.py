"""What a measurement says: one row a system, ratios of ours to each peer, and the machine."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """Medians over all rounds. low and high: the slowest and the fastest round's tokens_per_s.

    gflops: 10^9 floating-point operations of the model's arithmetic a second, whatever the system really computes.
    share_of_peak: of the machine's own matrix product in the same dtype. peak_rss_mb: largest resident set, 10^6 bytes.
    """

    system: str
    mode: str
    tokens_per_s: float
    low: float
    high: float
    gflops: float
    share_of_peak: float
    peak_rss_mb: float


@dataclass(frozen=True)
class Bench:
    """rows: ours first. what: what was measured, in words. machine: its line, threads, and matrix peaks by dtype."""

    what: str
    rows: tuple[Row, ...]
    machine: dict[str, Any]

    @property
    def ratios(self) -> dict[str, dict[str, float]]:
        """Ours divided by each peer's: above 1 is faster in tokens_per_s, below 1 is smaller in peak_rss_mb."""
        ours, *peers = self.rows
        return {
            figure: {f"{peer.system} {peer.mode}": getattr(ours, figure) / getattr(peer, figure) for peer in peers}
            for figure in ("tokens_per_s", "peak_rss_mb")
        }

    def to_dict(self) -> dict[str, Any]:
        """The shape that every `modicum bench` verb prints with --json."""
        return {
            "what": self.what,
            "rows": [asdict(row) for row in self.rows],
            "ratios": self.ratios,
            "machine": self.machine,
        }
