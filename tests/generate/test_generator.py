"""One request's answer is a function of the request: not of its batch, its padding, the cache, or what came before."""

import itertools

import pytest
import torch
from generate_models import CONTEXT, build_model, never_sampled
from transformers import LlamaConfig, LlamaForCausalLM

from modicum.generate import Generator, SamplingParams
from modicum.generate.decoding import Decoding
from modicum.store import UserError

GREEDY = SamplingParams(temperature=0, max_new_tokens=40)
KINDS = [
    GREEDY,
    SamplingParams(seed=3, max_new_tokens=25),
    SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_new_tokens=60),
    SamplingParams(top_k=20, min_p=0.02, repetition_penalty=1.3, seed=1, max_new_tokens=33),
]


def test_cached_equals_uncached(model, generator, tokenizer, prompts):
    """Each greedy token is the best one after a full forward pass over all that is before it."""
    prompt = prompts[2]
    ids = generator.generate([prompt], GREEDY)[0].ids
    assert len(ids) > 30
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids]))[0].log_softmax(-1)
    logits[:, never_sampled(tokenizer)] = -torch.inf
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == ids


@pytest.mark.parametrize("params", KINDS)
def test_batched_equals_single_and_left_padding_equals_none(generator, prompts, params):
    together = generator.generate(prompts, params)
    alone = [generator.generate([prompt], params)[0] for prompt in prompts]
    assert [(a.ids, a.text, a.finish_reason) for a in together] == [(a.ids, a.text, a.finish_reason) for a in alone]
    for a, b in zip(together, alone, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def test_requests_with_other_settings_in_the_batch_change_nothing(generator, prompts):
    requests = [(prompt, params) for prompt in prompts[:3] for params in KINDS]
    together = generator.generate([prompt for prompt, _ in requests], [params for _, params in requests])
    alone = [generator.generate([prompt], params)[0] for prompt, params in requests]
    assert [a.ids for a in together] == [a.ids for a in alone]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 100])
def test_the_size_of_a_batch_changes_nothing(generator, prompts, batch_size):
    expected = generator.generate(prompts, KINDS[2])
    found = generator.generate(prompts, KINDS[2], batch_size=batch_size)
    assert [a.ids for a in found] == [a.ids for a in expected]


def test_rows_that_finish_leave_the_batch(generator, prompts, monkeypatch):
    sizes, advance = [], Decoding._advance
    monkeypatch.setattr(Decoding, "_advance", lambda self, rows: sizes.append(len(rows)) or advance(self, rows))
    limits = [2, 3, 4, 30, 5, 6, 2, 2]
    params = [SamplingParams(temperature=0, max_new_tokens=limit) for limit in limits]
    found = generator.generate([prompts[4]] * 8, params)
    longest = max(found, key=lambda a: len(a.ids)).ids
    assert [a.ids for a in found] == [longest[:limit] for limit in limits]
    assert sizes == [8, 5, 4, 3, 2, *[1] * 24]


def test_a_short_prompt_gets_its_whole_room_beside_one_that_fills_the_context(generator, prompts):
    short, long = generator.generate([prompts[0], prompts[5]], SamplingParams(max_new_tokens=10**9, stop_ids=()))
    assert short.ids == generator.generate([prompts[0]], SamplingParams(max_new_tokens=10**9))[0].ids
    assert len(long.ids) == 1
    assert len(short.ids) == CONTEXT - 1 or short.finish_reason == "stop"


def test_the_cache_is_not_reused_between_requests(generator, prompts):
    first = generator.generate([prompts[1]], GREEDY)
    generator.generate([prompts[4]], GREEDY)
    list(itertools.islice(generator.stream(prompts[2], GREEDY), 3))
    assert generator.generate([prompts[1]], GREEDY) == first


def test_two_streams_at_once_do_not_disturb_each_other(generator, prompts):
    streams = [generator.stream(prompt, KINDS[1]) for prompt in (prompts[1], prompts[2])]
    ids = [[], []]
    for pair in itertools.zip_longest(*streams):
        for out, chunk in zip(ids, pair, strict=True):
            out += chunk.ids if chunk else []
    assert ids == [a.ids for a in generator.generate([prompts[1], prompts[2]], KINDS[1])]


def test_the_seed_decides_the_answer(generator, prompts):
    def answer(seed):
        return tuple(generator.generate([prompts[2]], SamplingParams(seed=seed, max_new_tokens=12))[0].ids)

    assert answer(7) == answer(7)
    assert len({answer(seed) for seed in range(8)}) == 8


def test_first_tokens_over_many_seeds_follow_the_model(model, generator, tokenizer, prompts):
    """Seeds that follow each other must give independent draws: total variation distance of 4,000 answers."""
    params = [SamplingParams(seed=seed, max_new_tokens=1, temperature=3.0) for seed in range(4000)]
    drawn = [a.ids[0] for a in generator.generate([prompts[4]] * len(params), params, batch_size=500)]
    with torch.no_grad():
        logits = model(torch.tensor([prompts[4]]))[0, -1] / 3.0
    logits[never_sampled(tokenizer)] = -torch.inf
    probs = logits.softmax(-1)
    share = torch.bincount(torch.tensor(drawn), minlength=len(probs)) / len(drawn)
    # by chance alone the distance is about sum sqrt(p / (2 pi n)); measured against that
    by_chance = (probs / (2 * torch.pi * len(drawn))).sqrt().sum()
    assert 0.5 * (share - probs).abs().sum() < 1.3 * by_chance


@pytest.mark.parametrize("penalty", [1.0, 1.4])
def test_greedy_answers_are_those_of_transformers(model, generator, tokenizer, prompts, penalty):
    peer = LlamaForCausalLM(LlamaConfig.from_dict(model.config.to_hf()))
    peer.load_state_dict(model.state_dict(), strict=False)
    peer.tie_weights()
    some = [prompt for prompt in prompts if 0 < len(prompt) <= 40]
    width = max(map(len, some))
    padded = torch.tensor([[tokenizer.pad_id] * (width - len(p)) + p for p in some])
    out = (
        peer.eval()
        .generate(
            padded,
            attention_mask=padded != tokenizer.pad_id,
            max_new_tokens=20,
            do_sample=False,
            repetition_penalty=penalty,
            suppress_tokens=never_sampled(tokenizer),
            eos_token_id=[tokenizer.eot_id, tokenizer.end_of_turn_id],
            pad_token_id=tokenizer.pad_id,
        )[:, width:]
        .tolist()
    )
    ours = generator.generate(some, SamplingParams(temperature=0, max_new_tokens=20, repetition_penalty=penalty))
    assert [a.ids for a in ours] == [row[: len(a.ids)] for a, row in zip(ours, out, strict=True)]
    assert max(len(a.ids) for a in ours) == 20


@pytest.mark.parametrize("tied", [True, False])
def test_a_long_answer_begins_like_a_short_one(tokenizer, prompts, tied):
    """Long ones read the head's table from a transposed copy, which must be that of the weights as they are now."""
    model = build_model(tokenizer.vocab_size, tie_word_embeddings=tied)
    generator = Generator(model, tokenizer, stop_ids=[])
    for seed in (1, 2):
        model.init_weights(seed)
        long, short = (
            generator.generate([prompts[4]], SamplingParams(temperature=0, max_new_tokens=n))[0] for n in (40, 10)
        )
        assert long.ids[:10] == short.ids
        assert long.logprobs[:10] == pytest.approx(short.logprobs, abs=1e-4)


def test_logprobs_are_finite_and_the_models_own(model, generator, prompts):
    """Whatever shaped the choice, the figure is the unshaped distribution's."""
    for params in KINDS:
        answer = generator.generate([prompts[2]], params)[0]
        with torch.no_grad():
            logprobs = model(torch.tensor([prompts[2] + answer.ids]))[0, len(prompts[2]) - 1 : -1].log_softmax(-1)
        expected = logprobs.gather(-1, torch.tensor(answer.ids)[:, None])[:, 0]
        assert expected.isfinite().all()
        torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=1e-4, rtol=1e-4)


def test_a_bfloat16_model_answers_and_repeats_itself(tokenizer, prompts):
    half = Generator(build_model(tokenizer.vocab_size).bfloat16(), tokenizer, stop_ids=[tokenizer.eot_id])
    for params in KINDS:
        answer = half.generate([prompts[2]], params)[0]
        assert answer.ids == half.generate([prompts[2]], params)[0].ids
        assert torch.tensor(answer.logprobs).isfinite().all()


def test_damaged_weights_are_one_clear_error(tokenizer, prompts):
    model = build_model(tokenizer.vocab_size)
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    generator = Generator(model, tokenizer, stop_ids=[])
    for params in KINDS:
        with pytest.raises(UserError, match="logits are not finite"):
            generator.generate(prompts, params)


def test_dropout_is_off_while_generating_and_training_goes_on_after(tokenizer, prompts):
    model = build_model(tokenizer.vocab_size, attention_dropout=0.5).train()
    generator = Generator(model, tokenizer, stop_ids=[tokenizer.eot_id])
    assert generator.generate([prompts[1]], GREEDY) == generator.generate([prompts[1]], GREEDY)
    assert model.training
    stream = generator.stream(prompts[1], GREEDY)
    next(stream)
    stream.close()
    assert model.training
