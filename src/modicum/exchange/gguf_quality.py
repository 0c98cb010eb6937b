"""How far quantized weights leave what full precision says, on texts that the model itself writes.

Its own samples are what it will be used for, need no data, and are the same every time.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from modicum.checkpoint import Checkpoint
from modicum.exchange.gguf_weights import Quant
from modicum.generate import Generator, SamplingParams

TEXTS, TOKENS = 50, 40
CLEAR = 0.01  # of a logit: ten times what float32 weights may be off


@dataclass(frozen=True)
class Limits:
    """What is refused: a mean or 99th-percentile KL divergence (nats) above, a top-1 agreement below."""

    mean_kl: float
    tail_kl: float
    agreement: float


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


@dataclass(frozen=True)
class Quality:
    """positions compared; KL divergence from full precision in nats; how often the likeliest token is the same; clear:
    positions where full precision prefers it by more than a hundredth, and in how many of these it is another."""

    positions: int
    mean_kl: float
    tail_kl: float
    agreement: float
    clear: int
    clear_differing: int

    def faults(self, limits: Limits) -> list[str]:
        """What is over its limit, in a line each."""
        found = []
        if not self.mean_kl <= limits.mean_kl:
            found.append(f"mean KL divergence {self.mean_kl:.3g}, allowed {limits.mean_kl:g}")
        if not self.tail_kl <= limits.tail_kl:
            found.append(f"99th percentile of the KL divergence {self.tail_kl:.3g}, allowed {limits.tail_kl:g}")
        if not self.agreement >= limits.agreement:
            found.append(f"top-1 agreement {self.agreement:.2%}, asked for {limits.agreement:.2%}")
        return found


def own_texts(checkpoint: Checkpoint) -> list[NDArray[np.int64]]:
    """TEXTS samples of at most TOKENS ids from the model, each from a document's start; always the same."""
    generator = Generator(checkpoint.model(), checkpoint.tokenizer, stop_ids=[])
    length = min(TOKENS, checkpoint.config.max_position_embeddings) - 1
    params = [SamplingParams(max_new_tokens=length, seed=number) for number in range(TEXTS)]
    start = [checkpoint.tokenizer.bos_id]
    written = generator.generate([start] * TEXTS, params, batch_size=TEXTS)
    return [np.array([*start, *completion.ids], dtype=np.int64) for completion in written]


def quality(full: Iterable[NDArray[np.floating]], found: Iterable[NDArray[np.floating]]) -> Quality:
    """Compare logits (T, V) of the same texts: `full` precision's, and what was `found`. One text at a time."""
    divergence, same, clear = [], [], []
    for truth, other in zip(map(_log_softmax, full), map(_log_softmax, found), strict=True):
        divergence.append((np.exp(truth) * (truth - other)).sum(-1))
        same.append(truth.argmax(-1) == other.argmax(-1))
        second, best = np.partition(truth, -2, axis=-1)[:, -2:].T
        clear.append(best - second > CLEAR)
    divergences, agreeing, decided = (np.concatenate(parts) for parts in (divergence, same, clear))
    return Quality(
        positions=len(divergences),
        mean_kl=float(divergences.mean()),
        tail_kl=float(np.quantile(divergences, 0.99)),
        agreement=float(agreeing.mean()),
        clear=int(decided.sum()),
        clear_differing=int((decided & ~agreeing).sum()),
    )


def _log_softmax(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    found: NDArray[np.float64] = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    return found
