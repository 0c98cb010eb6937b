"""Texts that a model writes itself: what it will be used for, no data needed, and the same every time."""

from modicum.checkpoint import Checkpoint
from modicum.generate import Generator, SamplingParams


def own_texts(checkpoint: Checkpoint, *, texts: int, tokens: int, first: int = 0) -> list[list[int]]:
    """Samples of at most `tokens` ids, each from a document's start, which stands in front; seeds from `first` on."""
    generator = Generator(checkpoint.model(), checkpoint.tokenizer, stop_ids=[])
    length = min(tokens, checkpoint.config.max_position_embeddings) - 1
    params = [SamplingParams(max_new_tokens=length, seed=first + number) for number in range(texts)]
    start = [checkpoint.tokenizer.bos_id]
    written = generator.generate([start] * texts, params, batch_size=min(texts, 64))
    return [[*start, *completion.ids] for completion in written]
