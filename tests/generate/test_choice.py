"""What stands between the model's logits and a choice, against NumPy in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from generate_models import never_sampled

from modicum.generate import SamplingParams
from modicum.model.native import kernel_fault

GREEDY = SamplingParams(temperature=0, max_new_tokens=25)


@pytest.fixture(scope="module")
def exact(model, tokenizer):
    """Logits (V,) in float64 after some ids; those never sampled at -inf where asked."""
    wide = type(model)(model.config).double().eval()
    wide.load_state_dict(model.state_dict())

    def logits(ids, *, never=True):
        with torch.no_grad():
            found = wide(torch.tensor([ids]))[0, -1].numpy().copy()
        if never:
            found[never_sampled(tokenizer)] = -np.inf
        return found

    return logits


def greedy(exact, prompt, ids, shape):
    """Assert that each id is the best after `shape(logits, those before it)`."""
    for place, token in enumerate(ids):
        shaped = shape(exact(prompt + ids[:place]), np.array(ids[:place], dtype=int))
        assert shaped.argmax() == token, place


def test_frequency_and_presence_penalties_count_the_answer_and_not_the_prompt(generator, exact, prompts):
    params = replace(GREEDY, frequency_penalty=1.5, presence_penalty=2.0)
    (answer,) = generator.generate([prompts[2]], params)

    def shape(logits, before):
        counts = np.bincount(before, minlength=len(logits))
        return logits - 1.5 * counts - 2.0 * (counts > 0)

    greedy(exact, prompts[2], answer.ids, shape)
    assert answer.ids != generator.generate([prompts[2]], GREEDY)[0].ids


def test_a_negative_penalty_asks_for_more_of_the_same(generator, prompts):
    (answer,) = generator.generate([prompts[2]], replace(GREEDY, presence_penalty=-2.0, frequency_penalty=-2.0))
    (plain,) = generator.generate([prompts[2]], GREEDY)
    assert len(set(answer.ids)) < len(set(plain.ids))


def test_a_bias_is_added_to_its_logit(generator, exact, prompts):
    (plain,) = generator.generate([prompts[2]], GREEDY)
    bias = {plain.ids[0]: -5.0, 77: 3.0}
    (answer,) = generator.generate([prompts[2]], replace(GREEDY, logit_bias=bias))

    def shape(logits, _):
        for token, extra in bias.items():
            logits[token] += extra
        return logits

    greedy(exact, prompts[2], answer.ids, shape)
    assert answer.ids != plain.ids


def test_no_bias_makes_a_token_said_that_is_never_said(generator, tokenizer, prompts):
    (answer,) = generator.generate([prompts[2]], replace(GREEDY, logit_bias={tokenizer.pad_id: 1e6, 77: 1e5}))
    assert set(answer.ids) == {77}


def test_all_that_shapes_the_logits_together(generator, exact, prompts):
    params = replace(GREEDY, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={60: 1.0})
    (answer,) = generator.generate([prompts[2]], params)

    def shape(logits, before):
        seen = np.unique(np.concatenate([before, prompts[2]])).astype(int)
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / 1.3, logits[seen] * 1.3)
        logits = logits - 0.5 * np.bincount(before, minlength=len(logits))
        logits[60] += 1.0
        return logits

    greedy(exact, prompts[2], answer.ids, shape)


def test_the_alternatives_are_the_models_most_probable_tokens(generator, exact, prompts):
    """Under its own distribution, whatever shaped the choice; each row as many as it asks for."""
    shaped = SamplingParams(seed=2, temperature=1.5, max_new_tokens=8, logit_bias={60: 9.0}, top_logprobs=5)
    more, none = replace(GREEDY, max_new_tokens=8, top_logprobs=3), replace(GREEDY, max_new_tokens=8)
    answers = generator.generate([prompts[2]] * 3, [shaped, more, none])
    assert [[len(found) for found in a.top_logprobs] for a in answers] == [[5] * 8, [3] * 8, []]
    for answer in answers[:2]:
        for place, found in enumerate(answer.top_logprobs):
            logits = exact(prompts[2] + answer.ids[:place], never=False)
            logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
            best = np.argsort(-logprobs)[: len(found)]
            assert [token for token, _ in found] == best.tolist()
            np.testing.assert_allclose([value for _, value in found], logprobs[best], atol=1e-4)
            assert answer.logprobs[place] == pytest.approx(logprobs[answer.ids[place]], abs=1e-4)


def test_a_stream_gives_the_alternatives_of_each_token_with_it(generator, prompts):
    params = replace(GREEDY, top_logprobs=2)
    chunks, whole = list(generator.stream(prompts[2], params)), generator.generate([prompts[2]], params)[0]
    assert all(len(chunk.top_logprobs) == len(chunk.ids) for chunk in chunks)
    assert [found for chunk in chunks for found in chunk.top_logprobs] == whole.top_logprobs


def test_a_greedy_answers_logprobs_do_not_depend_on_a_sampled_one_beside_it(generator, prompts):
    if (fault := kernel_fault()) is not None:
        pytest.skip(fault)
    beside = SamplingParams(seed=1, max_new_tokens=25)
    alone, mixed = (generator.generate([prompts[2]] * 2, params)[0] for params in (GREEDY, [GREEDY, beside]))
    assert (mixed.ids, mixed.logprobs) == (alone.ids, alone.logprobs)
