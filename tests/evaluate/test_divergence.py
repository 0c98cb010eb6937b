import numpy as np
import pytest
import torch

from modicum.evaluate.divergence import Limits, quality
from modicum.store import UserError


def test_the_measures_are_those_of_torch():
    draw = np.random.default_rng(0)
    full = [draw.normal(size=(length, 50)).astype(np.float32) * 3 for length in (4, 1, 9)]
    found = [logits + draw.normal(size=logits.shape).astype(np.float32) for logits in full]
    measured = quality(full, found)
    truth, other = (torch.from_numpy(np.concatenate(part)).double().log_softmax(-1) for part in (full, found))
    divergence = torch.nn.functional.kl_div(other, truth, log_target=True, reduction="none").sum(-1)
    assert measured.positions == 14
    assert measured.mean_kl == pytest.approx(float(divergence.mean()), rel=1e-9)
    assert measured.tail_kl == pytest.approx(float(divergence.quantile(0.99)), rel=1e-9)
    assert measured.agreement == pytest.approx(float((truth.argmax(-1) == other.argmax(-1)).double().mean()))


@pytest.mark.parametrize("margin", [0.01, 0.5])
def test_a_first_choice_counts_where_it_is_ahead_by_more_than_the_margin(margin):
    draw = np.random.default_rng(3)
    full = draw.normal(size=(200, 30)).astype(np.float32)
    found = full + 0.3 * draw.normal(size=full.shape).astype(np.float32)
    ordered = np.sort(full, axis=-1)
    clear = ordered[:, -1] - ordered[:, -2] > margin
    differing = clear & (full.argmax(-1) != found.argmax(-1))
    measured = quality([full], [found], clear=margin)
    assert (measured.clear, measured.clear_differing) == (clear.sum(), differing.sum())
    assert 0 < measured.clear_differing < measured.clear < 200
    assert measured.undecided == pytest.approx(1 - clear.mean())
    assert measured.other_choices()[0] == f"another first choice at {differing.sum()} of {clear.sum()} clear positions"
    assert not any("another first choice" in line for line in quality([full], [full]).other_choices())


@pytest.mark.parametrize(("even", "refused"), [(0, False), (2, False), (6, False), (7, True), (100, True)])
def test_where_too_few_first_choices_are_clear_they_decide_nothing(even, refused):
    logits = np.zeros((100, 4))
    logits[even:, 1] = 1
    told = quality([logits], [logits]).other_choices()
    assert bool(told) == refused
    assert all(f"at {even} of 100 positions" in line for line in told)


def test_where_logits_are_held_to_a_difference_ten_times_it_is_clear_and_never_more_than_usual():
    assert Limits(1, 1, 0, logit=1e-4).clear == pytest.approx(1e-3)
    assert Limits(1, 1, 0).clear == 0.01
    assert [Limits(1, 1, 0).with_bounds(max_difference=most).clear for most in (1e-3, 0.1, 1.0)] == [0.01] * 3


def test_what_is_named_stands_in_the_place_of_a_limit_and_nothing_else():
    usual = Limits(1e-3, 1e-2, 0.98, logit=1e-4)
    assert usual.with_bounds() == usual
    assert usual.with_bounds(max_kl=0.5) == Limits(0.5, 5, 0.98, logit=1e-4)
    assert usual.with_bounds(min_agreement=0.0, max_difference=0.01) == Limits(1e-3, 1e-2, 0.0, logit=0.01)


@pytest.mark.parametrize("name", ["max_kl", "min_agreement", "max_difference"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_limit_that_is_none_is_refused_by_its_option(name, value):
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')} "):
        Limits(1, 1, 0).with_bounds(**{name: value})


def test_a_distribution_does_not_depart_from_itself_whatever_is_added_to_it():
    logits = np.random.default_rng(1).normal(size=(3, 20)).astype(np.float32)
    measured = quality([logits], [logits + 7])
    assert measured.mean_kl == pytest.approx(0, abs=1e-12)
    assert measured.agreement == 1


@pytest.mark.parametrize(
    ("limits", "word"),
    [(Limits(1e-3, 9, 0), "mean KL"), (Limits(9, 1e-3, 0), "99th percentile"), (Limits(9, 9, 0.999), "top-1")],
)
def test_each_limit_refuses_by_its_name(limits, word):
    draw = np.random.default_rng(2)
    full = draw.normal(size=(200, 30)).astype(np.float32)
    faults = quality([full], [full + draw.normal(size=full.shape).astype(np.float32) / 5]).faults(limits)
    assert len(faults) == 1
    assert word in faults[0]
    assert quality([full], [full]).faults(limits) == []
