"""Bits per byte against an independent computation, and its protocol: every target once, with enough before it."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.corpus import Document
from modicum.evaluate import bits_per_byte
from modicum.evaluate.bits import windows
from modicum.model import Decoder, ModelConfig
from modicum.store import UserError


def document(number, text, domain="a"):
    return Document(f"d{number}", text, "source", domain, None)


DOCUMENTS = [
    document(0, "A short one."),
    document(1, "Naïve café, 日本語, \U0001f600.", "b"),
    document(2, "A buffer overflow writes past the end of a buffer. " * 12),
    document(3, "x", "b"),
]


def test_bits_per_byte_is_that_of_a_float64_reference(model, reference, tokenizer):
    """Windows by hand: the first holds 64 targets, each further one 32 more, with a full context before its end."""
    found = bits_per_byte(model, tokenizer, DOCUMENTS)
    bits = {}
    for d in DOCUMENTS:
        ids = [tokenizer.eot_id, *tokenizer.encode(d.text), tokenizer.eot_id]
        nats, done = [], 0
        while done < len(ids) - 1:
            end = min(64 if done == 0 else done + 32, len(ids) - 1)
            nats += reference(ids[max(0, end - 64) : end + 1])[-(end - done) :]
            done = end
        assert len(nats) == len(ids) - 1
        bits[d.id] = -sum(nats) / math.log(2)
    size = {d.id: len(d.text.encode()) for d in DOCUMENTS}
    assert found.total.bits == pytest.approx(sum(bits.values()), rel=1e-5)
    assert found.total.value == pytest.approx(sum(bits.values()) / sum(size.values()), rel=1e-5)
    assert found.domains["b"].value == pytest.approx((bits["d1"] + bits["d3"]) / (size["d1"] + size["d3"]), rel=1e-5)
    assert (found.total.documents, found.domains["a"].documents, found.domains["b"].documents) == (4, 2, 2)
    assert found.total.bytes == sum(size.values())
    assert found.total.tokens == sum(len(tokenizer.encode(d.text)) + 1 for d in DOCUMENTS)


def test_an_untrained_model_needs_the_bits_of_a_uniform_guess(tokenizer):
    """log2(vocabulary) for each token, the final end-of-text token included."""
    config = ModelConfig(
        vocab_size=512, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    found = bits_per_byte(Decoder(config), tokenizer, DOCUMENTS).total
    assert found.bits / found.tokens == pytest.approx(9, abs=0.02)


@given(st.integers(2, 300), st.integers(2, 64))
def test_every_target_is_scored_exactly_once_and_sees_half_a_context(length, window):
    segment = list(range(length))
    scored = [i for piece in windows(segment, window) for i in piece.ids[piece.start :]]
    assert scored == segment[1:]
    for piece in windows(segment, window):
        assert len(piece.ids) <= window + 1
        assert piece.ids == segment[piece.ids[0] : piece.ids[-1] + 1]
        first = piece.ids[piece.start]
        assert piece.start >= min(first, window // 2)


def test_the_order_of_documents_does_not_matter(model, tokenizer):
    forwards, backwards = (bits_per_byte(model, tokenizer, order) for order in (DOCUMENTS, DOCUMENTS[::-1]))
    assert forwards.total.value == pytest.approx(backwards.total.value, rel=1e-6)


def test_a_sample_is_decided_by_seed_and_ids_and_not_by_order(model, tokenizer):
    many = [document(i, f"document number {i} " * (1 + i % 5)) for i in range(60)]
    a = bits_per_byte(model, tokenizer, many, max_tokens=200, seed=1).total
    b = bits_per_byte(model, tokenizer, many[::-1], max_tokens=200, seed=1).total
    c = bits_per_byte(model, tokenizer, many, max_tokens=200, seed=2).total
    assert (a.documents, a.tokens, a.bytes) == (b.documents, b.tokens, b.bytes)
    assert a.bits == pytest.approx(b.bits, rel=1e-6)
    assert a.bytes != c.bytes
    longest = max(len(tokenizer.encode(d.text)) + 1 for d in many)
    assert 200 <= a.tokens < 200 + longest


def test_more_tokens_than_there_are_means_all(model, tokenizer):
    assert bits_per_byte(model, tokenizer, DOCUMENTS, max_tokens=10**9).total.documents == 4


def test_documents_without_text_are_left_out_and_none_with_text_is_refused(model, tokenizer):
    found = bits_per_byte(model, tokenizer, [*DOCUMENTS, document(9, "", "c")])
    assert found.total.documents == 4
    assert "c" not in found.domains
    for nothing in ([], [document(9, "")]):
        with pytest.raises(UserError, match="no held-out text"):
            bits_per_byte(model, tokenizer, nothing)


@pytest.mark.parametrize("context", [1, 65])
def test_a_context_that_the_model_has_not_is_refused(model, tokenizer, context):
    with pytest.raises(UserError, match="context: expected 2 to 64 tokens"):
        bits_per_byte(model, tokenizer, DOCUMENTS, context=context)


def test_the_stated_context_is_the_one_used(tokenizer):
    """Another context gives other figures on long documents, and the same on short ones."""
    config = ModelConfig(
        vocab_size=512,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        initializer_range=0.3,
    )
    model = Decoder(config)
    small, large = (bits_per_byte(model, tokenizer, DOCUMENTS, context=context) for context in (16, 256))
    assert small.domains["a"].bits != pytest.approx(large.domains["a"].bits, rel=1e-4)
    short = [DOCUMENTS[0]]
    small, large = (bits_per_byte(model, tokenizer, short, context=context) for context in (16, 256))
    assert small.total.bits == pytest.approx(large.total.bits, rel=1e-5)


def test_every_figure_is_finite_plain_json_and_inside_its_interval(model, tokenizer):
    found = bits_per_byte(model, tokenizer, DOCUMENTS)
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False)) == found.to_dict()
    assert found.to_dict()["total"]["bits_per_byte"] == found.total.value
    for part in (found.total, *found.domains.values()):
        assert part.low <= part.value <= part.high
        assert np.isfinite([part.low, part.value, part.high]).all()


def test_a_single_document_gives_a_figure_without_an_interval(model, tokenizer):
    """What is resampled from one document never varies."""
    total = bits_per_byte(model, tokenizer, DOCUMENTS[:1]).total
    assert (total.documents, total.low, total.high) == (1, None, None)
    assert total.value > 0
