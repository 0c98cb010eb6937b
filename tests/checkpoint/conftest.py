import pytest
import torch

from modicum.checkpoint import TrainingState, save_checkpoint
from modicum.model import Decoder, ModelConfig
from modicum.tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    texts = ["A small model is saved whole, or it is not saved at all. 1, 2, 3."] * 40
    return train_tokenizer(texts, vocab_size=384, min_frequency=2, sample_bytes=10**6, seed=0)[0]


@pytest.fixture
def small(tokenizer):
    """A function that makes a tiny decoder; keyword arguments go into its config."""

    def small(seed=0, **changes):
        sizes = {
            "vocab_size": tokenizer.vocab_size,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 64,
            "max_position_embeddings": 64,
        }
        model = Decoder(ModelConfig(**{**sizes, **changes}))
        model.init_weights(seed)
        return model.eval()

    return small


@pytest.fixture
def save(tokenizer, small, tmp_path):
    """A function that saves a tiny decoder as a step below tmp_path."""

    def save(step=10, model=None, chat=False, training=None, root=tmp_path):
        model = model or small()
        if training is None:
            training = TrainingState({"moment": torch.full((3,), float(step))}, {"step": step})
        return save_checkpoint(
            root,
            step,
            config=model.config,
            weights=model.state_dict(),
            tokenizer=tokenizer,
            chat=chat,
            training=training,
        )

    return save
