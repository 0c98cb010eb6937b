import numpy as np
import pytest
import torch

from modicum.exchange.parity import TOLERANCE, decoder_speaker, prove, truth_of
from modicum.model import Decoder, ModelConfig
from modicum.store import UserError


@pytest.fixture
def model():
    config = ModelConfig(
        vocab_size=96, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=80,
        initializer_range=0.3, max_position_embeddings=64,
    )  # fmt: skip
    return Decoder(config).eval()


def test_the_prompts_are_one_two_odd_and_long_and_the_same_each_time(model):
    truth = truth_of(model.state_dict(), model.config)
    assert [len(prompt) for prompt in truth.prompts] == [1, 2, 7, 40]
    again = truth_of(model.state_dict(), model.config)
    assert all((one == other).all() for one, other in zip(truth.prompts, again.prompts, strict=True))


def test_the_truth_of_each_prompt_is_that_of_the_prompt_alone(model):
    truth = truth_of(model.state_dict(), model.config)
    double = model.double()
    for prompt, wanted in zip(truth.prompts, truth.logits, strict=True):
        with torch.no_grad():
            found = double(torch.from_numpy(prompt)[None])[0].numpy()
        assert wanted.shape == (len(prompt), 96)
        np.testing.assert_allclose(wanted, found, rtol=0, atol=1e-4)


def test_a_context_shorter_than_the_prompts_shortens_them(model):
    config = ModelConfig(
        vocab_size=96, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=80,
        max_position_embeddings=5,
    )  # fmt: skip
    truth = truth_of(model.state_dict(), config)
    assert [len(prompt) for prompt in truth.prompts] == [1, 2, 5]
    prove("it", decoder_speaker(model.state_dict(), config), truth)


def test_the_decoder_itself_passes_and_the_figures_are_told(model):
    truth = truth_of(model.state_dict(), model.config)
    compared = prove("it", decoder_speaker(model.state_dict(), model.config), truth)
    for one, wanted in zip(compared, truth.logits, strict=True):
        assert one.largest == abs(wanted).max()
        assert one.allowed == TOLERANCE * one.largest
        assert 0 < one.difference < one.allowed


@pytest.mark.parametrize("share", [0.9, 1.1])
def test_the_largest_difference_allowed_is_a_share_of_the_largest_logit(model, share):
    truth = truth_of(model.state_dict(), model.config)
    wanted = dict(zip(map(len, truth.prompts), truth.logits, strict=True))

    def speaker(ids):
        logits = wanted[len(ids)].copy()
        logits[-1, 5] += share * TOLERANCE * abs(logits).max()
        return logits

    if share < 1:
        prove("it", speaker, truth)
    else:
        with pytest.raises(UserError, match="it: does not say what its source says"):
            prove("it", speaker, truth)


def test_one_prompt_that_differs_is_enough(model):
    truth = truth_of(model.state_dict(), model.config)
    speaker = decoder_speaker(model.state_dict(), model.config)
    with pytest.raises(UserError, match="a prompt of 2 tokens: logits differ by 1, allowed are"):
        prove("it", lambda ids: speaker(ids) + (len(ids) == 2), truth)


@pytest.mark.parametrize("wrong", [lambda logits: logits * np.nan, lambda logits: logits[:, :-1], lambda _: 0.0])
def test_logits_that_are_no_numbers_or_of_another_shape_never_pass(model, wrong):
    truth = truth_of(model.state_dict(), model.config)
    speaker = decoder_speaker(model.state_dict(), model.config)
    with pytest.raises(UserError, match="differ by nan"):
        prove("it", lambda ids: wrong(speaker(ids)), truth)


def test_a_logit_of_infinity_never_passes(model):
    truth = truth_of(model.state_dict(), model.config)
    speaker = decoder_speaker(model.state_dict(), model.config)
    with pytest.raises(UserError, match="differ by inf"):
        prove("it", lambda ids: speaker(ids) * np.inf, truth)


def test_weights_in_float32_are_not_copied_for_it(model):
    weights = model.state_dict()
    speaker = decoder_speaker(weights, model.config)
    before = speaker(np.array([3, 4]))
    weights["model.norm.weight"].mul_(2)
    np.testing.assert_allclose(speaker(np.array([3, 4])), 2 * before, rtol=1e-5)
