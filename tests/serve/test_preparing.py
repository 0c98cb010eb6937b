import asyncio
import threading
from types import SimpleNamespace

import pytest

from modicum.serve.errors import ApiError
from modicum.serve.limits import Limits
from modicum.serve.prompts import chat_prompt
from modicum.serve.requests import Message
from modicum.serve.service import Service
from modicum.tokenizer import Tokenizer

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def long_calls(**change):
    function = {"name": "f", "arguments": "{}"} | change
    return {"role": "assistant", "tool_calls": [CALL | {"function": function}]}


def refused(generator, messages):
    with pytest.raises(ApiError) as error:
        chat_prompt(generator, [Message(**message) for message in messages], [])
    assert (error.value.status, error.value.param) == (400, "messages")
    return error.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    "messages", [1024 * [{"role": "user", "content": ""}], [long_calls() | {"tool_calls": 1023 * [CALL]}]]
)
def test_more_messages_and_calls_than_the_context_has_tokens_are_refused_unread(generator, monkeypatch, messages):
    assert generator.context == 1024
    monkeypatch.setattr("modicum.serve.prompts._plain", None)
    assert refused(generator, messages)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "x" * 100_000},
        {"role": "user", "content": "x", "name": "x" * 100_000},
        {"role": "tool", "content": "x", "tool_call_id": "x" * 100_000},
        long_calls(name="x" * 100_000),
        long_calls(arguments='{"x": "' + "x" * 100_000 + '"}'),
        {"role": "assistant", "tool_calls": [CALL | {"id": "x" * 100_000}]},
    ],
)
def test_every_text_of_a_message_is_held_against_the_context_before_it_is_rendered(generator, monkeypatch, message):
    monkeypatch.setattr(Tokenizer, "render", None)
    assert refused(generator, [message])


def test_a_prompt_is_what_is_trained_on_but_costs_no_mask(generator, monkeypatch):
    messages = [{"role": role, "content": "a b"} for role in ("system", *("user", "assistant") * 9, "user")]
    wanted = generator.tokenizer.render(messages, add_generation_prompt=True).ids
    held_against = []
    monkeypatch.setattr("modicum.tokenizer.chat._is_supervised", lambda _, __, regions: held_against.extend(regions))
    assert chat_prompt(generator, [Message(**message) for message in messages], []).ids == wanted
    assert held_against == []


def test_nothing_else_waits_behind_those_that_are_prepared():
    async def crowd():
        service, door = Service(load=lambda: None, limits=Limits()), threading.Event()
        service._served = SimpleNamespace(engine=SimpleNamespace(room=50, close=lambda **_: None, alive=False))
        inside = [asyncio.create_task(service.prepare(door.wait)) for _ in range(50)]
        await asyncio.sleep(0.05)
        try:
            async with asyncio.timeout(20):
                await asyncio.to_thread(lambda: None)
                await service.close()
        finally:
            door.set()
        await asyncio.gather(*inside)

    asyncio.run(crowd())


def test_as_many_requests_are_prepared_at_once_as_the_engine_has_room_for():
    async def crowd():
        service, door = Service(load=lambda: None, limits=Limits()), threading.Event()
        service._served = SimpleNamespace(engine=SimpleNamespace(room=3))
        inside = [asyncio.create_task(service.prepare(door.wait)) for _ in range(3)]
        await asyncio.sleep(0.05)
        with pytest.raises(ApiError) as refused:
            await service.prepare(lambda: None)
        door.set()
        assert await asyncio.gather(*inside) == [True] * 3
        assert await service.prepare(lambda: "room again") == "room again"
        return refused.value

    refused = asyncio.run(crowd())
    assert refused.status == 503
    assert "Retry-After" in refused.headers


def test_a_request_that_is_given_up_counts_until_its_work_ends():
    async def crowd():
        service, door = Service(load=lambda: None, limits=Limits()), threading.Event()
        engine, grammars = SimpleNamespace(room=1, alive=False), SimpleNamespace(compiling=False)
        service._served = SimpleNamespace(engine=engine, grammars=grammars)
        inside = asyncio.create_task(service.prepare(door.wait))
        await asyncio.sleep(0.05)
        inside.cancel()
        await asyncio.wait([inside])
        with pytest.raises(ApiError):
            await service.prepare(lambda: None)
        assert service.busy
        door.set()
        async with asyncio.timeout(20):
            while service.busy:
                await asyncio.sleep(0.01)
        assert await service.prepare(lambda: "room again") == "room again"

    asyncio.run(crowd())
