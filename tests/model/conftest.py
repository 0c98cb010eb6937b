"""A tiny decoder whose every number matters: few heads, few layers, weights large enough that a fault shows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from modicum.model import Decoder, ModelConfig


@pytest.fixture
def tiny() -> Callable[..., ModelConfig]:
    def build(**changes: Any) -> ModelConfig:
        sizes = {"vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
        return ModelConfig(
            **{**sizes, "num_key_value_heads": 2, "intermediate_size": 80, "max_position_embeddings": 512, **changes}
        )

    return build


@pytest.fixture
def lively() -> Callable[..., Decoder]:
    """A decoder in which biases, gains and weights are all far from their initial values."""

    def build(config: ModelConfig, seed: int = 1) -> Decoder:
        model = Decoder(config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                noise = torch.randn(weight.shape, generator=generator)
                weight.copy_(1 + 0.3 * noise if weight.dim() == 1 else noise * 0.9 / weight.shape[1] ** 0.5)
        return model.eval()

    return build


@pytest.fixture
def some_ids() -> Callable[..., torch.Tensor]:
    def draw(batch: int, length: int, vocab: int = 96, seed: int = 2) -> torch.Tensor:
        return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))

    return draw
