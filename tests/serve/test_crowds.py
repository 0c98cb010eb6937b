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

from modicum.serve.answers import EventStream

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


def test_an_answer_that_nobody_began_to_read_is_cancelled():
    """The client is gone before the first byte could be sent: the events are never asked for."""
    cancelled = []

    class Nobodys:
        def cancel(self):
            cancelled.append(True)

    async def events():
        yield {}

    async def send(_):
        raise OSError("gone")

    async def receive():
        await asyncio.sleep(60)

    scope = {"type": "http", "asgi": {"spec_version": "2.4"}}
    with pytest.raises(ClientDisconnect):
        asyncio.run(EventStream(events(), Nobodys())(scope, receive, send))
    assert cancelled


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
            client.chat.completions.create(**ASK | {"n": 4})
        until = time.monotonic() + 5
        while server.engine.numbers().queued:
            assert time.monotonic() < until, "those who were let in before the refusal still wait"
        assert server.engine.numbers().active == 1, "the other answer goes on"
        stream.close()
        server.wait_until_idle()


def test_an_answer_that_takes_too_long_is_cut(start, endless):
    with start(limits={"seconds": 0.2}, slots=2) as server, server.client() as client:
        answer = client.chat.completions.create(**endless | {"n": 2})
        assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
        assert answer.usage.completion_tokens < 2 * 900
        server.wait_until_idle(3)


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
