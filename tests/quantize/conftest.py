import json

import pytest
import torch

from modicum.checkpoint import save_checkpoint
from modicum.model import Decoder, ModelConfig
from modicum.tokenizer import train_tokenizer

TEXT = "A rounded weight says nearly what it said before; where it does not, it is given more bits. 1, 2, 3, 5, 8.\n"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([TEXT] * 40, vocab_size=320, min_frequency=2, sample_bytes=10**6, seed=0)[0]


@pytest.fixture(scope="module")
def checkpoint(tokenizer, tmp_path_factory):
    """A tiny decoder that has learned TEXT, so that its answers are worth keeping."""
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=96,
        max_position_embeddings=96,
    )
    model = Decoder(config)
    ids = torch.tensor([[tokenizer.bos_id, *tokenizer.encode(TEXT * 2)][:80]])
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(80):
        loss = torch.nn.functional.cross_entropy(model(ids)[0, :-1], ids[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    root = tmp_path_factory.mktemp("checkpoints")
    given = {"config": config, "weights": model.state_dict(), "tokenizer": tokenizer, "chat": False}
    return save_checkpoint(root, 80, **given, training=None, trained=True)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return _written(tmp_path_factory, range(0, 96, 2))


@pytest.fixture(scope="module")
def heldout(tmp_path_factory):
    """Pieces that begin elsewhere than those of `text`."""
    return _written(tmp_path_factory, range(1, 97, 2))


def _written(tmp_path_factory, shifts):
    file = tmp_path_factory.mktemp("text") / "text.jsonl"
    file.write_text("\n".join(json.dumps({"text": TEXT[shift:] + TEXT}) for shift in shifts))
    return file
