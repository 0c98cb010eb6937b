"""A measurement in plain lines."""

from modicum.bench import Bench


def bench_lines(bench: Bench) -> list[str]:
    """What, where, a row a system, and ours beside each peer."""
    head = ("system", "tokens/s", "slowest to fastest", "GFLOP/s", "of peak", "peak MB", "tokens/s ours", "memory ours")
    ratios = bench.ratios
    table: list[tuple[str, ...]] = [head]
    for place, row in enumerate(bench.rows):
        name = f"{row.system} {row.mode}"
        beside = (
            [f"{ratios['tokens_per_s'][name]:.2f} x", f"{ratios['peak_rss_mb'][name]:.2f} x"] if place else ["", ""]
        )
        table.append(
            (
                name,
                f"{row.tokens_per_s:,.0f}",
                f"{row.low:,.0f} to {row.high:,.0f}",
                f"{row.gflops:.0f}",
                f"{row.share_of_peak:.0%}",
                f"{row.peak_rss_mb:,.0f}",
                *beside,
            )
        )
    widths = [max(len(row[place]) for row in table) for place in range(len(head))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in table
    ]
    return [bench.what, bench.machine["line"], "", *(line.rstrip() for line in lines)]
