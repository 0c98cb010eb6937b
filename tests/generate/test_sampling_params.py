"""Every parameter is checked by name before anything runs."""

import math

import pytest
import torch

from modicum.generate.params import SamplingParams
from modicum.store import UserError

NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")
WHOLE = ("max_new_tokens", "top_k", "seed")


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.5, "1", None, True])
def test_nan_infinite_and_negative_numbers_are_refused_by_name(name, value):
    with pytest.raises(UserError, match=rf"^{name}: expected"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", [*NUMBERS, "frequency_penalty"])
@pytest.mark.parametrize("digits", [400, 5000])
@pytest.mark.parametrize("sign", [1, -1])
def test_whole_numbers_beyond_all_floats_are_refused_by_name(name, digits, sign):
    with pytest.raises(UserError, match=rf"^{name}: expected"):
        SamplingParams(**{name: sign * 10**digits})


@pytest.mark.parametrize("name", WHOLE)
def test_counts_below_zero_are_refused_however_long_they_are(name):
    with pytest.raises(UserError, match=rf"^{name}: expected a whole number .* found a number of thousands of digits"):
        SamplingParams(**{name: -(10**5000)})


def test_whole_numbers_beyond_a_tensors_are_as_good_as_any():
    params = SamplingParams(temperature=10**300, top_k=10**300)
    assert torch.tensor([params.temperature, params.top_k], dtype=torch.float64).isfinite().all()
    assert (params.temperature, params.greedy) == (1e300, False)


@pytest.mark.parametrize("name", ["top_p", "min_p"])
def test_a_share_above_one_is_refused_by_name(name):
    with pytest.raises(UserError, match=rf"^{name}: expected a number from 0 to 1, found 1.5"):
        SamplingParams(**{name: 1.5})


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("value", [-1, 1.5, math.nan, "3", True])
def test_counts_that_are_not_whole_are_refused_by_name(name, value):
    with pytest.raises(UserError, match=rf"^{name}: expected a whole number of at least 0"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("penalty", [0, 0.001, 1e30])
def test_a_penalty_that_could_overflow_is_refused(penalty):
    with pytest.raises(UserError, match="repetition_penalty: expected a number from"):
        SamplingParams(repetition_penalty=penalty)


@pytest.mark.parametrize("stop", ["end", ("",), (1,), ("a", ""), None])
def test_a_stop_list_that_is_no_list_of_strings_is_refused(stop):
    with pytest.raises(UserError, match=r"^stop: expected a list of strings, none of them empty"):
        SamplingParams(stop=stop)


@pytest.mark.parametrize("ids", [(-1,), (True,), "12", (1.0,)])
def test_stop_ids_that_are_no_ids_are_refused(ids):
    with pytest.raises(UserError, match=r"^stop_ids: expected a list of token ids"):
        SamplingParams(stop_ids=ids)


def test_all_faults_are_told_at_once():
    with pytest.raises(UserError) as error:
        SamplingParams(temperature=math.nan, top_p=2, max_new_tokens=-1)
    assert [line.split(":")[0] for line in str(error.value).split("\n")] == ["max_new_tokens", "temperature", "top_p"]


def test_lists_become_tuples_so_that_a_request_never_changes():
    params = SamplingParams(stop=["a"], stop_ids=[3])
    assert params.stop == ("a",)
    assert params.stop_ids == (3,)


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"top_k": 1}, {"top_p": 0}])
def test_temperature_0_top_p_0_and_top_k_1_leave_one_choice(settings):
    assert SamplingParams(**settings).greedy
    assert not SamplingParams().greedy


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty"])
@pytest.mark.parametrize("value", [-2.1, 2.1, math.nan, "1"])
def test_a_penalty_of_the_answer_is_from_minus_two_to_two(name, value):
    with pytest.raises(UserError, match=rf"^{name}: expected a number from -2 to 2"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("value", [-1, 65, 1.0, True])
def test_the_number_of_alternatives_is_bounded(value):
    with pytest.raises(UserError, match=r"^top_logprobs: expected a whole number from 0 to 64"):
        SamplingParams(top_logprobs=value)


@pytest.mark.parametrize(
    "bias", [[3], {-1: 1.0}, {"3": 1.0}, {3: math.inf}, {3: 1e7}, {3: "1"}, {3: 10**400}, {3: 10**5000}]
)
def test_a_bias_that_is_no_number_of_an_id_is_refused(bias):
    with pytest.raises(UserError, match=r"^logit_bias: expected token ids"):
        SamplingParams(logit_bias=bias)


def test_a_bias_is_copied_and_parameters_can_still_be_keys():
    bias = {3: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[4] = 2.0
    assert params.logit_bias == {3: 1.0}
    assert hash(params) == hash(SamplingParams(logit_bias={3: 1.0}))
