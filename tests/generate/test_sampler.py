"""The sampler against brute force over the vocabulary, against transformers, and against the law of large numbers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from modicum.generate import sampler
from modicum.generate.sampler import draw, penalize_repetition, probabilities, sample
from modicum.model.native import kernel_fault

# sixteenths: exact in float32 and far enough apart that rounding never changes their order
logit_rows = st.lists(st.integers(-320, 320).map(lambda i: i / 16), min_size=2, max_size=40, unique=True)
zero_or_positive = st.lists(st.sampled_from([0.0, 1e-30, 0.1, 1.0, 3.0]), min_size=1, max_size=20).filter(any)


def brute_force(logits, temperature, top_k, top_p, min_p):
    """The definition, token by token, in Python floats."""
    peak = max(logits)
    weight = {i: math.exp((x - peak) / temperature) for i, x in enumerate(logits)}
    order = sorted(weight, key=lambda i: -logits[i])
    if 0 < top_k < len(order):
        order = order[:top_k]
    mass = sum(weight[i] for i in order)
    kept, so_far = [], 0.0
    for i in order:
        if kept and so_far >= top_p:
            break
        kept.append(i)
        so_far += weight[i] / mass
    kept = [i for i in kept if weight[i] >= min_p * weight[kept[0]]]
    mass = sum(weight[i] for i in kept)
    return [weight[i] / mass if i in kept else 0.0 for i in range(len(logits))]


@settings(deadline=None)
@given(logit_rows, st.floats(0.2, 5), st.integers(0, 50), st.floats(0.01, 1), st.floats(0, 0.9))
def test_probabilities_are_those_of_brute_force(logits, temperature, top_k, top_p, min_p):
    row = torch.tensor([logits])
    ours = probabilities(row, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)[0].tolist()
    # a threshold may fall exactly on a token's mass; then either answer is right: look on both sides of it
    sides = [
        brute_force(logits, temperature, top_k, top_p * (1 + a), min_p * (1 + b))
        for a in (-1e-5, 0, 1e-5)
        for b in (-1e-5, 0, 1e-5)
    ]
    assert any(np.allclose(ours, side, atol=1e-5) for side in sides)


@pytest.mark.parametrize("size", [50, 3000])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 3.0])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(7, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.2), (20, 0.9, 0.05)])
def test_probabilities_agree_with_transformers(size, temperature, top_k, top_p, min_p):
    logits = torch.randn(4, size, generator=torch.Generator().manual_seed(size)) * 3
    steps = [TemperatureLogitsWarper(temperature)]
    steps += [TopKLogitsWarper(top_k)] if top_k else []
    steps += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    steps += [MinPLogitsWarper(min_p)] if min_p else []
    expected = LogitsProcessorList(steps)(None, logits).softmax(-1)
    ours = probabilities(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-4)


def test_flat_and_peaked_distributions_share_a_batch_without_changing_each_other():
    """A row whose mass lies further out is searched among more tokens, in up to three goes; its neighbours are not."""
    noise = torch.rand(1, 5000, generator=torch.Generator().manual_seed(0)) * 1e-3
    falling = torch.arange(5000.0)[None]
    rows = [falling / 10, falling / 1000, noise]
    together = probabilities(torch.cat(rows), top_p=0.9)
    sizes = (together > 0).sum(-1).tolist()
    first, second = sampler._LIKELY_ENOUGH, 4 * sampler._LIKELY_ENOUGH
    assert sizes[0] < first < sizes[1] < second < sizes[2]
    for row, alone in zip(together, rows, strict=True):
        assert torch.equal(row, probabilities(alone, top_p=0.9)[0])
        probs = alone[0].double().softmax(-1)
        kept = int((probs.sort(descending=True).values.cumsum(0) < 0.9).sum()) + 1
        assert (row > 0).sum() == pytest.approx(kept, abs=3)


@given(logit_rows, st.integers(1, 60))
def test_top_k_keeps_exactly_the_k_most_probable(logits, k):
    kept = (probabilities(torch.tensor([logits]), top_k=k, temperature=1e6)[0] > 0).nonzero()[:, 0].tolist()
    assert set(kept) == set(sorted(range(len(logits)), key=lambda i: -logits[i])[:k])


def test_top_k_keeps_k_of_equal_tokens():
    assert (probabilities(torch.zeros(1, 100), top_k=3) > 0).sum() == 3


@pytest.mark.parametrize("top_k", [0, 100, 101, 10**9])
def test_top_k_0_or_above_the_vocabulary_keeps_all(top_k):
    logits = torch.randn(2, 100, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(probabilities(logits, top_k=top_k), logits.softmax(-1))


@pytest.mark.parametrize("size", [100, 2000])
def test_top_p_1_keeps_all_and_0_the_best_alone(size):
    logits = torch.randn(2, size, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(probabilities(logits, top_p=1.0), logits.softmax(-1))
    only = probabilities(logits, top_p=0.0)
    assert torch.equal(only.argmax(-1), logits.argmax(-1))
    assert torch.equal((only > 0).sum(-1), torch.tensor([1, 1]))


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e30, 1e300])
@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_extreme_temperatures_give_a_distribution(temperature, filters):
    logits = torch.tensor([[3.0, -torch.inf, 1.0, 2.0, -1e38]])
    probs = probabilities(logits, temperature=temperature, **filters)
    assert probs.isfinite().all()
    assert probs.sum().item() == pytest.approx(1)
    assert probs[0, 1] == 0


def test_half_precision_logits_are_sampled_in_float32():
    logits = torch.randn(1, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    torch.testing.assert_close(probabilities(logits), logits.float().softmax(-1))


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}])
def test_draws_follow_the_distribution(settings):
    """Chi-square over 20,000 draws, with a fixed seed; the 99.9 % point by Wilson and Hilferty 1931."""
    logits = torch.linspace(-2, 2, 12)[None]
    probs = probabilities(logits, **settings)
    uniforms = torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    counts = torch.bincount(draw(probs.expand(len(uniforms), -1), uniforms), minlength=12).double()
    expected = probs[0].double() * len(uniforms)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    free = int(possible.sum()) - 1
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum().item()
    assert chi_square < free * (1 - 2 / (9 * free) + 3.09 * math.sqrt(2 / (9 * free))) ** 3


@given(zero_or_positive, st.floats(0, 1, exclude_max=True))
def test_a_token_of_probability_zero_is_never_drawn(weights, uniform):
    for u in (0.0, uniform, math.nextafter(1, 0)):
        token = draw(torch.tensor([weights]), torch.tensor([u], dtype=torch.float64)).item()
        assert weights[token] > 0


@given(st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=30), st.floats(0.5, 2), st.sets(st.integers(0, 29)))
def test_the_repetition_penalty_is_that_of_transformers(logits, penalty, seen):
    ids = sorted(i for i in seen if i < len(logits))
    row = torch.tensor([logits])
    mask = torch.zeros(1, len(logits), dtype=torch.bool)
    mask[0, ids] = True
    if not ids:
        assert torch.equal(penalize_repetition(row, mask, penalty), row)
        return
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([ids]), row.clone())
    torch.testing.assert_close(penalize_repetition(row, mask, penalty), expected)


def test_the_penalty_lowers_both_signs():
    row = torch.tensor([[2.0, -2.0, 1.0]])
    seen = torch.tensor([[True, True, False]])
    assert penalize_repetition(row, seen, 2.0).tolist() == [[1.0, -4.0, 1.0]]


WAYS = {"kernel": sample, "plain": sampler._sample}


@pytest.fixture(scope="module", autouse=True)
def _loaded():
    kernel_fault()


@pytest.fixture(scope="module", params=WAYS)
def way(request):
    """Without its kernel the one would be the other."""
    if request.param == "kernel" and (fault := kernel_fault()) is not None:
        pytest.skip(fault)
    return request.param


def choice(way, logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, uniforms):
    """Tokens drawn from one row by many numbers."""
    settings = [[temperature, top_k, top_p, min_p, u] for u in uniforms]
    rows = torch.as_tensor(logits, dtype=torch.float32).expand(len(settings), -1)
    return WAYS[way](rows, torch.tensor(settings, dtype=torch.float64)).tolist()


@settings(deadline=None)
@given(logit_rows, st.floats(0.2, 5), st.integers(0, 50), st.floats(0.01, 1), st.floats(0, 0.9), st.floats(0, 0.999))
def test_a_token_is_where_the_cumulative_distribution_of_brute_force_passes(
    way, logits, temperature, top_k, top_p, min_p, uniform
):
    filters = dict(temperature=temperature, top_k=top_k)
    (token,) = choice(way, logits, **filters, top_p=top_p, min_p=min_p, uniforms=[uniform])
    for a, b in ((a, b) for a in (0, -1e-5, 1e-5) for b in (0, -1e-5, 1e-5)):
        probs = brute_force(logits, **filters, top_p=top_p * (1 + a), min_p=min_p * (1 + b))
        below = sum(probs[:token])
        if probs[token] and below - 1e-5 <= uniform <= below + probs[token] + 1e-5:
            return
    pytest.fail(f"token {token}")


def test_rows_of_one_call_have_settings_of_their_own(way):
    logits = torch.randn(5, 3000, generator=torch.Generator().manual_seed(0)) * 3
    rules = [[0, 0, 1, 0, 0], [0.7, 5, 1, 0, 0.5], [1, 0, 0.8, 0, 0.9], [1.5, 0, 1, 0.1, 0.2], [1, 0, 1, 0, 0.6]]
    rules_R5 = torch.tensor(rules, dtype=torch.float64)
    together = WAYS[way](logits, rules_R5)
    assert together[0] == logits[0].argmax()
    for row in range(5):
        assert WAYS[way](logits[row : row + 1], rules_R5[row : row + 1]) == together[row]


@pytest.mark.parametrize("filters", [{}, {"top_k": 9}, {"top_p": 0.99}, {"min_p": 0.01}, {"temperature": 1e300}])
def test_what_is_masked_is_never_drawn_and_equals_are_all_possible(way, filters):
    logits = [-math.inf, 1.0, 1.0, -math.inf, 1.0, -math.inf]
    uniforms = [0.0, 0.2, 0.4, 0.6, 0.8, math.nextafter(1, 0)]
    assert choice(way, logits, **filters, uniforms=uniforms) == [1, 1, 2, 2, 4, 4]


def test_top_k_draws_k_of_equal_tokens_and_top_p_as_few_as_reach_it(way):
    uniforms = [i / 100 for i in range(100)]
    assert len(set(choice(way, [0.0] * 100, top_k=3, uniforms=uniforms))) == 3
    assert len(set(choice(way, [0.0] * 100, top_p=0.695, uniforms=uniforms))) == 70
    assert len(set(choice(way, [0.0] * 5000, top_p=1e-9, uniforms=uniforms))) == 1


@pytest.mark.parametrize("temperature", [0, 5e-324, 1.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_a_row_that_is_not_finite_gets_an_id_of_the_vocabulary(way, temperature, filters):
    for wrong in (math.nan, math.inf):
        tokens = choice(way, [1.0, wrong, 0.0, wrong, *[0.5] * 30], temperature=temperature, **filters, uniforms=[0.9])
        assert 0 <= tokens[0] < 34
