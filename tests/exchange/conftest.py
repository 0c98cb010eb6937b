"""What tests of this room share: a small tokenizer, and foreign checkpoints with one beside them."""

import io

import foreign_models
import numpy as np
import pytest
import torch
from sentencepiece import SentencePieceTrainer
from transformers import AutoModelForCausalLM

from modicum.exchange import Scope, gguf_exporting, hf_exporting, onnx_exporting
from modicum.tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    texts = ["A model that comes from elsewhere says what it said there. 1, 2, 3."] * 40
    return train_tokenizer(texts, vocab_size=384, min_frequency=2, sample_bytes=10**6, seed=0)[0]


@pytest.fixture(scope="session")
def sentencepiece_model():
    """The bytes of a tokenizer.model as cyberslm has it: BPE with byte fallback, pad 0, unk 1, bos 2, eos 3."""
    texts = [
        "A model that comes from elsewhere says what it said there.",
        "Buffers overflow, keys leak, and logs tell who came first.",
        "An attacker who reads the token may answer 1, 2, 3 or 45 times.",
    ]
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(texts * 3), model_writer=model, vocab_size=384, model_type="bpe", byte_fallback=True,
        pad_id=0, unk_id=1, bos_id=2, eos_id=3, minloglevel=2,
    )  # fmt: skip
    return model.getvalue()


@pytest.fixture
def foreign(tokenizer, sentencepiece_model, tmp_path):
    """A function that writes a dialect's checkpoint; returns its file and its weights."""

    def foreign(dialect, *, vocab=None, content=None, **changes):
        folder = tmp_path / dialect
        if dialect == "cyberslm":
            folder.mkdir()
            (folder / "tokenizer.model").write_bytes(sentencepiece_model)
        else:
            tokenizer.save(folder)
        vocab = vocab or tokenizer.vocab_size
        weights = foreign_models.state(dialect, vocab, **changes)
        shape = {name: value for name, value in changes.items() if name in ("tied", "bias")}
        values = foreign_models.config(dialect, vocab, **shape)
        torch.save(
            content(weights, values) if content else {"model_state": weights, "config": values}, folder / "model.pt"
        )
        return folder / "model.pt", weights

    return foreign


@pytest.fixture
def ids():
    """A function that draws ids (T,)."""

    def ids(length, vocab=384, seed=1):
        return np.random.default_rng(seed).integers(0, vocab, length)

    return ids


@pytest.fixture
def said_by_transformers():
    """A function: the logits (T, V) float32 of a checkpoint folder, as transformers loads it."""

    def said(folder, ids, **options):
        model, told = AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, dtype=torch.float32, **options
        )
        assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        with torch.no_grad():
            return model.eval()(torch.as_tensor(ids)[None]).logits[0].numpy()

    return said


@pytest.fixture
def brief_gate(monkeypatch):
    """The gates with fewer texts and shorter samples; one test each runs them as they are."""
    for target in (gguf_exporting, hf_exporting, onnx_exporting):
        monkeypatch.setattr(target, "SCOPE", Scope(texts=6, tokens=12, strings=200, steps=8))
