"""How good a model is: bits per byte, multiple choice, loss on answers, and how it answers; each with its interval.

Figures only, as frozen dataclasses with `to_dict()`; drawing and writing them is left to the rooms above.
"""

from modicum.evaluate.answers import AnswerLoss, answer_loss, last_exchange
from modicum.evaluate.bits import BitsPerByte, HeldoutBits, bits_per_byte
from modicum.evaluate.choice import ChoiceResult, multiple_choice
from modicum.evaluate.quality import AnswerQuality, Sample, answer_quality

__all__ = [
    "AnswerLoss",
    "AnswerQuality",
    "BitsPerByte",
    "ChoiceResult",
    "HeldoutBits",
    "Sample",
    "answer_loss",
    "answer_quality",
    "bits_per_byte",
    "last_exchange",
    "multiple_choice",
]
