"""What rounding costs and brings, in plain lines."""

from collections import Counter

from modicum.quantize import QuantizeReport

_SHOWN = 5


def quantize_lines(report: QuantizeReport) -> list[str]:
    """Full precision and rounded side by side; what they say; which matrices have how many bits."""
    full, rounded, quality, limits = report.full, report.rounded, report.quality, report.limits
    rows = [
        ("", "full precision", report.to),
        ("weights on disk", f"{full.disk_bytes / 1e6:.1f} MB", f"{rounded.disk_bytes / 1e6:.1f} MB"),
        ("in memory", f"{full.memory_bytes / 1e6:.1f} MB", f"{rounded.memory_bytes / 1e6:.1f} MB"),
        ("bits per byte", f"{full.bits_per_byte:.4f}", f"{rounded.bits_per_byte:.4f}"),
        ("to load", f"{full.load_seconds:.2f} s", f"{rounded.load_seconds:.2f} s"),
        ("one answer", f"{full.tokens_per_s:,.0f} tokens/s", f"{rounded.tokens_per_s:,.0f} tokens/s"),
    ]
    widths = [max(len(row[place]) for row in rows) for place in range(3)]
    kinds = Counter(report.bits.values())
    dearest = sorted(report.costs.items(), key=lambda item: -item[1])[:_SHOWN]
    whose = "the model's own texts" if report.own_texts else "text that it was not fitted to"
    return [
        *(f"  {a.ljust(widths[0])}  {b.rjust(widths[1])}  {c.rjust(widths[2])}" for a, b, c in rows),
        f"  on {quality.positions:,} positions of {whose}, beside full precision:",
        f"    KL divergence {quality.mean_kl:.2e} nats in the mean (allowed {limits.mean_kl:g}), "
        f"{quality.tail_kl:.2e} at the 99th percentile (allowed {limits.tail_kl:g})",
        f"    top-1 agreement {quality.agreement:.2%} (asked for {limits.agreement:.2%})",
        "  " + ", ".join(f"{count} matrices of {bits} bits" for bits, count in sorted(kinds.items())),
        *([f"  more bits than asked for: {', '.join(report.promoted)}"] if report.promoted else []),
        *(f"  alone, {name} costs {cost:.2e} nats" for name, cost in dearest),
        *(f"  {note}" for note in report.notes),
    ]
