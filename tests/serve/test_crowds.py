"""Many at once, and those who go away: no slot is lost, nobody waits for ever, and a full house says when to return."""

import asyncio
import concurrent.futures
import gc
import json
import random
import threading
import time
from collections import Counter
from pathlib import Path

import openai
import pytest
from starlette.requests import ClientDisconnect

from modicum.generate import Chunk, SamplingParams
from modicum.serve import Limits, answers
from modicum.serve.answers import Answers, EventStream
from modicum.serve.errors import ApiError

ASK = {"model": "nano", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 900, "seed": 1}


@pytest.fixture(scope="module")
def endless(generator):
    """A request whose answer does not end before its limit."""
    return ASK | {"logit_bias": {str(i): -100 for i in generator.stop_ids}}


def begin(client, asked):
    """A stream whose answer has begun."""
    stream = client.chat.completions.create(**asked | {"stream": True})
    for chunk in stream:
        if chunk.choices[0].delta.content:
            return stream
    raise AssertionError("nothing was said")


def test_a_stream_that_is_closed_frees_its_slot(server, client, endless):
    streams = [begin(client, endless) for _ in range(4)]
    assert server.engine.numbers().active == 4
    cancelled = server.engine.numbers().cancelled
    for stream in streams:
        stream.close()
    server.wait_until_idle(3)
    assert server.engine.numbers().cancelled == cancelled + 4


def test_a_client_that_gives_up_waiting_frees_its_slot(server, endless):
    cancelled = server.engine.numbers().cancelled
    with server.client() as client, pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.15).chat.completions.create(**endless | {"n": 3})
    server.wait_until_idle(3)
    assert server.engine.numbers().cancelled == cancelled + 3


class Never:
    """A ticket of which nothing comes before it is cancelled; then what was held back for a stop string."""

    prompt_tokens = cached_tokens = 0

    def subscribe(self, callback):
        self.deliver, self.cancelled = callback, False

    def cancel(self):
        if not self.cancelled:
            self.cancelled = True
            self.deliver(Chunk("held", [7], [-1.0], "cancelled"))


async def one_event():
    yield {}


async def receive():
    await asyncio.sleep(60)


def respond(send, ticket, seconds):
    """Send a stream of one event."""

    async def respond():
        answers = Answers([ticket], Limits(seconds=seconds))
        scope = {"type": "http", "asgi": {"spec_version": "2.4"}}
        await asyncio.wait_for(EventStream(one_event(), answers)(scope, receive, send), 20)

    asyncio.run(respond())


def test_an_answer_that_nobody_began_to_read_is_cancelled():
    """The client is gone before the first byte could be sent: the events are never asked for."""

    async def send(_):
        raise OSError("gone")

    ticket = Never()
    with pytest.raises(ClientDisconnect):
        respond(send, ticket, 60)
    assert ticket.cancelled


def test_a_stream_that_nobody_reads_ends_when_its_time_is_up(monkeypatch):
    monkeypatch.setattr(answers, "LAST_WORDS", 0.1)
    sent = []

    async def send(message):
        sent.append(message["type"])
        if len(sent) == 2:
            await asyncio.sleep(60)

    ticket = Never()
    respond(send, ticket, 0.1)
    assert sent == ["http.response.start", "http.response.body"], "it has no end, so the connection is closed"
    assert ticket.cancelled


def test_what_was_held_back_is_given_when_time_is_up():
    async def read():
        return [piece async for piece in Answers([Never()], Limits(seconds=0.05))]

    assert asyncio.run(read()) == [(0, Chunk("held", [7], [-1.0], "length"))]


class Stuck(Never):
    """A ticket whose engine hears of nothing: it is in the midst of a step."""

    def cancel(self):
        self.cancelled = True


def test_an_engine_that_is_held_up_in_a_step_holds_no_request_beyond_its_time(monkeypatch):
    monkeypatch.setattr(answers, "LAST_WORDS", 0.05)

    async def read(said):
        asked = [Stuck(), Stuck()]
        given = Answers(asked, Limits(seconds=0.05))
        for piece in said:
            asked[0].deliver(piece)
        return [piece async for piece in given]

    begun = Chunk("a", [7], [-1.0], None)
    cut = Chunk("", [], [], "length")
    assert asyncio.run(read([begun])) == [(0, begun), (0, cut), (1, cut)]
    with pytest.raises(ApiError, match="too busy") as refused:
        asyncio.run(read([]))
    assert refused.value.status == 503


def test_a_full_queue_says_when_to_come_back(start, endless):
    with start(slots=1, max_queue=1) as server, server.client() as client:
        first = begin(client, endless)
        waiting = threading.Thread(target=lambda: client.chat.completions.create(**ASK | {"max_tokens": 3}))
        waiting.start()
        while server.engine.numbers().queued < 1:
            time.sleep(0.01)
        with pytest.raises(openai.InternalServerError) as refused:
            client.chat.completions.create(**ASK)
        assert refused.value.status_code == 503
        assert refused.value.response.headers["retry-after"] == "3"
        first.close()
        waiting.join(20)
        assert not waiting.is_alive(), "who waited is answered"
        server.wait_until_idle()


def test_n_answers_are_all_taken_in_or_none(start, endless):
    with start(slots=1, max_queue=2) as server, server.client() as client:
        stream = begin(client, endless)
        with pytest.raises(openai.InternalServerError):
            client.chat.completions.create(**ASK | {"n": 3})
        until = time.monotonic() + 5
        while server.engine.numbers().queued:
            assert time.monotonic() < until, "those who were let in before the refusal still wait"
        assert server.engine.numbers().active == 1, "the other answer goes on"
        stream.close()
        server.wait_until_idle()


def test_an_answer_that_takes_too_long_is_cut(start, endless):
    with start(limits={"seconds": 0.3}, slots=2) as server, server.client() as client:
        answer = client.chat.completions.create(**endless | {"n": 2})
        assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
        assert answer.usage.completion_tokens < 2 * 900
        server.wait_until_idle(3)


def test_an_answer_that_never_began_loses_none_of_those_beside_it(start, endless):
    with start(limits={"seconds": 0.3}, slots=1) as server, server.client() as client:
        first, second = client.chat.completions.create(**endless | {"n": 2}).choices
        assert (first.finish_reason, second.finish_reason) == ("length", "length")
        assert first.message.content
        assert not second.message.content
        server.wait_until_idle(3)


def test_the_text_of_an_answer_that_takes_too_long_is_whole(start, generator):
    """Nothing of it was certain, since all of it could still become the stop string."""
    (letter,) = generator.tokenizer.encode("a")
    with start(limits={"seconds": 0.3}) as server, server.client() as client:
        asked = ASK | {"logit_bias": {str(letter): 100}, "temperature": 0, "stop": 1000 * "a"}
        answer = client.chat.completions.create(**asked)
        assert answer.choices[0].finish_reason == "length"
        assert answer.choices[0].message.content == answer.usage.completion_tokens * "a" != ""


class Slow:
    """A grammar that allows everything, and takes its time."""

    def allowed(self):
        time.sleep(0.02)

    def take(self, token):
        pass

    def finished(self):
        return False


def test_who_waited_in_the_queue_for_too_long_is_told_to_come_back(start, generator):
    with start(limits={"seconds": 0.2}, slots=1) as server, server.client() as client:
        biases = dict.fromkeys(generator.stop_ids, -100.0)
        first = server.engine.submit([5], SamplingParams(max_new_tokens=900, logit_bias=biases), mask=Slow())
        with pytest.raises(openai.InternalServerError, match="too busy") as refused:
            client.chat.completions.create(**ASK)
        assert refused.value.status_code == 503
        assert refused.value.response.headers["retry-after"] == "3"
        with pytest.raises(openai.APIError, match="too busy"):
            list(client.chat.completions.create(**ASK | {"stream": True}))
        assert not first.request.answer.finish_reason, "the slot was never free"
        first.cancel()
        server.wait_until_idle()


def test_more_answers_than_the_server_ever_takes_are_no_matter_of_time(start):
    with start(slots=1, max_queue=0) as server, server.client() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**ASK | {"n": 2})
        assert refused.value.param == "n"
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model="nano", prompt=["a", "b"], max_tokens=1)
        assert refused.value.param == "prompt"
        assert client.chat.completions.create(**ASK | {"n": 1, "max_tokens": 1}).choices


def test_it_says_loading_until_the_model_answers(start):
    go = threading.Event()

    def load():
        go.wait(30)
        raise RuntimeError("no such weights")

    with start(load=load, wait=False) as server, server.http() as http:
        assert (http.get("/health").status_code, http.get("/health").json()) == (503, {"status": "loading"})
        response = http.post("/v1/chat/completions", json=ASK)
        assert (response.status_code, response.headers["retry-after"]) == (503, "2")
        assert http.get("/metrics").status_code == 200
        go.set()
        while http.get("/health").json() == {"status": "loading"}:
            time.sleep(0.01)
        assert http.get("/health").json() == {"status": "failed"}


def test_a_crowd_that_asks_leaves_and_errs_leaks_nothing(server, endless):
    """Whole answers, streams left early, and refusals at once, more of them than there are slots."""

    def one(number):
        with server.client() as client:
            if number % 3 == 0:
                client.chat.completions.create(**ASK | {"max_tokens": 6})
            elif number % 3 == 1:
                begin(client, endless).close()
            else:
                with pytest.raises(openai.BadRequestError):
                    client.chat.completions.create(**ASK | {"temperature": 9})

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        list(pool.map(one, range(18)))
    server.wait_until_idle()
    numbers = server.engine.numbers()
    assert numbers.requests == numbers.finished + numbers.cancelled + numbers.failed
    assert numbers.failed == 0


@pytest.mark.slow
def test_a_day_of_such_crowds_takes_no_memory(server, endless):
    """Answers, streams left early, bad bodies and full queues, at random: after the first third nothing grows."""

    def one(number):
        dice = random.Random(number)
        messages = [{"role": "user", "content": "x" * dice.randint(1, 300)}]
        asked = ASK | {"max_tokens": dice.randint(1, 12), "seed": number, "messages": messages}
        with server.http() as http:
            kind = dice.random()
            if kind < 0.5:
                response = http.post("/v1/chat/completions", json=asked | {"n": dice.choice([1, 1, 8])})
                statuses.append(response.status_code)
            elif kind < 0.8:
                with http.stream("POST", "/v1/chat/completions", json=endless | {"stream": True}) as response:
                    statuses.append(response.status_code)
                    if response.status_code == 200:
                        for _, _ in zip(response.iter_lines(), range(dice.randint(0, 9)), strict=False):
                            pass
            else:
                body = dice.choice([b"{", b"[]", b'{"model": "nano"}', json.dumps(asked | {"n": -1}).encode()])
                headers = {"Content-Type": "application/json"}
                statuses.append(http.post("/v1/chat/completions", content=body, headers=headers).status_code)

    statuses, sizes = [], []
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        for start in range(0, 3000, 500):
            list(pool.map(one, range(start, start + 500)))
            server.wait_until_idle()
            gc.collect()
            sizes.append(int(Path("/proc/self/statm").read_text().split()[1]))
    print(Counter(statuses), sizes)
    assert set(statuses) == {200, 400, 503}
    numbers = server.engine.numbers()
    assert numbers.requests == numbers.finished + numbers.cancelled + numbers.failed
    assert max(sizes[2:]) <= 1.05 * sizes[1]
