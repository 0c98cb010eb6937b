"""A real tokenizer and small models; what is measured is checked against the float64 reference, not against torch."""

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest

from modicum.model import Decoder, ModelConfig
from modicum.model.reference import reference_logits
from modicum.tokenizer import Tokenizer, train_tokenizer

INSTRUCT = Path(__file__).parents[2] / "data" / "small" / "instruct.jsonl.gz"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    with gzip.open(INSTRUCT, "rt", encoding="utf-8") as file:
        texts = [m["content"] for _ in range(400) for m in json.loads(next(file))["messages"]]
    return train_tokenizer(texts, vocab_size=512, min_frequency=2, sample_bytes=200_000, seed=0)[0]


@pytest.fixture(scope="session")
def model(tokenizer: Tokenizer) -> Decoder:
    """Two layers, random weights, a context of 64."""
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    decoder = Decoder(config)
    decoder.init_weights(1)
    return decoder


@pytest.fixture(scope="session")
def reference(model: Decoder):
    """Natural log-probabilities of ids[1:] given all before, in NumPy and float64."""
    state = {name: weight.detach().numpy() for name, weight in model.state_dict().items()}

    def logprobs(ids: list[int]) -> list[float]:
        logits = reference_logits(state, model.config, np.array([ids[:-1]]))[0]
        peak = logits.max(-1, keepdims=True)
        normal = logits - peak - np.log(np.exp(logits - peak).sum(-1, keepdims=True))
        assert math.isclose(np.exp(normal[0]).sum(), 1, rel_tol=1e-12)
        return [float(row[target]) for row, target in zip(normal, ids[1:], strict=True)]

    return logprobs
