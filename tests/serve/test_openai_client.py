"""The official client, sync and async, whole and streaming: each row of the API does what its name says."""

import json

import openai
import pytest
from talking import WAYS, ask

from modicum.generate import SamplingParams

QUESTION = {"messages": [{"role": "user", "content": "What is a port?"}]}
GREEDY = QUESTION | {"temperature": 0, "max_tokens": 24}


@pytest.fixture(params=WAYS)
def chat(request, server):
    return lambda asked: ask(server.address, request.param, asked)


@pytest.fixture(params=WAYS)
def complete(request, server):
    return lambda asked: ask(server.address, request.param, asked, kind="text")


@pytest.fixture(scope="module")
def expected(generator):
    """The generator's own answer to a conversation, without a server."""

    def expected(messages, **params):
        ids = generator.tokenizer.render(messages, add_generation_prompt=True).ids
        return generator.generate([ids], SamplingParams(**params))[0], ids

    return expected


def test_a_greedy_answer_is_the_generators_own(chat, expected):
    answer, ids = expected(GREEDY["messages"], temperature=0, max_new_tokens=24)
    result = chat(GREEDY)
    assert result.texts == {0: answer.text}
    assert result.finish_reasons == {0: answer.finish_reason}
    assert result.finishes == {0: 1}
    assert result.models == {"nano"}
    usage = result.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(ids), len(answer.ids))
    assert usage.total_tokens == len(ids) + len(answer.ids)


def test_a_seed_repeats_an_answer_and_n_answers_differ(chat, expected):
    result = chat(QUESTION | {"n": 3, "seed": 5, "max_tokens": 12})
    wanted = {i: expected(QUESTION["messages"], seed=5 + i, max_new_tokens=12)[0] for i in range(3)}
    assert result.texts == {i: answer.text for i, answer in wanted.items()}
    assert len(set(result.texts.values())) == 3
    assert result.finishes == {0: 1, 1: 1, 2: 1}
    assert result.usage.completion_tokens == sum(len(answer.ids) for answer in wanted.values())


@pytest.mark.parametrize(
    ("asked", "params"),
    [
        ({"temperature": 1.7, "top_p": 0.8}, {"temperature": 1.7, "top_p": 0.8}),
        ({"extra_body": {"min_p": 0.4}}, {"min_p": 0.4}),
        ({"frequency_penalty": 1.5}, {"frequency_penalty": 1.5}),
        ({"presence_penalty": -2}, {"presence_penalty": -2.0}),
        ({"logit_bias": {"300": 100}}, {"logit_bias": {300: 100.0}}),
        ({"extra_body": {"top_k": 3, "repetition_penalty": 1.3}}, {"top_k": 3, "repetition_penalty": 1.3}),
    ],
)
def test_sampling_fields_reach_the_sampler(chat, expected, asked, params):
    answer, _ = expected(QUESTION["messages"], seed=2, max_new_tokens=16, **params)
    plain, _ = expected(QUESTION["messages"], seed=2, max_new_tokens=16)
    assert chat(QUESTION | {"seed": 2, "max_tokens": 16} | asked).texts == {0: answer.text}
    assert answer.text != plain.text


@pytest.mark.parametrize("as_list", [False, True])
def test_an_answer_ends_before_a_stop_string_also_across_tokens(chat, expected, as_list):
    answer, _ = expected(QUESTION["messages"], seed=5, max_new_tokens=60)
    stop = answer.text[9:14]
    assert answer.text.index(stop) == 9
    result = chat(QUESTION | {"seed": 5, "max_tokens": 60, "stop": ["never said", stop] if as_list else stop})
    assert result.texts == {0: answer.text[:9]}
    assert result.finish_reasons == {0: "stop"}


def test_logprobs_are_the_models_own_with_the_most_probable_alternatives(chat, expected):
    answer, _ = expected(QUESTION["messages"], seed=6, max_new_tokens=400, top_logprobs=3)
    assert answer.finish_reason == "stop"
    result = chat(QUESTION | {"seed": 6, "max_tokens": 400, "logprobs": True, "top_logprobs": 3})
    tokens = result.tokens[0]
    assert b"".join(bytes(token.bytes) for token in tokens).decode("utf-8", "replace") == answer.text
    # what ended it is no part of it
    assert [token.logprob for token in tokens] == pytest.approx(answer.logprobs[:-1], abs=1e-4)
    for token, top in zip(tokens, answer.top_logprobs, strict=False):
        found = [alternative.logprob for alternative in token.top_logprobs]
        assert found == pytest.approx([logprob for _, logprob in top], abs=1e-4)


def test_tokens_of_a_stop_string_are_not_among_the_logprobs(chat, expected):
    answer, _ = expected(QUESTION["messages"], seed=5, max_new_tokens=60)
    asked = QUESTION | {"seed": 5, "max_tokens": 60, "stop": answer.text[9:14], "logprobs": True}
    result = chat(asked)
    assert result.texts == {0: answer.text[:9]}
    *before, last = [bytes(token.bytes) for token in result.tokens[0]]
    assert (b"".join(before) + last).decode("utf-8", "replace").startswith(answer.text[:9])
    assert len(b"".join(before).decode("utf-8", "replace")) < 9


def test_max_completion_tokens_counts_and_is_clamped_to_the_room_left(chat, generator):
    assert chat(GREEDY | {"max_completion_tokens": 3, "max_tokens": 9}).usage.completion_tokens == 3
    # the end of an answer is made impossible
    forbidden = {str(i): -100 for i in generator.stop_ids}
    long = [{"role": "user", "content": "12 " * 250}]
    result = chat(GREEDY | {"messages": long, "max_tokens": 10**9, "logit_bias": forbidden})
    assert 50 < result.usage.completion_tokens < 500
    assert result.usage.total_tokens == generator.context
    assert result.finish_reasons == {0: "length"}


def test_no_tokens_asked_for_are_no_tokens(chat):
    result = chat(GREEDY | {"max_tokens": 0})
    assert (result.texts, result.finish_reasons, result.usage.completion_tokens) == ({0: ""}, {0: "length"}, 0)


def test_parts_of_text_are_one_content_and_unknown_fields_are_ignored(chat, expected):
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "a port?"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts, "name": "ann"}]
    asked = {"messages": messages, "user": "u", "extra_body": {"nothing_known": [1, {"a": None}]}, "store": False}
    same = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a port?"}]
    answer, _ = expected(same, temperature=0, max_new_tokens=8)
    assert chat(asked | {"temperature": 0, "max_tokens": 8}).texts == {0: answer.text}


def test_only_whole_characters_come(chat):
    faces = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "(😀|é|日){6}"}}
    result = chat(QUESTION | {"seed": 3, "max_tokens": 100, "extra_body": {"response_format": faces}})
    assert len(result.texts[0]) == 6
    assert set("".join(result.pieces)) <= set("😀é日")
    assert result.usage.completion_tokens > 6, "each of these characters is several tokens"


def test_a_json_object_parses(chat):
    result = chat(QUESTION | {"seed": 8, "max_tokens": 400, "response_format": {"type": "json_object"}})
    if result.finish_reasons == {0: "stop"}:
        assert isinstance(json.loads(result.texts[0]), dict)
    assert result.texts[0].startswith("{")


def test_a_completion_goes_on_from_its_prompt(complete, generator):
    ids = [generator.tokenizer.bos_id, *generator.tokenizer.encode("A port is")]
    answer = generator.generate([ids], SamplingParams(temperature=0, max_new_tokens=9))[0]
    asked = {"temperature": 0, "max_tokens": 9}
    assert complete(asked | {"prompt": "A port is"}).texts == {0: answer.text}
    assert complete(asked | {"prompt": ids}).texts == {0: answer.text}
    assert complete(asked | {"prompt": "A port is", "echo": True}).texts == {0: "A port is" + answer.text}
    result = complete(asked | {"prompt": [ids, ids], "n": 2, "seed": 1})
    assert result.texts == dict.fromkeys(range(4), answer.text)
    assert result.usage.prompt_tokens == 2 * len(ids)
    assert result.usage.completion_tokens == 4 * len(answer.ids)


def test_edges_of_the_sampling_fields_are_answers_too(chat, complete, expected):
    greedy, _ = expected(QUESTION["messages"], temperature=0, max_new_tokens=5)
    assert chat(QUESTION | {"top_p": 0, "max_tokens": 5}).texts == {0: greedy.text}
    assert chat(QUESTION | {"extra_body": {"top_k": 1}, "max_tokens": 5}).texts == {0: greedy.text}
    assert chat(QUESTION | {"extra_body": {"top_k": 10**6}, "seed": -1, "max_tokens": 5}).finishes == {0: 1}
    assert complete({"prompt": "", "max_tokens": 2}).usage.prompt_tokens == 1


def test_a_completions_logprobs_have_the_old_shape(client, generator):
    ids = [generator.tokenizer.bos_id, *generator.tokenizer.encode("A port is")]
    answer = generator.generate([ids], SamplingParams(seed=4, max_new_tokens=9, top_logprobs=2))[0]
    choice = client.completions.create(model="nano", prompt="A port is", seed=4, max_tokens=9, logprobs=2).choices[0]
    count = len(choice.logprobs.tokens)
    assert choice.logprobs.token_logprobs == pytest.approx(answer.logprobs[:count], abs=1e-4)
    assert all(len(top) in (1, 2) for top in choice.logprobs.top_logprobs)
    assert b"".join(map(spoken, choice.logprobs.tokens)).decode("utf-8", "replace").startswith(choice.text)


@pytest.mark.parametrize("stream", [False, True])
def test_characters_of_several_tokens_have_one_offset_and_parts_with_names_of_their_own(client, stream):
    faces = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "(😀|é|日){6}"}}
    asked = {"model": "nano", "prompt": "A", "seed": 3, "max_tokens": 100, "logprobs": 20, "stream": stream}
    answer = client.completions.create(**asked, extra_body={"response_format": faces})
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    text = "".join(choice.text for choice in choices)
    tokens = [token for choice in choices for token in choice.logprobs.tokens]
    offsets = [offset for choice in choices for offset in choice.logprobs.text_offset]
    tops = [top for choice in choices for top in choice.logprobs.top_logprobs]
    data = [spoken(token) for token in tokens]
    assert b"".join(data).decode() == text
    assert "bytes:\\xf0" in tokens or "bytes:\\xc3" in tokens or "bytes:\\xe6" in tokens
    # a byte stands in the character that begins at the last first byte before it
    begins = [sum(byte & 0xC0 != 0x80 for byte in b"".join(data[: i + 1])) - 1 for i in range(len(data))]
    assert offsets == begins
    assert not any("\ufffd" in name for top in tops for name in top)


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_are_those_of_the_text_also_where_a_stop_string_ends_it(client, generator, stream):
    ids = [generator.tokenizer.bos_id, *generator.tokenizer.encode("A port is")]
    said = generator.generate([ids], SamplingParams(seed=4, max_new_tokens=40))[0].text
    at = next(i for i in range(8, len(said)) if said.index(said[i : i + 6]) == i)
    asked = {"model": "nano", "prompt": "A port is", "seed": 4, "max_tokens": 40, "logprobs": 1, "stream": stream}
    answer = client.completions.create(**asked, stop=said[at : at + 6])
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == said[:at]
    offsets = [offset for choice in choices for offset in choice.logprobs.text_offset]
    assert offsets == sorted(offsets)
    assert (offsets[0], offsets[-1] < at) == (0, True)
    tokens = [token for choice in choices for token in choice.logprobs.tokens]
    assert b"".join(map(spoken, tokens)).decode("utf-8", "replace").startswith(said[:at])


def spoken(token):
    """The bytes of a token as /v1/completions names it."""
    return bytes.fromhex(token[6:].replace("\\x", "")) if token.startswith("bytes:\\x") else token.encode()


def test_the_model_is_listed_under_a_name_without_a_path(client):
    (model,) = client.models.list().data
    assert (model.id, model.object) == ("nano", "model")
    assert client.models.retrieve("nano").id == "nano"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_a_second_turn_is_read_from_the_first_ones_cache(server):
    first = ask(server.address, "sync", GREEDY)
    turns = [*GREEDY["messages"], {"role": "assistant", "content": first.texts[0].strip()}]
    again = ask(server.address, "sync", GREEDY | {"messages": [*turns, {"role": "user", "content": "And two?"}]})
    assert again.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens
