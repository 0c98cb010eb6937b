import sys
from pathlib import Path

import gguf_models
import numpy as np
import pytest

from modicum.exchange import export_gguf, gguf_runtime
from modicum.exchange.children import limit_seconds
from modicum.exchange.gguf_runtime import ask, timed
from modicum.exchange.gguf_weights import file_tensors
from modicum.exchange.gguf_writing import file_metadata, write_gguf
from modicum.model import Decoder
from modicum.model.reference import reference_logits
from modicum.store import UserError


@pytest.fixture(scope="module")
def model(tokenizer, tmp_path_factory):
    """A file, its weights, and its config."""
    file = tmp_path_factory.mktemp("runtime") / "model.gguf"
    config = gguf_models.config(rope_scaling=gguf_models.YARN, num_key_value_heads=2)
    weights = Decoder(config).state_dict()
    write_gguf(file, config, file_metadata(config, tokenizer, "f32"), file_tensors(weights, config, "f32"))
    return file, weights, config


def test_its_logits_are_the_float64_references(model, ids):
    file, weights, config = model
    prompts = [ids(length, seed=length) for length in (1, 2, 5, 64)]
    for prompt, found in zip(prompts, ask(file, prompts=prompts).logits, strict=True):
        wanted = reference_logits(weights, config, prompt[None])[0]
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-3)


def test_going_on_from_its_cache_is_what_a_whole_prompt_says(model, ids):
    file, *_ = model
    greedy = ask(file, begun=[ids(5)], steps=20).greedy[0]
    logits = ask(file, prompts=[[*ids(5), *greedy]]).logits[0]
    assert list(logits.argmax(-1)[4:-1]) == greedy


def test_text_never_becomes_a_control_token(model, tokenizer):
    file, *_ = model
    texts = ["<|im_end|>", "a<|endoftext|>b", "<tool_call>", " <|pad|> "]
    assert ask(file, texts=texts).ids == [tokenizer.encode(text) for text in texts]


def test_a_crash_is_told_and_ends_only_the_child(model, tmp_path, monkeypatch):
    (tmp_path / "child.py").write_text("import os, sys\nprint('GGML_ASSERT(x) failed', file=sys.stderr)\nos.abort()\n")
    monkeypatch.setattr(gguf_runtime.gguf_child, "__file__", str(tmp_path / "child.py"))
    with pytest.raises(UserError, match=r"model\.gguf: llama\.cpp crashed on it \(SIGABRT\)\n  GGML_ASSERT\(x\) f"):
        ask(model[0])


def test_a_file_that_takes_for_ever_is_refused(model, tmp_path, monkeypatch):
    (tmp_path / "child.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(gguf_runtime.gguf_child, "__file__", str(tmp_path / "child.py"))
    with pytest.raises(UserError, match=r"the name: llama\.cpp did not end within 0\.2 s"):
        ask(model[0], name="the name", limit=0.2)


@pytest.mark.parametrize(("known", "other"), [("[512, 2048, 512]", "[512, 4096, 512]"), ("[-1, 1]", "[-1, 2]")])
def test_another_arrangement_of_its_settings_is_told(known, other, model, tmp_path, monkeypatch):
    text = Path(gguf_runtime.gguf_child.__file__).read_text().replace(known, other)
    (tmp_path / "child.py").write_text(text)
    monkeypatch.setattr(gguf_runtime.gguf_child, "__file__", str(tmp_path / "child.py"))
    with pytest.raises(UserError, match=r"the settings of this llama\.cpp lie in places that are not known here"):
        ask(model[0], prompts=[[1]])


POINTER = "ctypes.POINTER(ctypes.c_int32)"
EMBD, POS = '("embd", ctypes.POINTER(ctypes.c_float)),', f'("pos", {POINTER}),'


@pytest.mark.parametrize(
    ("known", "other"),
    [
        ('("n_tokens", ctypes.c_int32)', '("n_tokens", ctypes.c_int32), ("kind", ctypes.c_uint64)'),
        (f'("token", {POINTER})', f'("first", {POINTER}), ("token", {POINTER})'),
        (f"{EMBD}\n        {POS}", f"{POS}{EMBD}"),
    ],
    ids=["n_tokens", "token", "pos"],
)
def test_another_arrangement_of_its_batches_is_told(known, other, model, tmp_path, monkeypatch):
    text = Path(gguf_runtime.gguf_child.__file__).read_text()
    assert known in text
    (tmp_path / "child.py").write_text(text.replace(known, other))
    monkeypatch.setattr(gguf_runtime.gguf_child, "__file__", str(tmp_path / "child.py"))
    with pytest.raises(UserError, match=r"the batches of this llama\.cpp lie in places that are not known here"):
        ask(model[0], prompts=[[1]])


def test_a_prompt_longer_than_a_batch_is_timed_in_pieces(tokenizer, tmp_path):
    file, config = tmp_path / "model.gguf", gguf_models.config(max_position_embeddings=2200)
    weights = Decoder(config).state_dict()
    write_gguf(file, config, file_metadata(config, tokenizer, "f32"), file_tensors(weights, config, "f32"))
    found = timed(file, [7] * 2100, [7, 8], tokens=2, repeats=1, threads=1)
    assert found["prefill"][0] > 0
    assert len(found["decode"]) == 1


def test_what_a_runtime_may_take_grows_with_its_work():
    small, large = 10**6, 10**10
    assert limit_seconds(small, 0) >= 600
    assert limit_seconds(large, 0) >= large / 100e6  # a slow disk
    assert limit_seconds(large, 4000) >= 4000 * large / 4e9  # memory that is read once a token
    assert limit_seconds(large, 4000) < 10 * 24 * 3600


@pytest.mark.parametrize(("missing", "word"), [("gguf", "needs the gguf package"), ("xllamacpp", "xllamacpp is not")])
def test_what_is_not_installed_is_told_with_the_pip_line(missing, word, tokenizer, tmp_path, monkeypatch):
    folder = gguf_models.save(tokenizer, tmp_path)
    if missing == "gguf":
        monkeypatch.setitem(sys.modules, "gguf", None)
    else:
        monkeypatch.setattr(gguf_runtime, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=rf"{word}.*: pip install 'modicum\[gguf\]'"):
        export_gguf(folder, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
