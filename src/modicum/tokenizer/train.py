"""Train a byte-level BPE tokenizer on a capped, seeded sample of a stream of texts."""

import json
from collections.abc import Iterable
from dataclasses import replace

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from modicum.store import UserError
from modicum.tokenizer.sample import SampleReport, sample_texts
from modicum.tokenizer.special import (
    PRETOKENIZER_PATTERN,
    SPECIAL_TOKENS,
    VOCAB_MULTIPLE,
    next_multiple,
    reserved_token,
    special_entry,
)
from modicum.tokenizer.template import CHATML
from modicum.tokenizer.tokenizer import Tokenizer

SMALLEST_VOCAB = next_multiple(len(SPECIAL_TOKENS) + 256)


def train_tokenizer(
    texts: Iterable[str], *, vocab_size: int, min_frequency: int, sample_bytes: int, seed: int
) -> tuple[Tokenizer, SampleReport]:
    """A tokenizer of exactly `vocab_size` tokens (rounded up to a multiple of 64), and what it was trained on.

    The 24 special tokens, the 256 bytes, then the merges learned from at most `sample_bytes` bytes of `texts`. Where
    the sample holds fewer pairs that occur `min_frequency` times than there are rows left, further reserved tokens
    take the last rows: the size a recipe was planned with stays true, and the report counts them.
    The same texts, in the same order, give the same tokenizer.json to the byte.

    Raises UserError when there is no text, or the vocabulary cannot hold the special tokens and the bytes.
    """
    size = next_multiple(vocab_size)
    if size < SMALLEST_VOCAB:
        raise UserError(
            f"tokenizer.vocab_size {vocab_size}: too small for {len(SPECIAL_TOKENS)} special tokens and 256 bytes; "
            f"at least {SMALLEST_VOCAB - VOCAB_MULTIPLE + 1}"
        )
    sample, report = sample_texts(texts, sample_bytes=sample_bytes, seed=seed)
    if not report.bytes:
        raise UserError(
            f"no text to train a tokenizer on ({report.total_documents} documents, {report.total_bytes} bytes, sample "
            f"of at most {sample_bytes} bytes); look at the corpus report for what was dropped"
        )
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(PRETOKENIZER_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=min_frequency,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(sample, trainer)
    definition = json.loads(backend.to_str())
    learned = backend.get_vocab_size() - len(SPECIAL_TOKENS) - 256
    filler = _fill(definition, size)
    return Tokenizer(definition, CHATML), replace(report, learned_tokens=learned, filler_tokens=filler)


def _fill(definition: dict[str, object], size: int) -> int:
    """Give every row up to `size` a token; returns how many had none."""
    vocab, added = definition["model"]["vocab"], definition["added_tokens"]  # type: ignore[index]
    first, missing = len(vocab), size - len(vocab)
    for row in range(missing):
        token = reserved_token(16 + row)
        vocab[token] = first + row
        added.append(special_entry(token, first + row))  # type: ignore[attr-defined]
    return missing
