"""How far quantized weights leave what full precision says, on texts that the model itself writes."""

import numpy as np
from numpy.typing import NDArray

from modicum.checkpoint import Checkpoint
from modicum.evaluate.divergence import Limits, Quality, quality
from modicum.evaluate.own_texts import own_texts as written_by
from modicum.exchange.gguf_weights import Quant

__all__ = ["LIMITS", "Limits", "Quality", "own_texts", "quality"]

TEXTS, TOKENS = 50, 40

LIMITS: dict[Quant, Limits] = {
    "f32": Limits(1e-6, 1e-5, 0.99),
    "f16": Limits(1e-4, 1e-3, 0.995),
    "bf16": Limits(1e-3, 1e-2, 0.985),
    "q8_0": Limits(2e-3, 2e-2, 0.985),
    "q6_k": Limits(5e-3, 5e-2, 0.97),
    "q5_k": Limits(1e-2, 1e-1, 0.95),
    "q4_k": Limits(3e-2, 3e-1, 0.93),
    "q4_0": Limits(3e-2, 3e-1, 0.93),
}


def own_texts(checkpoint: Checkpoint) -> list[NDArray[np.int64]]:
    """TEXTS samples of at most TOKENS ids from the model, each from a document's start; always the same."""
    return [np.array(ids, dtype=np.int64) for ids in written_by(checkpoint, texts=TEXTS, tokens=TOKENS)]
