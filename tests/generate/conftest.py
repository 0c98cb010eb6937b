"""A real tokenizer, a small model with random weights, and models that say exactly what a test needs."""

import gzip
import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from generate_models import CONTEXT, build_model

from modicum.generate import Generator
from modicum.model import Decoder
from modicum.tokenizer import Tokenizer, train_tokenizer

INSTRUCT = Path(__file__).parents[2] / "data" / "small" / "instruct.jsonl.gz"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    with gzip.open(INSTRUCT, "rt", encoding="utf-8") as file:
        texts = [m["content"] for _ in range(400) for m in json.loads(next(file))["messages"]]
    return train_tokenizer(texts, vocab_size=512, min_frequency=2, sample_bytes=200_000, seed=0)[0]


@pytest.fixture(scope="session")
def model(tokenizer: Tokenizer) -> Decoder:
    return build_model(tokenizer.vocab_size)


@pytest.fixture(scope="session")
def generator(model: Decoder, tokenizer: Tokenizer) -> Generator:
    return Generator(model, tokenizer, stop_ids=[tokenizer.eot_id, tokenizer.end_of_turn_id])


@pytest.fixture(scope="session")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Of very unequal lengths, from one token to the whole context, and an empty one."""
    random = torch.Generator().manual_seed(0)
    return [
        torch.randint(24, tokenizer.vocab_size, (n,), generator=random).tolist() for n in (1, 40, 5, 64, 17, 63, 0, 30)
    ]


@pytest.fixture(scope="session")
def speaker(tokenizer: Tokenizer) -> Callable[[Sequence[int]], Generator]:
    """A generator whose model says a given chain of different tokens: after each one, the next. Greedy, always."""

    def build(chain: Sequence[int], context: int = CONTEXT) -> Generator:
        assert len(set(chain)) == len(chain), "each token has one successor"
        size = tokenizer.vocab_size
        model = build_model(
            size,
            hidden_size=size,
            num_hidden_layers=1,
            intermediate_size=8,
            tie_word_embeddings=False,
            max_position_embeddings=context,
        )
        with torch.no_grad():
            model.model.layers[0].self_attn.o_proj.weight.zero_()
            model.model.layers[0].mlp.down_proj.weight.zero_()
            model.model.embed_tokens.weight.copy_(torch.eye(size))
            model.lm_head.weight.zero_()
            for token, successor in pairwise(chain):
                model.lm_head.weight[successor, token] = 1.0
        return Generator(model, tokenizer, stop_ids=[tokenizer.eot_id, tokenizer.end_of_turn_id])

    return build
