"""What the gate compared, in plain lines."""

from collections.abc import Iterable

from modicum.exchange.parity import Compared


def parity_lines(compared: Iterable[Compared]) -> list[str]:
    """A row a prompt: how far the logits are from the float64 reference's, and how far they might be."""
    rows = [("prompt", "difference", "allowed", "largest logit")]
    rows += [
        (f"{one.tokens} tokens", f"{one.difference:.2e}", f"{one.allowed:.2e}", f"{one.largest:.3g}")
        for one in compared
    ]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return [
        f"  {row[0].ljust(widths[0])}  " + "  ".join(cell.rjust(widths[place]) for place, cell in enumerate(row[1:], 1))
        for row in rows
    ]
