"""What tests of the examples share: a small model, exported, and what it says."""

import sys
from pathlib import Path

import pytest
import torch

from modicum.checkpoint import load_checkpoint, save_checkpoint
from modicum.exchange import export_onnx
from modicum.model import Decoder, ModelConfig
from modicum.tokenizer import train_tokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """A checkpoint of random weights, and the folder that it went out to."""
    place = tmp_path_factory.mktemp("exported")
    texts = ["A model in a page says what it says elsewhere. 1, 2, 3."] * 40
    tokenizer = train_tokenizer(texts, vocab_size=384, min_frequency=2, sample_bytes=10**6, seed=0)[0]
    config = ModelConfig(
        vocab_size=384, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, max_position_embeddings=160, initializer_range=0.3, qk_norm=True,
    )  # fmt: skip
    checkpoint = save_checkpoint(
        place, 1, config=config, weights=Decoder(config).state_dict(), tokenizer=tokenizer, chat=True, training=None
    )
    export_onnx(checkpoint, out=place / "out")
    return load_checkpoint(checkpoint), place / "out"


@pytest.fixture(scope="session")
def goes_on(exported):
    """A function: how the checkpoint's decoder goes on after ids, without a cache, until it ends an answer."""
    checkpoint, _ = exported
    model = checkpoint.model()

    def goes_on(ids, tokens):
        found = []
        with torch.no_grad():
            while len(found) < tokens:
                best = int(model(torch.tensor([[*ids, *found]]))[0, -1].argmax())
                if best in checkpoint.stop_ids:
                    break
                found.append(best)
        return found

    return goes_on
