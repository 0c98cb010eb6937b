"""Faults that conversions have, planted one by one: each is refused with its name, and nothing is written."""

from dataclasses import replace

import gguf
import gguf_models
import numpy as np
import pytest

from modicum.evaluate.beside import Judged
from modicum.evaluate.divergence import Quality
from modicum.exchange import (
    Limits,
    export_gguf,
    gguf_exporting,
    gguf_gate,
    gguf_metadata,
    gguf_vocabulary,
    gguf_weights,
)
from modicum.store import UserError
from modicum.tokenizer import train_tokenizer

pytestmark = pytest.mark.usefixtures("brief_gate")


@pytest.fixture
def refused(tokenizer, tmp_path):
    """A function that exports a checkpoint and returns the refusal; keyword arguments go into its config."""

    def refused(*, quant="f32", limits=None, **changes):
        folder = gguf_models.save(tokenizer, tmp_path, **changes)
        with pytest.raises(UserError) as told:
            export_gguf(folder, quant=quant, out=tmp_path / "out", limits=limits)
        assert not (tmp_path / "out").exists()
        assert not list(tmp_path.glob(".tmp-*"))
        assert f"out/model-{quant}.gguf" in str(told.value)
        return str(told.value)

    return refused


@pytest.fixture
def written_with(monkeypatch):
    """A function that plants a fault between what is to be written and the file."""

    def written_with(change):
        make = gguf_exporting.file_tensors
        monkeypatch.setattr(gguf_exporting, "file_tensors", lambda *given: change(list(make(*given))))

    return written_with


@pytest.fixture
def said_with(monkeypatch):
    """A function that changes keys of the file; `everywhere` also of what the gate holds it against."""

    def said_with(everywhere=False, **keys):
        make = gguf_exporting.file_metadata

        def changed(*given):
            metadata = make(*given)
            return metadata | {f"tokenizer.ggml.{key}": change(metadata) for key, change in keys.items()}

        monkeypatch.setattr(gguf_exporting, "file_metadata", changed)
        if everywhere:
            monkeypatch.setattr(gguf_gate, "file_metadata", changed)

    return said_with


def test_rotary_rows_that_were_not_permuted(refused, monkeypatch):
    # for writer and gate alike: the bytes agree, and the logits tell
    monkeypatch.setattr(gguf_weights, "relaid", lambda weights, **_: dict(weights))
    told = refused()
    assert "a prompt of 40 tokens: logits differ by" in told
    assert "as if the rows of queries and keys were not put into the interleaved layout" in told


def test_rotary_rows_that_were_not_permuted_on_their_way_into_the_file(refused, monkeypatch):
    make = gguf_exporting.file_tensors

    def unmoved(*given):
        with monkeypatch.context() as patch:
            patch.setattr(gguf_weights, "relaid", lambda weights, **_: dict(weights))
            yield from make(*given)

    monkeypatch.setattr(gguf_exporting, "file_tensors", unmoved)
    told = refused(attention_bias=True)
    for name in ("attn_q.weight", "attn_k.weight", "attn_q.bias"):
        assert f"blk.1.{name}: its rows are not in the interleaved rotary layout" in told
    assert "attn_v" not in told


def test_a_head_that_was_untied_silently(refused, written_with):
    def untied(tensors):
        table = next(tensor for tensor in tensors if tensor.name == "token_embd.weight")
        return [*tensors, replace(table, name="output.weight")]

    written_with(untied)
    assert "output.weight: left over (the head is tied: it is the embedding)" in refused()


def test_a_head_that_was_lost(refused, written_with):
    written_with(lambda tensors: [tensor for tensor in tensors if tensor.name != "output.weight"])
    told = refused(tie_word_embeddings=False)
    assert "output.weight: missing (llama.cpp would take the embedding for it)" in told


def _swapped(name):
    return name.replace("blk.0.", "blk.x.").replace("blk.1.", "blk.0.").replace("blk.x.", "blk.1.")


def test_a_layer_that_changed_places(refused, written_with):
    written_with(lambda tensors: [replace(tensor, name=_swapped(tensor.name)) for tensor in tensors])
    assert "blk.0.attn_q.weight: holds the numbers of blk.1.attn_q.weight" in refused()


def test_a_layer_that_changed_places_for_writer_and_gate_alike(refused, monkeypatch):
    names = gguf_weights.foreign_names
    monkeypatch.setattr(
        gguf_weights, "foreign_names", lambda *given: {_swapped(name): ours for name, ours in names(*given).items()}
    )
    assert "as if layers 0 and 1 had changed places" in refused()


def test_another_end_of_text(refused, said_with):
    said_with(eos_token_id=lambda _: 5)
    assert "tokenizer.ggml.eos_token_id: the file says 5, the checkpoint 0" in refused()


def test_another_end_of_text_for_writer_and_gate_alike(refused, said_with):
    said_with(everywhere=True, eos_token_id=lambda _: 5)
    assert "eos: llama.cpp has 5, the checkpoint 0" in refused()


def test_another_pre_tokenizer(refused, said_with):
    said_with(pre=lambda _: "gpt-2")
    assert "tokenizer.ggml.pre: the file says 'gpt-2', the checkpoint 'qwen2'" in refused()


def test_a_pre_tokenizer_by_the_wrong_name(tmp_path, monkeypatch):
    for place in (gguf_vocabulary, gguf_gate):
        monkeypatch.setattr(place, "pre_tokenizer_name", lambda _: "gpt-2")
    # joins a parenthesis with the word behind it, which GPT-2's pattern cuts apart
    joining = train_tokenizer(["a(open a(open"] * 40, vocab_size=384, min_frequency=2, sample_bytes=10**6, seed=0)[0]
    folder = gguf_models.save(joining, tmp_path)
    with pytest.raises(UserError) as refusal:
        export_gguf(folder, out=tmp_path / "out")
    told = str(refusal.value)
    assert "llama.cpp gives other ids to" in told
    assert "Its pre-tokenizer is 'gpt-2'" in told


def test_a_vocabulary_one_short(refused, said_with):
    said_with(tokens=lambda metadata: metadata["tokenizer.ggml.tokens"][:-1])
    assert "tokenizer.ggml.tokens: the file says 383 of which number 383 is none, the checkpoint 384" in refused()


def test_a_vocabulary_one_short_for_writer_and_gate_alike(refused, said_with):
    said_with(
        everywhere=True,
        tokens=lambda metadata: metadata["tokenizer.ggml.tokens"][:-1],
        token_type=lambda metadata: metadata["tokenizer.ggml.token_type"][:-1],
    )
    assert "tokenizer.ggml.tokens: the file has 383, the checkpoint's vocabulary 384" in refused()


def test_one_bit_of_one_scale(refused, monkeypatch):
    write = gguf_exporting.write_gguf

    def damaged(path, config, metadata, tensors):
        others = write(path, config, metadata, tensors)
        place = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.ffn_up.weight").data_offset
        data = bytearray(path.read_bytes())
        data[int(place) + 34 * 17] ^= 1  # the low byte of the scale of block 17
        path.write_bytes(data)
        return others

    monkeypatch.setattr(gguf_exporting, "write_gguf", damaged)
    told = refused(quant="q8_0", limits=Limits(10, 10, 0))
    assert told.endswith("blk.1.ffn_up.weight: differs in 1 of 192 blocks; in block 17 the scale differs")


def test_a_scaling_that_was_lost(refused, monkeypatch):
    monkeypatch.setattr(gguf_metadata, "_scaling", lambda _: {})
    told = refused(rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert "as if the rotary scaling were missing" in told


def test_another_first_choice_where_it_is_clear(refused, monkeypatch):
    # both measures pass, and the argmax of one position alone is another
    quality = Quality(100, 0.0, 0.0, 1.0, 90, 1)
    monkeypatch.setattr(gguf_gate, "judged", lambda *_, **__: Judged(6, "texts", quality, 1.0, 1.0))
    assert "another first choice at 1 of 90 clear positions" in refused()


def test_a_continuation_that_goes_another_way_where_it_is_clear(tokenizer, tmp_path, monkeypatch):
    ask = gguf_gate.ask

    def straying(*given, **named):
        answer = ask(*given, **named)
        return replace(answer, greedy=[[(ids[0] + 1) % 384, *ids[1:]] for ids in answer.greedy])

    monkeypatch.setattr(gguf_gate, "ask", straying)
    with pytest.raises(UserError, match="a continuation parts at step 0, by"):
        export_gguf(gguf_models.save(tokenizer, tmp_path), out=tmp_path / "out")


def test_an_answer_that_would_not_end(tokenizer, tmp_path, monkeypatch):
    folder = gguf_models.save(tokenizer, tmp_path)
    ask = gguf_gate.ask
    monkeypatch.setattr(gguf_gate, "ask", lambda *given, **named: replace(ask(*given, **named), ends=[0]))
    with pytest.raises(UserError, match="an answer would not end at 3, where the checkpoint ends one"):
        export_gguf(folder, out=tmp_path / "out")


def test_a_long_prompt_of_which_nothing_is_said_with_rounded_weights(refused, monkeypatch):
    limits = Limits(0.1, 1.0, 0.8)
    ask = gguf_gate.ask

    def silent(*given, **named):
        answer = ask(*given, **named)
        long = next(number for number, logits in enumerate(answer.logits) if len(logits) == 64)
        said = [np.zeros_like(logits) if number == long else logits for number, logits in enumerate(answer.logits)]
        return replace(answer, logits=said)

    monkeypatch.setattr(gguf_gate, "ask", silent)
    told = refused(quant="q8_0", limits=limits)
    assert "on prompts of random tokens: mean KL divergence" in told
    assert "\n  mean KL" not in told  # the model's own texts are within these limits


def test_logits_that_are_no_numbers(refused, monkeypatch):
    ask = gguf_gate.ask

    def broken(*given, **named):
        answer = ask(*given, **named)
        return replace(answer, logits=[np.full_like(logits, np.nan) for logits in answer.logits])

    monkeypatch.setattr(gguf_gate, "ask", broken)
    told = refused()
    assert "logits differ by nan" in told
    assert "mean KL divergence nan" in told
