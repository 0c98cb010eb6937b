"""Figures as people read them: 7.3 M, 1.9 GB, 8 min 53 s, 27.3 %. For the plan's table and the report's page."""

from math import isfinite

_LARGE = ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def count(number: float) -> str:
    """A whole number with its thousands apart: 1,234,567."""
    return f"{number:,.0f}"


def short(number: float) -> str:
    """A large number to three figures: 7.34 M, 16.4 k, 512. B is 10^9, T 10^12."""
    for scale, letter in _LARGE:
        if abs(number) >= scale * 0.9995:
            return f"{three_figures(number / scale)} {letter}"
    return three_figures(number)


def three_figures(number: float) -> str:
    """Three significant figures without an exponent: 1,430, 733, 73.3, 7.33, 0.00733."""
    if not isfinite(number):
        return "not finite"
    if number == 0:
        return "0"
    if abs(number) >= 999.5:
        return count(number)
    text = f"{number:.3g}"
    return f"{float(text):f}".rstrip("0").rstrip(".") if "e" in text else text


def percent(share: float) -> str:
    """A share of one as a percentage with one decimal: 0.2734 is 27.3 %."""
    return f"{share * 100:.1f} %"


def size(number: float) -> str:
    """Bytes in decimal units, as disks are sold: 1.9 GB, 512 kB."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(number) >= scale * 0.9995:
            return f"{three_figures(number / scale)} {unit}"
    return f"{number:.0f} B"


def duration(seconds: float) -> str:
    """A time in its two largest units: 8 min 53 s, 3 h 20 min, 2 d 4 h."""
    if seconds < 0.95:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(seconds / 60)
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(seconds / 3600)
    return f"{hours // 24:,} d {hours % 24} h"
