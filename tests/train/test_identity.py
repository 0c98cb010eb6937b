import pytest

from modicum.store import UserError
from modicum.train.state import check_identity

BEFORE = {"recipe": {"betas": [0.9, 0.95], "rate": 1e-3, "sources": [{"name": "a", "weight": 1.0}]}, "tokenizer": "abc"}


def test_an_equal_identity_passes_also_as_tuples():
    check_identity(BEFORE, {**BEFORE, "recipe": {**BEFORE["recipe"], "betas": (0.9, 0.95)}}, "run")


def test_every_changed_field_is_named_with_its_old_and_new_value():
    now = {"recipe": {"betas": [0.9, 0.99], "rate": 1e-3, "sources": [{"name": "a", "weight": 2.0}], "new": None}}
    with pytest.raises(UserError) as error:
        check_identity(BEFORE, now, "runs/x/checkpoints/step-00000010")
    text = str(error.value)
    assert text.startswith("runs/x/checkpoints/step-00000010: ")
    assert "recipe.betas: was [0.9, 0.95], is [0.9, 0.99]" in text
    assert "recipe.sources.0.weight: was 1.0, is 2.0" in text
    assert "tokenizer: was 'abc', is not there" in text
    assert "recipe.new: was not there, is None" in text
    assert "rate" not in text
