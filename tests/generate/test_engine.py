"""Many callers at once: each gets the answer it would have got alone, and nothing it does is felt by another."""

import threading
import time

import pytest
import torch
from generate_models import CONTEXT, build_model
from hypothesis import given, settings
from hypothesis import strategies as st

from modicum.generate import Engine, Generator, QueueFull, SamplingParams, decoding
from modicum.generate.passes import make_passes, slot_bytes
from modicum.model.packing import RoundedMatrix
from modicum.model.quantized import install, matrix_names
from modicum.store import UserError

GREEDY = SamplingParams(temperature=0, max_new_tokens=20)
LONG = SamplingParams(temperature=0, max_new_tokens=4000)


@pytest.fixture
def engine(generator):
    """Of three slots, whose prompts are read in pieces of 8 tokens."""
    engine = Engine(generator, slots=3, max_queue=50, prefill_chunk=8)
    engine.start()
    yield engine
    engine.close()


@pytest.fixture
def endless(tokenizer):
    """A generator whose answers do not end by themselves."""
    return Generator(build_model(tokenizer.vocab_size, max_position_embeddings=4096), tokenizer, stop_ids=[])


def until(condition):
    """Wait for what another thread does."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def ids_of(chunks):
    return [i for chunk in chunks for i in chunk.ids]


def test_every_caller_gets_the_answer_it_would_have_got_alone(engine, generator, prompts):
    requests = [(prompt, SamplingParams(seed=i, max_new_tokens=12)) for i, prompt in enumerate(prompts * 2)]
    tickets = [engine.submit(prompt, params) for prompt, params in requests]
    for ticket, (prompt, params) in zip(tickets, requests, strict=True):
        chunks, alone = list(ticket), generator.generate([prompt], params)[0]
        assert ids_of(chunks) == alone.ids
        assert "".join(chunk.text for chunk in chunks) == alone.text
        assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [alone.finish_reason]
    numbers = engine.numbers()
    assert (numbers.active, numbers.queued, numbers.finished) == (0, 0, len(requests))
    assert numbers.tokens_in == sum(len(prompt) or 1 for prompt, _ in requests)


def test_a_next_turn_computes_only_what_is_new(engine, generator, prompts):
    first = engine.submit(prompts[4], GREEDY)
    said = ids_of(first)
    turn = prompts[4] + said + prompts[2]
    second = engine.submit(turn, GREEDY)
    assert ids_of(second) == generator.generate([turn], GREEDY)[0].ids
    # the last token that was said was never fed
    assert (first.cached_tokens, second.cached_tokens) == (0, len(prompts[4] + said) - 1)
    assert engine.numbers().prefix_hits == 1


def test_a_beginning_that_many_share_is_computed_once(engine, generator, prompts):
    """Also while the one that computed it is still at work, or when its slot holds far more than what is shared."""
    shared = prompts[7]
    others = [shared + [40 + i] * 3 for i in range(5)]
    tickets = [engine.submit(shared, GREEDY), *(engine.submit(prompt, GREEDY) for prompt in others)]
    answers = [ids_of(ticket) for ticket in tickets]
    assert answers == [answer.ids for answer in generator.generate([shared, *others], GREEDY)]
    last = engine.submit([*shared, 60, 61], GREEDY)
    list(last)
    assert last.cached_tokens == len(shared)


def test_cancelling_frees_the_slot_and_says_so(endless):
    engine = Engine(endless, slots=1)
    engine.start()
    first, waiting, second = (engine.submit([30 + i], LONG) for i in range(3))
    pieces = iter(first)
    next(pieces)
    waiting.cancel()
    first.cancel()
    assert [chunk.finish_reason for chunk in pieces][-1] == "cancelled"
    assert [(chunk.ids, chunk.finish_reason) for chunk in waiting] == [([], "cancelled")]
    assert list(second)[-1].finish_reason == "length"
    until(lambda: engine.numbers().finished == 1)
    assert (engine.numbers().cancelled, engine.numbers().active) == (2, 0)
    engine.close()


def test_a_full_queue_refuses_and_takes_again_later(endless):
    engine = Engine(endless, slots=1, max_queue=2, compiled=False)
    tickets = [engine.submit([30], LONG) for _ in range(3)]
    with pytest.raises(QueueFull, match="3 requests"):
        engine.submit([30], LONG)
    engine.start()
    until(lambda: engine.numbers().queued == 2)
    with pytest.raises(QueueFull, match="3 requests"):
        engine.submit([30], LONG)
    assert engine.numbers().rejected == 2
    tickets.pop().cancel()
    until(lambda: engine.numbers().queued == 1)
    tickets.append(engine.submit([30], LONG))
    for ticket in tickets:
        ticket.cancel()
        assert list(ticket)[-1].finish_reason == "cancelled"
    engine.close()


def test_without_a_queue_every_slot_is_still_filled(endless):
    engine = Engine(endless, slots=2, max_queue=0, compiled=False)
    engine.start()
    tickets = [engine.submit([30], LONG) for _ in range(2)]
    for ticket in tickets:
        next(iter(ticket))
    with pytest.raises(QueueFull):
        engine.submit([30], LONG)
    engine.close()


def test_a_crowd_leaves_a_core_to_who_hands_the_tokens_out(generator, prompts, monkeypatch):
    seen, before = set(), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        engine = Engine(generator, slots=4, spare_core=True)
    finally:
        torch.set_num_threads(before)
    step = engine._decoding._passes.step

    def watched(ids, slots, places):
        seen.add((len(ids) > decoding.FEW, torch.get_num_threads()))
        return step(ids, slots, places)

    monkeypatch.setattr(engine._decoding._passes, "step", watched)
    tickets = [engine.submit(prompt, SamplingParams(max_new_tokens=n)) for n, prompt in enumerate(prompts[:4], 5)]
    engine.start()  # with all of them there, however busy the machine is
    for ticket, n, prompt in zip(tickets, range(5, 9), prompts, strict=False):
        assert ids_of(ticket) == generator.generate([prompt], SamplingParams(max_new_tokens=n))[0].ids
    assert seen == {(True, 2), (False, 3)}
    engine.close()


def test_nothing_is_taken_over_from_another_owners_prompt(engine, generator, prompts):
    turn = prompts[4]
    asked = [(1, turn), (2, turn), (1, turn), (2, [*turn, 40]), (None, turn), (3, turn)]
    tickets = []
    for owner, prompt in asked:
        ticket = engine.submit(prompt, GREEDY, owner=owner)
        assert ids_of(ticket) == generator.generate([prompt], GREEDY)[0].ids
        tickets.append(ticket)
    assert [ticket.cached_tokens for ticket in tickets] == [0, 0, len(turn) - 1, len(turn), 0, 0]


def test_tokens_are_counted_as_they_come_and_the_first_is_timed(endless):
    engine, seconds = Engine(endless, slots=1, compiled=False), []
    engine.on_first = seconds.append
    engine.start()
    first, second = engine.submit([30], LONG), engine.submit([31], LONG)
    pieces = iter(first)
    next(pieces)
    until(lambda: engine.numbers().tokens_out >= 3)
    assert (engine.numbers().finished, len(seconds)) == (0, 1)
    time.sleep(0.2)
    first.cancel()
    next(iter(second))
    assert seconds[1] > 0.2
    engine.close()
    said = sum(len(ticket.request.answer.ids) for ticket in (first, second))
    assert (engine.numbers().tokens_out, len(seconds)) == (said, 2)


def test_closing_does_not_wait_for_what_is_still_made_ready(generator, monkeypatch):
    go_on, began = threading.Event(), threading.Event()
    engine = Engine(generator, slots=1, compiled=False)
    monkeypatch.setattr(engine._decoding, "warm", lambda: began.set() or go_on.wait(60))
    engine.start()
    ticket = engine.submit([30], GREEDY)
    assert began.wait(60)
    engine.close()
    assert (engine.alive, [chunk.finish_reason for chunk in ticket]) == (True, ["cancelled"])
    go_on.set()
    until(lambda: not engine.alive)
    assert engine.numbers().cancelled == 1


def test_a_long_prompt_does_not_stall_the_others(endless):
    """Between two of its pieces of 16 tokens, the one that is answering gets a token."""
    engine = Engine(endless, slots=2, prefill_chunk=16)
    engine.start()
    quick = engine.submit([30], LONG)
    pieces = iter(quick)
    next(pieces)
    before = engine.numbers().steps
    slow = engine.submit([31] * 1600, SamplingParams(max_new_tokens=1))
    list(slow)
    assert engine.numbers().steps - before >= 100
    quick.cancel()
    list(pieces)
    engine.close()


def test_a_prompt_that_cannot_be_answered_is_refused_at_once(engine, generator):
    small = Engine(generator, slots=1, context=10)
    with pytest.raises(UserError, match="11 tokens are more than the context of 10"):
        small.submit([30] * 11, GREEDY)
    with pytest.raises(UserError, match="prompt: token id 512 is outside"):
        engine.submit([512], GREEDY)
    with pytest.raises(UserError, match="logit_bias: token id 512 is outside"):
        engine.submit([30], SamplingParams(logit_bias={512: 1.0}))
    full = engine.submit([30] * CONTEXT, GREEDY)
    assert [(chunk.ids, chunk.finish_reason) for chunk in full] == [([], "length")]


def test_a_subscriber_gets_every_piece_once_and_in_order(engine, generator, prompts):
    ticket, pieces, done = engine.submit(prompts[2], GREEDY), [], threading.Event()

    def take(piece):
        pieces.append(piece)
        if piece.finish_reason is not None:
            done.set()

    ticket.subscribe(take)
    assert done.wait(60)
    alone = generator.generate([prompts[2]], GREEDY)[0]
    assert (ids_of(pieces), "".join(p.text for p in pieces)) == (alone.ids, alone.text)


def test_a_subscriber_that_raises_loses_its_slot_and_nobody_elses(engine, generator, prompts):
    def broken(_):
        raise RuntimeError("a subscriber's own fault")

    engine.submit(prompts[2], LONG).subscribe(broken)
    other = engine.submit(prompts[1], GREEDY)
    assert ids_of(other) == generator.generate([prompts[1]], GREEDY)[0].ids
    until(lambda: engine.numbers().active == 0)
    assert engine.numbers().cancelled == 1


class Mask:
    """Allows the ids of a list, one after the other, then says that it is finished; `fails` raises at that one."""

    def __init__(self, ids, fails=None):
        self.ids, self.place, self.fails = ids, 0, fails

    def allowed(self):
        if self.place == self.fails:
            raise KeyError("the grammar broke")
        allowed = torch.zeros(self.ids[self.place] + 1, dtype=torch.bool)
        allowed[-1] = True
        return allowed

    def take(self, token):
        assert token == self.ids[self.place]
        self.place += 1

    def finished(self):
        return self.place == len(self.ids)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=1)])
def test_a_mask_is_obeyed_and_ends_its_answer(engine, prompts, params):
    wanted = [40, 300, 41, 299]
    chunks = list(engine.submit(prompts[2], params, mask=Mask(wanted)))
    assert (ids_of(chunks), chunks[-1].finish_reason) == (wanted, "stop")


def test_a_grammar_that_the_last_token_allowed_completes_has_come_to_its_end(engine, prompts):
    wanted = [40, 300, 41]
    for limit, reason in ((3, "stop"), (2, "length")):
        params = SamplingParams(temperature=0, max_new_tokens=limit)
        chunks = list(engine.submit(prompts[2], params, mask=Mask(wanted)))
        assert (ids_of(chunks), chunks[-1].finish_reason) == (wanted[:limit], reason)


def test_a_mask_that_raises_ends_its_own_request_with_that_error(engine, generator, prompts):
    ticket = engine.submit(prompts[2], GREEDY, mask=Mask([40, 41, 42], fails=2))
    other = engine.submit(prompts[1], GREEDY)
    with pytest.raises(KeyError, match="the grammar broke"):
        list(ticket)
    assert ids_of(other) == generator.generate([prompts[1]], GREEDY)[0].ids
    assert (engine.numbers().failed, engine.numbers().active) == (1, 0)


def test_a_mask_that_allows_only_what_is_never_said_is_an_error(engine, tokenizer, prompts):
    with pytest.raises(UserError, match="allows no token"):
        list(engine.submit(prompts[2], GREEDY, mask=Mask([tokenizer.pad_id])))


def test_a_fault_in_the_thread_reaches_every_ticket_and_later_callers(endless, monkeypatch):
    engine = Engine(endless, slots=1)
    engine.start()
    tickets = [engine.submit([30 + i], LONG) for i in range(3)]
    next(iter(tickets[0]))
    monkeypatch.setattr(engine._decoding, "step", lambda: 1 / 0)
    for ticket in tickets:
        with pytest.raises(RuntimeError, match="the engine has failed") as caught:
            list(ticket)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert not engine.ready
    assert isinstance(engine.fault, ZeroDivisionError)
    with pytest.raises(RuntimeError, match="has failed"):
        engine.submit([30], GREEDY)
    assert engine.numbers().failed == 3
    engine.close()


def test_closing_lets_those_that_are_in_finish_if_there_is_time(endless):
    for seconds, reason in ((60, "length"), (0, "cancelled")):
        engine = Engine(endless, slots=1)
        engine.start()
        tickets = [engine.submit([30], SamplingParams(max_new_tokens=300, seed=i)) for i in range(2)]
        next(iter(tickets[0]))
        engine.close(drain_seconds=seconds)
        assert [list(ticket)[-1].finish_reason for ticket in tickets] == [reason, reason]
        with pytest.raises(RuntimeError, match="closed"):
            engine.submit([30], GREEDY)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_schedule_gives_each_the_answer_it_gives_alone(generator, prompts, data):
    """Requests come at random moments, some are cancelled; all slots are free at the end, and the cache never grew."""
    decoding_slots = data.draw(st.integers(1, 4))
    engine = Engine(generator, slots=decoding_slots, prefill_chunk=data.draw(st.sampled_from([1, 5, 64])))
    before = [t.data_ptr() for t in engine._decoding._passes.cache.keys]
    engine.start()
    kept = []
    for _ in range(data.draw(st.integers(1, 8))):
        prompt = data.draw(st.sampled_from(prompts))
        params = SamplingParams(temperature=0, max_new_tokens=data.draw(st.integers(1, 15)))
        ticket = engine.submit(prompt, params)
        if data.draw(st.booleans()):
            time.sleep(data.draw(st.sampled_from([0, 0.001, 0.005])))
        if data.draw(st.integers(0, 3)) == 0:
            ticket.cancel()
        kept.append((ticket, prompt, params))
    for ticket, prompt, params in kept:
        alone, chunks = generator.generate([prompt], params)[0].ids, list(ticket)
        assert ids_of(chunks) == alone[: len(ids_of(chunks))]
        assert chunks[-1].finish_reason == "cancelled" or ids_of(chunks) == alone
    until(lambda: engine.numbers().active == engine.numbers().queued == 0)
    engine.close()
    assert engine._decoding.free == decoding_slots
    assert [t.data_ptr() for t in engine._decoding._passes.cache.keys] == before


def test_slots_that_do_not_fit_into_memory_are_refused_before_it_is_taken(generator, monkeypatch):
    monkeypatch.setattr("modicum.generate.passes.free_memory", lambda: 10**6)
    Engine(generator, slots=2, compiled=False)
    with pytest.raises(UserError, match="100 slots of 64 tokens take"):
        Engine(generator, slots=100, compiled=False)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("bits", [None, 8])
def test_slots_are_said_to_take_the_memory_that_they_take(tokenizer, bits, compiled):
    model = build_model(tokenizer.vocab_size)
    for name in matrix_names(model) if bits else []:
        shape = model.get_submodule(name).weight.shape
        install(model, name, RoundedMatrix(torch.zeros(shape, dtype=torch.int8), torch.ones(shape[0], 1), bits))
    cache = make_passes(model, slots=3, capacity=40, longest=8, compiled=compiled).cache
    taken = sum(part.nbytes for part in (*cache.keys, *cache.values))
    assert slot_bytes(model, 3, 40, compiled=compiled) == taken


def test_closing_what_was_never_started_leaves_nobody_waiting(generator):
    engine = Engine(generator, slots=1, compiled=False)
    ticket = engine.submit([30], GREEDY)
    engine.close()
    assert [chunk.finish_reason for chunk in ticket] == ["cancelled"]
