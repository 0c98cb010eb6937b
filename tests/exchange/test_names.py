import foreign_models
import pytest

from modicum.exchange.names import foreign_names, weight_shapes
from modicum.model import Decoder, ModelConfig

SIZES = {
    "vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 11, "num_attention_heads": 4, "intermediate_size": 80,
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 2, "tie_word_embeddings": False},
        {"attention_bias": True},
        {"mlp_bias": True, "head_dim": 6},
        {"qk_norm": True, "head_dim": 16, "attention_bias": True},
    ],
)
def test_names_and_shapes_are_those_of_the_decoder(changes):
    config = ModelConfig(**SIZES, **changes)
    wanted = {name: tuple(value.shape) for name, value in Decoder(config).state_dict().items()}
    assert weight_shapes(config) == wanted
    assert foreign_names("hf", config) == {name: name for name in wanted}


@pytest.mark.parametrize("dialect", foreign_models.DIALECTS)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_a_dialects_names_are_those_of_its_own_checkpoints(dialect, tied, bias):
    theirs = foreign_models.state(dialect, 96, tied=tied, bias=bias)
    config = ModelConfig(
        vocab_size=96,
        hidden_size=foreign_models.HIDDEN,
        num_hidden_layers=foreign_models.LAYERS,
        num_attention_heads=foreign_models.HEADS,
        num_key_value_heads=foreign_models.KEYS[dialect],
        intermediate_size=foreign_models.INNER,
        attention_bias=bias,
        mlp_bias=bias,
        tie_word_embeddings=tied,
    )
    names = foreign_names(dialect, config)
    assert names.keys() == theirs.keys()
    assert {ours: tuple(theirs[name].shape) for name, ours in names.items()} == weight_shapes(config)
