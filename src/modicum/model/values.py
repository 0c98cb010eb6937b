"""What a config's values may be: each check says what is amiss with one value, and never fails on any itself.

The limits are those of what is computed with the values: positions and sizes are counted in 32 bits somewhere down
the road, and numbers are float32 once they meet a tensor. A layer is nine names in every list of weights, so their
number is limited before such a list is made for a file that only claims to have so many.
"""

import math
import reprlib
from typing import Any

import torch

LARGEST_SIZE = 2**31 - 1
MOST_LAYERS = 2**16
_FLOAT32 = torch.finfo(torch.float32)
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200


def shown(value: Any) -> str:
    """The value as a message shows it, cut where it is long, or deep: lists that hold each other take few bytes in a
    file, and no end of text."""
    try:
        text = _SHORT.repr(value)
    except ValueError:  # of more than 4300 digits, which Python does not write
        text = "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:60]}..."


def is_whole(value: Any, *, least: int = 1, most: int = LARGEST_SIZE) -> bool:
    """Whether the value is an int, and no bool, from `least` to `most`."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def whole_fault(value: Any, *, least: int = 1, most: int = LARGEST_SIZE) -> str | None:
    """What is amiss with a whole number from `least` to `most`; None where nothing is."""
    if is_whole(value, least=least, most=most):
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value > most:
        return f"must be at most {most}, not {shown(value)}"
    return f"must be a whole number of at least {least}, not {shown(value)}"


def as_float(value: Any) -> float:
    """The value as a float: infinite beyond all floats, NaN where it is no number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def positive_fault(value: Any) -> str | None:
    """What is amiss with a number above 0 that float32 holds in full; None where nothing is."""
    number = as_float(value)
    if not 0 < number < math.inf:
        return f"must be a number above 0, not {shown(value)}"
    if not _FLOAT32.tiny <= number <= _FLOAT32.max:
        return f"must be from {_FLOAT32.tiny:.3g} to {_FLOAT32.max:.3g}, as float32 holds it, not {shown(value)}"
    return None


def share_fault(value: Any) -> str | None:
    """What is amiss with a probability of dropping; None where nothing is."""
    return None if 0 <= as_float(value) < 1 else f"must be at least 0 and below 1, not {shown(value)}"


def switch_fault(value: Any) -> str | None:
    """What is amiss with a switch; None where nothing is."""
    return None if isinstance(value, bool) else f"must be true or false, not {shown(value)}"
