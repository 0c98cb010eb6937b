import json
import os
import subprocess
import sys

import pytest
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from modicum.store import UserError
from modicum.tokenizer import PRETOKENIZER_PATTERN, SPECIAL_TOKENS, train_tokenizer

SMALL = {"vocab_size": 400, "min_frequency": 2, "sample_bytes": 10**6, "seed": 0}


def test_special_tokens_stand_first_in_their_order(tokenizer):
    assert [tokenizer.decode([i]) for i in range(24)] == list(SPECIAL_TOKENS)
    assert SPECIAL_TOKENS[:8] == (
        "<|endoftext|>",
        "<|pad|>",
        "<|im_start|>",
        "<|im_end|>",
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
    )
    assert SPECIAL_TOKENS[8:] == tuple(f"<|reserved_{n}|>" for n in range(16))
    assert (
        tokenizer.eot_id,
        tokenizer.pad_id,
        tokenizer.encode_with_control("<|im_start|>")[0],
        tokenizer.end_of_turn_id,
    ) == (0, 1, 2, 3)
    assert tokenizer.special_ids == set(range(24))


@pytest.mark.parametrize(("asked", "size"), [(320, 320), (321, 384), (400, 448), (1000, 1024)])
def test_the_vocabulary_is_rounded_up_to_a_multiple_of_64_and_every_row_has_a_token(texts, asked, size):
    tokenizer, report = train_tokenizer(texts[:50], **{**SMALL, "vocab_size": asked})
    assert tokenizer.vocab_size == size
    assert report.learned_tokens == size - 24 - 256
    assert report.filler_tokens == 0
    assert len({tokenizer.id_bytes(i) for i in range(24, size)}) == size - 24
    assert all(tokenizer.id_bytes(i) for i in range(size))


def test_too_little_text_fills_the_rows_with_reserved_tokens_and_says_so():
    tokenizer, report = train_tokenizer(["ab ab ab cd cd"], **SMALL)
    assert tokenizer.vocab_size == 448
    assert 0 < report.learned_tokens < 6
    assert report.filler_tokens == 448 - 24 - 256 - report.learned_tokens
    assert f"{report.filler_tokens} reserved tokens fill the vocabulary" in str(report)
    assert tokenizer.decode([447]) == f"<|reserved_{15 + report.filler_tokens}|>"
    assert 447 in tokenizer.special_ids
    assert tokenizer.decode(tokenizer.encode("<|reserved_20|>")) == "<|reserved_20|>"


def test_the_pattern_is_qwen2s_to_the_byte(folder):
    definition = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    split = definition["pre_tokenizer"]["pretokenizers"][0]
    assert split["pattern"]["Regex"] == PRETOKENIZER_PATTERN == PRETOKENIZE_REGEX
    assert split["behavior"] == "Isolated"
    assert definition["normalizer"] is None
    assert definition["post_processor"] is None


def test_common_words_become_one_token_and_text_gets_shorter(tokenizer, texts):
    assert len(tokenizer.encode(" the")) == 1
    held_out = texts[0]
    assert len(tokenizer.encode(held_out)) < 0.6 * len(held_out.encode())


def test_min_frequency_keeps_rare_pairs_out():
    tokenizer, _ = train_tokenizer(["zq zq zq wx wx"], **{**SMALL, "min_frequency": 3})
    assert len(tokenizer.encode("zq")) == 1
    assert len(tokenizer.encode("wx")) == 2


TRAIN_AND_PRINT = """
import sys, hashlib, pathlib
from modicum.tokenizer import train_tokenizer
text = pathlib.Path(sys.argv[1]).read_text("utf-8")
tokenizer, _ = train_tokenizer(text.split("\\x00"), vocab_size=1000, min_frequency=2, sample_bytes=300_000, seed=7)
tokenizer.save(pathlib.Path(sys.argv[2]))
"""


def test_the_same_texts_give_the_same_bytes_in_every_process_and_with_any_number_of_threads(texts, tmp_path):
    """Hashes of Python and of the library's maps are seeded anew in each process."""
    (tmp_path / "texts").write_text("\x00".join(texts), "utf-8")
    for threads in ("1", "2", "3"):
        subprocess.run(
            [sys.executable, "-c", TRAIN_AND_PRINT, tmp_path / "texts", tmp_path / threads],
            env={**os.environ, "RAYON_NUM_THREADS": threads},
            check=True,
        )
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert len({(tmp_path / threads / name).read_bytes() for threads in ("1", "2", "3")}) == 1


def test_another_seed_samples_other_texts(texts):
    arguments = {**SMALL, "sample_bytes": 50_000}
    one, two = (train_tokenizer(texts, **{**arguments, "seed": seed})[0] for seed in (0, 1))
    assert one.hash != two.hash


@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_no_text_is_the_users_to_mend(texts):
    with pytest.raises(UserError, match="no text to train a tokenizer on"):
        train_tokenizer(texts, **SMALL)


def test_a_vocabulary_without_room_for_the_bytes_is_refused():
    with pytest.raises(UserError, match="vocab_size 256: too small for 24 special tokens and 256 bytes; at least 257"):
        train_tokenizer(["text"], **{**SMALL, "vocab_size": 256})
    assert train_tokenizer(["text"], **{**SMALL, "vocab_size": 257})[0].vocab_size == 320
