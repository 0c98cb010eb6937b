"""What rounding costs and brings, in plain lines."""

from collections import Counter

from modicum.cli.beside_table import cost_lines, judged_lines
from modicum.quantize import QuantizeReport

_SHOWN = 5


def quantize_lines(report: QuantizeReport) -> list[str]:
    """Full precision and rounded side by side; what they say; which matrices have how many bits."""
    kinds = Counter(report.bits.values())
    dearest = sorted(report.costs.items(), key=lambda item: -item[1])[:_SHOWN]
    return [
        *cost_lines(("full precision", report.to), (report.full, report.cost)),
        *judged_lines(report.judged, report.limits),
        "  " + ", ".join(f"{count} matrices of {bits} bits" for bits, count in sorted(kinds.items())),
        *([f"  more bits than asked for: {', '.join(report.promoted)}"] if report.promoted else []),
        *(f"  alone, {name} costs {cost:.2e} nats" for name, cost in dearest),
        *(f"  {note}" for note in report.notes),
    ]
