"""A recipe that begins with a checkpoint: what may stand beside it, and what is written out."""

import pytest
import yaml

from modicum.recipe import Recipe, identity, load_recipe, resolved_yaml
from modicum.recipe.settings import ModelSettings
from modicum.store import UserError


@pytest.fixture
def write(tmp_path):
    """A function that writes a recipe; keyword arguments are its parts."""
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "start").mkdir()

    def write(**parts):
        corpus = {"sources": [{"name": "a", "path": "text.txt"}]}
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump({"name": "x", "corpus": corpus, **parts}))
        return path

    return write


def test_a_checkpoint_may_stand_alone_or_beside_dropout_and_longer_sequences(write, tmp_path):
    recipe = load_recipe(write(model={"checkpoint": "start"}, pretrain={"sequence_length": 4096, "steps": 0}))
    assert recipe.model.checkpoint == tmp_path / "start"
    assert load_recipe(write(model={"checkpoint": "start", "attention_dropout": 0.1})).model.attention_dropout == 0.1


def test_only_fresh_embeddings_learn_at_a_multiple_of_the_rate_unless_the_recipe_says_so(write):
    def factor(**parts):
        return load_recipe(write(**parts)).pretrain.embedding_learning_rate_factor

    begun = {"checkpoint": "start"}
    assert factor() == 10
    assert factor(model=begun) == factor(model=begun, pretrain={"optimizer": "muon"}) == 1
    assert factor(model=begun, pretrain={"embedding_learning_rate_factor": 3.0}) == 3
    load_recipe(write(model=begun, pretrain={"optimizer": "adamw"}))


def test_what_is_muons_alone_says_nothing_of_a_run_by_adamw(write):
    by_muon, by_adamw = (identity(load_recipe(write(pretrain={"optimizer": o})).pretrain) for o in ("muon", "adamw"))
    assert by_muon["embedding_learning_rate_factor"] == 10
    assert "embedding_learning_rate_factor" not in by_adamw


def test_the_resolved_recipe_loads_again_as_the_same_one(write, tmp_path):
    for model in ({"checkpoint": "start"}, {"checkpoint": "start", "attention_dropout": 0.1}):
        recipe = load_recipe(write(model=model))
        (tmp_path / "resolved.yaml").write_text(resolved_yaml(recipe))
        again = load_recipe(tmp_path / "resolved.yaml")
        assert again == recipe
        assert again.model.model_fields_set == recipe.model.model_fields_set
    assert again.tokenizer == recipe.tokenizer


@pytest.mark.parametrize(
    ("parts", "fault"),
    [
        (
            {"model": {"checkpoint": "start", "preset": "nano", "hidden_size": 64}},
            "model: hidden_size, preset: the shape",
        ),
        (
            {"model": {"checkpoint": "start", "vocab_size": 64}},
            "model: vocab_size: the shape is that of the checkpoint",
        ),
        ({"model": {"checkpoint": "nowhere"}}, "model.checkpoint: no such file or folder"),
        (
            {"model": {"checkpoint": "start"}, "tokenizer": {"vocab_size": 512}},
            "tokenizer.vocab_size: the tokenizer is",
        ),
        ({"model": {"checkpoint": "start"}, "tokenizer": {"path": "text.txt"}}, "tokenizer.path: the tokenizer is"),
        ({"pretrain": {"steps": 0}}, "pretrain.steps: 0 updates teach a fresh model nothing"),
        ({"pretrain": {"steps": -1}}, "pretrain.steps: input should be greater than or equal to 0"),
    ],
)
def test_what_cannot_stand_beside_it_is_refused_by_name(write, parts, fault):
    with pytest.raises(UserError, match=fault):
        load_recipe(write(**parts))


def test_nothing_of_it_stands_in_the_identity_of_other_models():
    """The hash of this is in every run's manifest."""
    assert "checkpoint" not in identity(ModelSettings())
    assert set(identity(ModelSettings())) == set(ModelSettings.model_fields) - {"checkpoint"}
    assert Recipe.model_fields["model"].default == ModelSettings()
