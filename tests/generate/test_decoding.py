"""Which prompt is read when, and what of it is not read at all because another one begins in the same way."""

import pytest

from modicum.generate import SamplingParams
from modicum.generate.decoding import Decoding, Request


@pytest.fixture
def build(generator):
    """A function: a decoding that reads prompts in pieces of 8 tokens, and a list of the lengths that it has read."""

    def build(**options):
        decoding, lengths = Decoding(generator.model, generator.never, capacity=64, chunk=8, **options), []
        read = decoding._passes.read

        def counted(ids, *place, **how):
            lengths.append(len(ids))
            return read(ids, *place, **how)

        decoding._passes.read = counted
        return decoding, lengths

    return build


@pytest.fixture
def request_for(generator):
    def request_for(prompt, tokens=3, owner=None):
        return Request(generator.answer(prompt, SamplingParams(temperature=0, max_new_tokens=tokens)), owner=owner)

    return request_for


def finish(decoding, requests):
    """All answers; each request has a slot."""
    for request in requests:
        decoding.add(request)
    while decoding.active:
        decoding.step()
    return [request.answer.ids for request in requests]


def test_short_prompts_do_not_wait_for_a_long_one_before_them(build, request_for):
    decoding, _ = build(slots=3)
    requests = [request_for([30 + length] * length) for length in (40, 6, 5)]
    for request in requests:
        decoding.add(request)
    decoding.step()
    assert [len(request.answer.ids) for request in requests] == [0, 1, 1]


def test_a_long_prompt_is_read_to_its_end_while_short_ones_keep_coming(build, request_for):
    decoding, _ = build(slots=3)
    long = request_for([30] * 40, tokens=1)
    decoding.add(long)
    for number in range(12):
        while decoding.free:
            decoding.add(request_for([40 + number] * 8, tokens=1))
        decoding.step()
    assert len(long.answer.ids) == 1


def test_what_prompts_that_come_at_once_begin_with_is_read_once(build, request_for, generator, prompts):
    shared = prompts[7]
    asked = [[*shared, *rest] for rest in ([40, 41, 42, 43, 44, 45], [50, 41, 42], [60, 41, 42], [50, 41, 42])]
    decoding, lengths = build(slots=4, keep=True)
    requests = [request_for(prompt) for prompt in asked]
    said = finish(decoding, requests)
    assert said == [answer.ids for answer in generator.generate(asked, SamplingParams(temperature=0, max_new_tokens=3))]
    assert [request.cached for request in requests] == [len(shared), 0, len(shared), len(asked[3]) - 1]
    # the last token of the second prompt, and of the one that is the same, is fed beside those that are answering
    assert sum(lengths) == len(asked[1]) - 1 + 3 + 6


def test_what_has_begun_is_not_waited_for_by_a_prompt_of_another_beginning(build, request_for):
    decoding, _ = build(slots=3, keep=True)
    long, same, other = (request_for(prompt) for prompt in ([30] * 40, [30] * 39, [50] * 8))
    decoding.add(long)
    decoding.step()
    decoding.add(same)
    decoding.add(other)
    while not other.answer.ids:
        decoding.step()
    assert not long.answer.ids
    while decoding.active:
        decoding.step()
    assert (long.cached, same.cached, other.cached) == (0, 38, 0)


def test_prompts_of_two_owners_that_come_at_once_share_nothing(build, request_for, prompts):
    decoding, lengths = build(slots=4, keep=True)
    requests = [request_for(prompts[7], owner=owner) for owner in (1, 1, 2, 2)]
    said = finish(decoding, requests)
    assert said == [said[0]] * 4
    assert [request.cached for request in requests] == [0, len(prompts[7]) - 1] * 2
    assert sum(lengths) == 2 * len(prompts[7])


def test_nothing_is_shared_where_nothing_is_kept(build, request_for, prompts):
    decoding, lengths = build(slots=2)
    requests = [request_for(prompts[7]) for _ in range(2)]
    finish(decoding, requests)
    assert [request.cached for request in requests] == [0, 0]
    assert sum(lengths) == 2 * len(prompts[7])
