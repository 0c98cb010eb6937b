import pytest

from modicum.recipe import PRESETS, ModelSettings


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_valid_model_with_heads_of_64(name):
    model = ModelSettings(preset=name)
    assert model.hidden_size // model.num_attention_heads == 64
    assert model.vocab_size % 64 == 0


@pytest.mark.parametrize("name", sorted(set(PRESETS) - {"nano", "cyberslm"}))
def test_the_rows_of_every_other_preset_divide_by_256(name):
    model = ModelSettings(preset=name)
    assert model.hidden_size % 256 == 0
    assert model.intermediate_size % 256 == 0


def test_what_the_recipe_sets_wins_over_the_preset():
    assert ModelSettings(preset="micro", hidden_size=512).hidden_size == 512
    assert ModelSettings(preset="micro", ffn_dim_multiplier=1.5).intermediate_size is None
