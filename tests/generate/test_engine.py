"""Many callers at once: each gets the answer it would have got alone, and nothing it does is felt by another."""

import pytest

from modicum.generate import Engine, SamplingParams

GREEDY = SamplingParams(temperature=0, max_new_tokens=20)


@pytest.fixture
def engine(generator):
    """Of three slots, eager."""
    engine = Engine(generator, slots=3, max_queue=50, prefill_chunk=8, compiled=False)
    engine.start()
    yield engine
    engine.close()


def test_every_caller_gets_the_answer_it_would_have_got_alone(engine, generator, prompts):
    requests = [(prompt, SamplingParams(seed=i, max_new_tokens=12)) for i, prompt in enumerate(prompts * 2)]
    tickets = [engine.submit(prompt, params) for prompt, params in requests]
    for ticket, (prompt, params) in zip(tickets, requests, strict=True):
        chunks, alone = list(ticket), generator.generate([prompt], params)[0]
        assert [i for chunk in chunks for i in chunk.ids] == alone.ids
        assert "".join(chunk.text for chunk in chunks) == alone.text
        assert [chunk.finish_reason for chunk in chunks][-1] == alone.finish_reason
    numbers = engine.numbers()
    assert (numbers.active, numbers.queued, numbers.finished) == (0, 0, len(requests))
