"""Weights of 8 and 4 bits: rounding, which matrices bear it, tuning to it, what it costs, measured before it is kept.

What runs such a model is model's and checkpoint's; a file for another runtime is exchange's.
"""

from modicum.quantize.quantizing import LIMITS, QuantizeReport, quantize_checkpoint

__all__ = ["LIMITS", "QuantizeReport", "quantize_checkpoint"]
