"""Counts in Prometheus' text format, as a reader of that format takes them."""

import asyncio
import re
from types import SimpleNamespace

import pytest

from modicum.generate import SamplingParams
from modicum.serve.metrics import Metrics

CHAT = "/v1/chat/completions"
ASK = {"model": "nano", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0}
SAMPLE = re.compile(r'^(modicum_[a-z_]+)(?:\{((?:[a-z]+="[^"\n]*",?)+)\})? ([0-9.]+)$')


def read(http):
    """Name and labels to value; every line is a comment or a sample of a declared kind."""
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    kinds, found = {}, {}
    for line in response.text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name not in kinds
            kinds[name] = kind
        elif not line.startswith("# HELP "):
            name, labels, value = SAMPLE.fullmatch(line).groups()
            assert (re.sub("_(bucket|sum|count)$", "", name) in kinds) or name in kinds
            found[name, labels] = float(value)
    return found


def test_what_happens_is_counted(start):
    with start() as server, server.http() as http:
        before = read(http)
        assert before["modicum_slots", None] == 4
        first = http.post(CHAT, json=ASK).json()["usage"]
        http.post(CHAT, json=ASK | {"stream": True})
        http.post(CHAT, json=ASK | {"temperature": 7})
        http.get("/no/such/path/1")
        http.get("/no/such/path/2")
        after = read(http)

    def grown(name, labels=None):
        return after[name, labels] - before.get((name, labels), 0)

    route = 'route="/v1/chat/completions"'
    assert grown("modicum_http_responses_total", f'{route},status="200"') == 2
    assert grown("modicum_http_responses_total", f'{route},status="400"') == 1
    assert grown("modicum_http_responses_total", 'route="other",status="404"') == 2
    assert grown("modicum_prompt_tokens_total") == 2 * first["prompt_tokens"]
    assert grown("modicum_generated_tokens_total") == 2 * first["completion_tokens"]
    assert grown("modicum_prefix_hits_total") == 1
    assert grown("modicum_time_to_first_token_seconds_count") == 2
    assert grown("modicum_request_seconds_count") == 3
    assert after["modicum_active_requests", None] == 0


def test_tokens_are_counted_while_an_answer_comes_and_its_first_one_is_timed(start, generator):
    asked = ASK | {"max_tokens": 900, "stream": True, "logit_bias": {str(i): -100 for i in generator.stop_ids}}
    with start(slots=1) as server, server.http() as http, http.stream("POST", CHAT, json=asked) as first:
        lines = first.iter_lines()
        next(line for line in lines if '"content": "' in line and '"content": ""' not in line)
        found = read(http)
        assert found["modicum_generated_tokens_total", None] >= 1
        assert found["modicum_engine_finished_total", None] == 0
        assert found["modicum_time_to_first_token_seconds_count", None] == 1


def test_prompts_that_never_got_a_slot_are_not_counted(start, generator):
    params = SamplingParams(max_new_tokens=900, logit_bias=dict.fromkeys(generator.stop_ids, -100.0))
    with start(slots=1) as server, server.http() as http:
        first, second = (server.engine.submit([5] * 7, params) for _ in range(2))
        next(iter(first))
        second.cancel()
        first.cancel()
        server.wait_until_idle()
        assert read(http)["modicum_prompt_tokens_total", None] == 7


def test_requests_to_the_api_are_timed_however_they_end_and_no_others():
    async def broken(scope, *_):
        scope["route"] = SimpleNamespace(path=scope["path"])
        raise OSError("the client is gone")

    metrics = Metrics()
    for path in (CHAT, "/runs"):
        with pytest.raises(OSError, match="gone"):
            asyncio.run(metrics.around(broken)({"type": "http", "method": "POST", "path": path}, None, None))
    assert "modicum_request_seconds_count 1" in metrics.page(None).splitlines()


def test_buckets_add_up(start):
    with start() as server, server.http() as http:
        http.post(CHAT, json=ASK)
        found = read(http)
    counts = [value for (name, _), value in found.items() if name == "modicum_request_seconds_bucket"]
    assert counts == sorted(counts)
    assert counts[-1] == found["modicum_request_seconds_count", None] == 1
