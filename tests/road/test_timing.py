"""How long stages are said to take, from what a trial measured."""

from types import SimpleNamespace

import pytest

from modicum.road.timing import evaluate_seconds


@pytest.mark.parametrize(("tokens", "scored"), [(4_000, 1_000), (40_000_000, 5_000)])
def test_held_out_answers_take_no_longer_than_as_much_held_out_text(tokens, scored):
    evaluate = SimpleNamespace(heldout_tokens=5_000, items=[], prompts=16, max_new_tokens=0)
    recipe = SimpleNamespace(evaluate=evaluate, sft=SimpleNamespace(heldout_fraction=0.2))
    trial = SimpleNamespace(score_seconds=1e-3, decode_seconds=0.0)

    def seconds(tokens):
        talk = SimpleNamespace(tokens=tokens, conversations=10)
        return evaluate_seconds(recipe, SimpleNamespace(talk=talk, heldout_tokens=0), trial)

    assert seconds(tokens) - seconds(0) == pytest.approx(3 * scored * 1e-3)
