"""What a request may ask, at and beyond its limits, and which tokens can never be an answer."""

import pytest
import torch
from generate_models import CONTEXT, build_model, never_sampled

from modicum.generate import Generator, SamplingParams
from modicum.generate.decoding import Decoding, Request
from modicum.store import UserError


def test_max_new_tokens_0_gives_an_empty_answer_of_reason_length(generator, prompts):
    for answer in generator.generate(prompts, SamplingParams(max_new_tokens=0)):
        assert (answer.ids, answer.text, answer.finish_reason, answer.logprobs) == ([], "", "length", [])
    chunks = list(generator.stream(prompts[0], SamplingParams(max_new_tokens=0)))
    assert [(c.text, c.ids, c.finish_reason) for c in chunks] == [("", [], "length")]


@pytest.mark.parametrize("asked", [CONTEXT, 10**18])
def test_a_huge_max_new_tokens_ends_where_the_context_does(speaker, asked):
    chain = list(range(24, 24 + CONTEXT + 1))
    answer = speaker(chain).generate([chain[:5]], SamplingParams(temperature=0, max_new_tokens=asked))[0]
    assert answer.ids == chain[5:CONTEXT]
    assert answer.finish_reason == "length"


def test_a_prompt_of_the_full_context_has_no_room_for_an_answer(generator, prompts):
    full = prompts[3]
    assert len(full) == CONTEXT
    answer = generator.generate([full], SamplingParams())[0]
    assert (answer.ids, answer.finish_reason) == ([], "length")


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(generator, prompts):
    with pytest.raises(UserError, match="prompt 2: 65 tokens are more than the context of 64"):
        generator.generate([prompts[0], prompts[3] + [30]], SamplingParams())


def test_a_context_smaller_than_the_models_bounds_prompt_and_answer(tokenizer, prompts):
    model = build_model(tokenizer.vocab_size)
    small = Generator(model, tokenizer, stop_ids=[], context=10)
    answer = small.generate([[30, 31, 32]], SamplingParams(temperature=0))[0]
    assert (len(answer.ids), answer.finish_reason) == (7, "length")
    with pytest.raises(UserError, match="more than the context of 10"):
        small.generate([prompts[3]], SamplingParams())
    assert Generator(model, tokenizer, stop_ids=[], context=10**9).context == CONTEXT


def test_an_empty_prompt_is_a_documents_start(generator, tokenizer):
    params = SamplingParams(temperature=0, max_new_tokens=8)
    assert generator.generate([[]], params) == generator.generate([[tokenizer.eot_id]], params)


def test_a_text_to_go_on_from_begins_with_what_opens_one(generator, tokenizer):
    text = tokenizer.encode("A port is")
    bare = Generator(generator.model, tokenizer, stop_ids=[], opening=[])
    assert generator.text_prompt("A port is") == [tokenizer.bos_id, *text]
    assert bare.text_prompt("A port is") == text
    assert bare.text_prompt("") == generator.text_prompt("") == [tokenizer.bos_id]


def test_no_prompts_give_no_answers(generator):
    assert generator.generate([], SamplingParams()) == []


@pytest.mark.parametrize("beyond", [-1, 512, 10**12])
def test_a_prompt_id_beyond_the_vocabulary_is_refused_before_anything_runs(generator, prompts, beyond):
    with pytest.raises(UserError, match=f"prompt 3: token id {beyond} is outside the model's vocabulary of 512"):
        generator.generate([prompts[0], prompts[1], [30, beyond]], SamplingParams())
    with pytest.raises(UserError, match=f"prompt: token id {beyond} is outside"):
        generator.stream([beyond], SamplingParams())


def test_parameters_for_another_number_of_prompts_are_a_mistake(generator, prompts):
    with pytest.raises(ValueError, match="8 prompts, but parameters for 2"):
        generator.generate(prompts, [SamplingParams()] * 2)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tokenizer):
    with pytest.raises(UserError, match="the tokenizer has 512 ids and the model's vocabulary 448"):
        Generator(build_model(448), tokenizer, stop_ids=[])


def test_padding_reserved_tokens_and_rows_beyond_the_tokenizer_are_never_sampled(tokenizer):
    """The model wants nothing else: all those ids have the largest logits, by far."""
    model = build_model(tokenizer.vocab_size + 64, tie_word_embeddings=False)
    forbidden = never_sampled(tokenizer)
    assert len(forbidden) == 18
    forbidden += range(tokenizer.vocab_size, model.config.vocab_size)
    with torch.no_grad():
        model.model.norm.weight.fill_(0.0)
        model.model.norm.weight[0] = 1.0
        model.model.embed_tokens.weight[:, 0] = 5.0
        model.lm_head.weight[forbidden] = 50.0
    generator = Generator(model, tokenizer, stop_ids=[])
    for params in (SamplingParams(temperature=0), SamplingParams(temperature=2.0), SamplingParams(top_k=50)):
        ids = {i for answer in generator.generate([[30], [31, 32]], params) for i in answer.ids}
        assert ids
        assert ids.isdisjoint(forbidden)


def test_end_of_text_end_of_turn_and_tool_markers_can_be_sampled(speaker, tokenizer):
    call, word, end = 4, 30, 5
    answer = speaker([31, call, word, end, tokenizer.end_of_turn_id]).generate([[31]], SamplingParams(temperature=0))[0]
    assert answer.ids == [call, word, end, tokenizer.end_of_turn_id]
    assert answer.text == f"<tool_call>{tokenizer.decode([word])}</tool_call>"
    assert answer.finish_reason == "stop"


def test_choosing_tokens_has_its_kernel_without_a_compiled_model(tokenizer, monkeypatch):
    loaded = []
    monkeypatch.setattr("modicum.generate.decoding.kernel_fault", lambda: loaded.append(True))
    never = torch.zeros(0, dtype=torch.int64)
    Decoding(build_model(tokenizer.vocab_size), never, slots=1, capacity=32, compiled=False)
    assert loaded


def test_what_is_not_finite_leaves_with_the_request_that_made_it(tokenizer):
    model = build_model(tokenizer.vocab_size)
    never = torch.zeros(0, dtype=torch.int64)
    decoding = Decoding(model, never, slots=1, capacity=32, keep=True)
    params = SamplingParams(temperature=0, max_new_tokens=4)
    generator = Generator(model, tokenizer, stop_ids=[])
    expected = generator.generate([[30, 31, 32]], params)[0].ids

    def request():
        return Request(generator.answer([30, 31, 32], params))

    failed = request()
    decoding.add(failed)
    decoding.step()
    for layer in decoding._passes.cache.values:
        layer[:] = torch.nan
    decoding.step()
    assert "not finite" in str(failed.error)
    assert decoding.free == 1
    following = request()
    decoding.add(following)
    assert following.cached == 0
    while following.answer.finish_reason is None:
        decoding.step()
    assert following.answer.ids == expected
