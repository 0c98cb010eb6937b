"""Counts in Prometheus' text format, as a reader of that format takes them."""

import re

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
        first = http.post("/v1/chat/completions", json=ASK).json()["usage"]
        http.post("/v1/chat/completions", json=ASK | {"stream": True})
        http.post("/v1/chat/completions", json=ASK | {"temperature": 7})
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
    assert grown("modicum_first_byte_seconds_count") == 2
    assert grown("modicum_request_seconds_count") == 3
    assert after["modicum_active_requests", None] == 0


def test_buckets_add_up(start):
    with start() as server, server.http() as http:
        http.post("/v1/chat/completions", json=ASK)
        found = read(http)
    counts = [value for (name, _), value in found.items() if name == "modicum_request_seconds_bucket"]
    assert counts == sorted(counts)
    assert counts[-1] == found["modicum_request_seconds_count", None] == 1
