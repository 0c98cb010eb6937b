"""What a rounded or converted model says and costs beside full precision, in plain lines."""

from collections.abc import Sequence

from modicum.evaluate.beside import Cost, Judged
from modicum.evaluate.divergence import MOST_UNDECIDED, Limits


def judged_lines(judged: Judged, limits: Limits) -> list[str]:
    """Whose texts judge, how far it leaves full precision there, and how many positions were too near to a tie."""
    quality = judged.quality
    over = "" if quality.undecided <= MOST_UNDECIDED else f", more than {MOST_UNDECIDED:.0%}: it is undecided"
    return [
        f"  on {quality.positions:,} positions of {judged.texts} texts ({judged.source}), beside full precision:",
        f"    KL divergence {quality.mean_kl:.2e} nats in the mean (allowed {limits.mean_kl:g}), "
        f"{quality.tail_kl:.2e} at the 99th percentile (allowed {limits.tail_kl:g})",
        f"    top-1 agreement {quality.agreement:.2%} (asked for {limits.agreement:.2%})",
        f"    with a first choice ahead by more than {quality.margin:g}: {quality.clear:,}, another one at "
        f"{quality.clear_differing}; left out {quality.undecided:.2%}{over}",
        f"    bits per byte {judged.bits_per_byte:.4f}, at full precision {judged.full_bits_per_byte:.4f}",
    ]


def cost_lines(names: Sequence[str], costs: Sequence[Cost]) -> list[str]:
    """A column for each: its size, its time to load, its memory, its speed."""
    rows = [
        ("", *names),
        ("on disk", *(f"{cost.disk_bytes / 1e6:.1f} MB" for cost in costs)),
        ("to load", *(f"{cost.load_seconds:.2f} s" for cost in costs)),
        ("in memory", *(f"{cost.memory_bytes / 1e6:.1f} MB" for cost in costs)),
        ("one answer", *(f"{cost.tokens_per_second:,.0f} tokens/s" for cost in costs)),
    ]
    return [f"  {row[0]:12}" + "".join(f"{cell:>18}" for cell in row[1:]) for row in rows]
