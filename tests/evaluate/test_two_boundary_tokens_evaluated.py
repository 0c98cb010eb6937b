"""Held-out text and choices of a tokenizer that begins a text with one token and ends it with another."""

import math

import pytest
import tokenizers
from tokenizers import processors

from modicum.corpus import Document
from modicum.evaluate import bits_per_byte
from modicum.evaluate.choice import plain_choice
from modicum.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def two(tokenizer, tmp_path_factory):
    """The tests' tokenizer with the tool markers 4 and 5 as beginning and end of a text."""
    folder = tmp_path_factory.mktemp("two")
    tokenizer.save(folder)
    names = '{"bos_token": "<tool_call>", "eos_token": {"content": "</tool_call>"}, "pad_token": "<|pad|>"}'
    (folder / "tokenizer_config.json").write_text(names)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(single="<tool_call> $A", special_tokens=[("<tool_call>", 4)])
    backend.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder, missing="keep")


def test_a_document_is_scored_from_its_start_to_its_end(model, reference, two):
    document = Document("d", "A short one.", "source", "a", None)
    found = bits_per_byte(model, two, [document]).total
    logprobs = reference([4, *two.encode(document.text), 5])
    assert found.bits == pytest.approx(-sum(logprobs) / math.log(2), rel=1e-5)
    assert found.tokens == len(two.encode(document.text)) + 1


def test_a_question_in_plain_text_stands_after_the_token_that_begins_a_text(two):
    scored = plain_choice(two, "What?", "that")
    assert scored.ids == [4, *two.encode("Question: What?\nAnswer: that")]
    assert scored.start == 1 + len(two.encode("Question: What?\nAnswer:"))
