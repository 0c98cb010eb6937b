"""Keys of a GGUF file's tokenizer that lie, or that are not there: what llama.cpp makes of them is what is imported."""

import io
import os
import re

import gguf_models
import numpy as np
import pytest
from sentencepiece import SentencePieceTrainer

from modicum.checkpoint import load_checkpoint
from modicum.exchange import import_checkpoint
from modicum.exchange.gguf_file import read_gguf
from modicum.exchange.gguf_runtime import ask
from modicum.exchange.gguf_vocabulary import UNFLAGGED, vocabulary_metadata
from modicum.exchange.gguf_weights import file_tensors
from modicum.exchange.gguf_writing import file_metadata, write_gguf
from modicum.model import Decoder
from modicum.store import UserError
from modicum.tokenizer import sentencepiece_tokenizer, train_tokenizer

ADD_BOS, BOS = "tokenizer.ggml.add_bos_token", "tokenizer.ggml.bos_token_id"
IDS = [f"tokenizer.ggml.{role}_token_id" for role in ("bos", "eos", "eot", "padding", "unknown")]


@pytest.fixture
def written(tokenizer, tmp_path):
    """A function that writes a file with keys changed (None: left out); returns it."""

    def written(spoken=tokenizer, **changes):
        config = gguf_models.config(num_hidden_layers=1)
        metadata = file_metadata(config, spoken, "f32") | changes
        metadata = {key: value for key, value in metadata.items() if value is not None}
        weights = Decoder(config).state_dict()
        write_gguf(tmp_path / "model.gguf", config, metadata, file_tensors(weights, config, "f32"))
        return tmp_path / "model.gguf"

    return written


@pytest.fixture
def imported(written, tmp_path):
    """A function: the checkpoint of such a file."""

    def imported(*given, tokenizer=None, **changes):
        file = written(*given, **changes)
        import_checkpoint(file, dialect="gguf", out=tmp_path / "ours", tokenizer=tokenizer)
        return load_checkpoint(tmp_path / "ours")

    return imported


@pytest.fixture
def refused(imported, tmp_path):
    """A function: the refusal of such a file."""

    def refused(*given, **changes):
        with pytest.raises(UserError) as told:
            imported(*given, **changes)
        assert not (tmp_path / "ours").exists()
        return str(told.value)

    return refused


@pytest.fixture
def pieces(tmp_path):
    """A function: a SentencePiece tokenizer that changes no text, with these special ids."""

    def pieces(**ids):
        model = io.BytesIO()
        SentencePieceTrainer.train(
            sentence_iterator=iter(["a model says what it said there"] * 40), model_writer=model, vocab_size=300,
            model_type="bpe", byte_fallback=True, minloglevel=2, hard_vocab_limit=False,
            normalization_rule_name="identity", remove_extra_whitespaces=False, **ids,
        )  # fmt: skip
        (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
        return sentencepiece_tokenizer(tmp_path / "tokenizer.model")

    return pieces


def _around(checkpoint, text="a model"):
    tokenizer = checkpoint.tokenizer
    before = [tokenizer.bos_id] if tokenizer.roles.opens else []
    return [*before, *tokenizer.encode(text)]


@pytest.mark.parametrize("said", [None, True, False])
@pytest.mark.parametrize("pre", ["qwen2", "gpt-2", "smollm", "llama-bpe"])
def test_what_begins_a_text_is_what_llama_cpp_begins_it_with(pre, said, imported, tmp_path):
    ours = imported(**{"tokenizer.ggml.pre": pre, ADD_BOS: said})
    assert [_around(ours)] == ask(tmp_path / "model.gguf", texts=["a model"]).ids


@pytest.mark.parametrize("said", [None, True, False])
@pytest.mark.parametrize("named", [True, False])
def test_pieces_begin_as_in_llama_cpp_too(named, said, imported, pieces, tmp_path):
    spoken = pieces(unk_id=0, bos_id=1, eos_id=2, pad_id=3)
    ours = imported(spoken, **{ADD_BOS: said, **({} if named else {BOS: None, "tokenizer.ggml.eos_token_id": None})})
    assert [_around(ours)] == ask(tmp_path / "model.gguf", texts=["a model"]).ids
    assert ours.tokenizer.eot_id == 2


def test_a_beginning_that_cannot_be_told_is_refused(refused, pieces):
    spoken = pieces(pad_id=0, unk_id=1, bos_id=2, eos_id=3)
    assert "no tokenizer.ggml.bos_token_id says which" in refused(spoken, **{BOS: None, ADD_BOS: None})


def test_a_beginning_that_bytes_do_not_name_is_refused(refused):
    assert "no tokenizer.ggml.bos_token_id says which" in refused(**{BOS: None, ADD_BOS: True})


@pytest.mark.parametrize("value", [["x"], [1], 7, 0.5, True, "yes"], ids=str)
@pytest.mark.parametrize(
    "key",
    [
        "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type",
        "tokenizer.ggml.merges", ADD_BOS, "tokenizer.ggml.add_eos_token", "tokenizer.chat_template",
        "llama.block_count", "llama.rope.freq_base", "llama.vocab_size", "llama.rope.dimension_count",
        "llama.expert_count", "llama.rope.scaling.type", "llama.rope.scaling.factor", *IDS,
    ],
)  # fmt: skip
def test_a_key_with_any_value_is_read_or_refused(key, value, written, tmp_path):
    file = written(**{key: value})
    fits = [(ADD_BOS, True), ("tokenizer.ggml.add_eos_token", True), ("tokenizer.chat_template", "yes")]
    fits += [("llama.rope.freq_base", 7), ("llama.rope.freq_base", 0.5), *((name, 7) for name in IDS)]
    if any((key, type(value), value) == (name, type(fit), fit) for name, fit in fits):
        import_checkpoint(file, dialect="gguf", out=tmp_path / "ours")
    else:
        with pytest.raises(UserError, match=re.escape(str(file))):
            import_checkpoint(file, dialect="gguf", out=tmp_path / "ours")


def test_an_architecture_that_is_no_text_is_refused(written, tmp_path):
    data = written().read_bytes()
    key = b"general.architecture"
    at = data.index(key) + len(key)
    # instead of text of five letters: a list of one byte, which is as long
    lists = b"\x09\0\0\0" + b"\0\0\0\0" + b"\x01" + bytes(7) + b"\x07"
    (tmp_path / "model.gguf").write_bytes(data[:at] + lists + data[at + 17 :])
    with pytest.raises(UserError, match=re.escape("architecture '[7]' cannot be imported")):
        import_checkpoint(tmp_path / "model.gguf", dialect="gguf", out=tmp_path / "ours")


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("llama.vocab_size", 999_999, "vocab_size: 999999, and the embedding has 384 rows"),
        (ADD_BOS, 1, "add_bos_token: expected true or false, found '1'"),
        ("tokenizer.chat_template", ["x"], "chat_template: expected text"),
        ("tokenizer.ggml.token_type", [77] * 384, "token_type: 77 is no kind of token"),
        ("llama.rope.scaling.attn_factor", "9", "rope.scaling.attn_factor: without a type"),
    ],
)
def test_a_key_that_lies_is_refused_by_its_name(key, value, word, refused):
    assert word in refused(**{key: value})


def test_a_sharpness_that_is_no_number_is_refused(refused):
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 16, "attn_factor": "9"}
    told = refused(**{f"llama.rope.scaling.{key}": value for key, value in scaling.items()})
    assert "rope.scaling of type yarn" in told
    assert "'attn_factor': '9'" in told


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
def test_scores_that_are_no_numbers_are_refused(value, refused, pieces):
    spoken = pieces(unk_id=0, bos_id=1, eos_id=2, pad_id=3)
    assert "scores: holds NaN or infinity" in refused(spoken, **{"tokenizer.ggml.scores": [float(value)] * 384})


@pytest.mark.parametrize("role", ["bos", "eos", "eot", "padding"])
def test_an_id_below_zero_is_refused_by_name(role, written, tmp_path):
    data = written().read_bytes()
    key = f"tokenizer.ggml.{role}_token_id".encode()
    at = data.index(key) + len(key)
    (tmp_path / "model.gguf").write_bytes(data[:at] + b"\x05\0\0\0" + b"\xff" * 4 + data[at + 8 :])  # an int32, -1
    with pytest.raises(UserError, match=f"model.gguf: {role} -1 is no token's id"):
        import_checkpoint(tmp_path / "model.gguf", dialect="gguf", out=tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_what_is_no_regular_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "folder.gguf").mkdir()
    for name in ("pipe.gguf", "folder.gguf", "none.gguf"):
        with pytest.raises(UserError, match=f"{name}: missing, or no regular file"):
            read_gguf(tmp_path / name)


def test_a_tokenizer_of_another_model_is_refused(written, tmp_path):
    other = train_tokenizer(["zebra quilts jump over vexing foxes"] * 40, vocab_size=384, min_frequency=2,
                            sample_bytes=10**6, seed=0)[0]  # fmt: skip
    other.save(tmp_path / "other")
    with pytest.raises(
        UserError, match=r"tokenizer\.json: another tokenizer than .*\n  id \d+: '.+' in the model's"
    ) as told:
        import_checkpoint(written(), dialect="gguf", out=tmp_path / "ours", tokenizer=tmp_path / "other")
    assert re.search(r"\n  and \d+ more$", str(told.value))
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"tokenizer.ggml.eos_token_id": 5}, "a text ends with id 5 by the model's file, 0 here"),
        ({ADD_BOS: True}, "a text begins with id 0 by the model's file, None here"),
        ({"tokenizer.ggml.eot_token_id": 5000}, "an answer would end at 5000, which is no token's id"),
    ],
)
def test_a_tokenizer_that_ends_or_begins_texts_otherwise_is_refused(changes, word, tokenizer, written, tmp_path):
    tokenizer.save(tmp_path / "named")
    with pytest.raises(UserError, match=word):
        import_checkpoint(written(**changes), dialect="gguf", out=tmp_path / "ours", tokenizer=tmp_path / "named")


def test_a_file_keeps_its_ends_beside_a_tokenizer_that_is_named(tokenizer, imported, tmp_path):
    tokenizer.save(tmp_path / "named")
    ours = imported(tokenizer=tmp_path / "named", **{"tokenizer.ggml.pre": "falcon", "tokenizer.ggml.eot_token_id": 7})
    assert 7 in ours.stop_ids


def test_a_chat_that_names_no_end_of_turn_ends_where_it_does_in_llama_cpp(tokenizer, imported, tmp_path):
    ours = imported(**{"tokenizer.ggml.eot_token_id": None, "tokenizer.chat_template": "{{ messages }}"})
    (number,) = tokenizer.special_ids & {tokenizer.definition["model"]["vocab"]["<|im_end|>"]}
    assert number in ours.stop_ids
    assert set(ours.stop_ids) == set(ask(tmp_path / "model.gguf").ends)


def test_a_files_own_sentencepiece_model_may_be_named(imported, pieces, tmp_path):
    spoken = pieces(unk_id=0, bos_id=1, eos_id=2, pad_id=3)
    ours = imported(spoken, tokenizer=tmp_path / "tokenizer.model")
    assert ours.tokenizer.encode("a model") == spoken.encode("a model")


def test_a_list_of_unflagged_tokens_that_is_none_is_refused(refused):
    assert f"{UNFLAGGED}: expected a list of int" in refused(**{UNFLAGGED: ["x"]})


def test_a_file_makes_no_text_of_a_control_token(tokenizer, imported):
    tokens = vocabulary_metadata(tokenizer, 384)["tokenizer.ggml.tokens"]
    named = {"tokenizer.ggml.tokens": [*tokens[:10], "END", *tokens[11:]], UNFLAGGED: [9, 10]}
    ours = imported(**named).tokenizer
    assert {9, 10} <= ours.special_ids
    assert ours.spoken_ids == tokenizer.spoken_ids | {9}
    assert 10 not in ours.encode("the END")
