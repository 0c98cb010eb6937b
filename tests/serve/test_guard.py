"""Who may come in, how much he may bring, and what a browser is told."""

import json
import time

import pytest

from modicum.serve import Access

ASK = {"model": "nano", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
CHAT = "/v1/chat/completions"
ORIGIN = "https://chat.example.org"


@pytest.fixture(scope="module")
def locked(start):
    access = Access(
        keys=("first-key", "second-kéy"), hosts=("127.0.0.1", "localhost", "chat.Example.org"), origins=(ORIGIN,)
    )
    with start(access=access, limits={"body_bytes": 2000, "body_seconds": 0.5}) as server:
        yield server


@pytest.fixture
def http(locked):
    with locked.http() as http:
        yield http


def bearer(key):
    return {"Authorization": b"Bearer " + key.encode()}


@pytest.mark.parametrize("key", ["first-key", "second-kéy"])
def test_each_key_opens(http, key):
    assert http.post(CHAT, json=ASK, headers=bearer(key)).status_code == 200
    assert http.get("/v1/models", headers=bearer(key)).status_code == 200


@pytest.mark.parametrize("headers", [{}, bearer("first-ke"), bearer("first-key2"), {"Authorization": "first-key"}])
@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/metrics", "/openapi.json", "/runs", "/nowhere"])
def test_without_a_key_nothing_is_told(http, headers, path):
    response = http.request("POST" if path == CHAT else "GET", path, headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"


def test_health_the_page_and_preflights_need_no_key(http):
    asked = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    assert http.get("/health").status_code == 200
    assert http.get("/").status_code == 200
    assert http.options(CHAT, headers=asked).status_code == 200


def test_only_a_named_site_may_call(http, server):
    def allowed(client, origin):
        response = client.post(CHAT, json=ASK, headers=bearer("first-key") | {"Origin": origin})
        return response.headers.get("access-control-allow-origin")

    assert allowed(http, ORIGIN) == ORIGIN
    assert allowed(http, "https://evil.example.org") is None
    with server.http() as other:
        assert allowed(other, ORIGIN) is None


def test_a_refusal_too_can_be_read_by_a_named_site(http):
    response = http.post(CHAT, json=ASK, headers={"Origin": ORIGIN})
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (401, ORIGIN)


@pytest.mark.parametrize("host", ["evil.example.org", "127.0.0.1.evil.example.org", ""])
def test_another_sites_name_for_this_machine_is_refused(http, host):
    assert http.get("/health", headers={"Host": host}).status_code == 421


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8000", "localhost:1", "LocalHost", "Chat.example.ORG:443"])
def test_this_machines_names_are_known(http, host):
    assert http.get("/health", headers={"Host": host}).status_code == 200


def test_a_large_body_is_refused_also_without_a_length(http):
    large = json.dumps(ASK | {"user": "x" * 3000}).encode()
    assert http.post(CHAT, content=large, headers=bearer("first-key")).status_code == 413
    pieces = (large[i : i + 500] for i in range(0, len(large), 500))
    headers = bearer("first-key") | {"Content-Type": "application/json"}
    response = http.post(CHAT, content=pieces, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


def test_a_body_that_does_not_come_is_not_waited_for(http):
    def slow():
        yield b'{"model": '
        time.sleep(1.5)
        yield b'"nano"}'

    headers = bearer("first-key") | {"Content-Type": "application/json"}
    assert http.post(CHAT, content=slow(), headers=headers).status_code == 408


@pytest.mark.parametrize("path", ["/", "/health", CHAT, "/nowhere"])
def test_a_browser_is_told_to_load_nothing_from_elsewhere(server, path):
    with server.http() as http:
        headers = http.get(path).headers
    policy = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"


def test_a_body_that_drips_is_held_against_one_clock(http):
    def dripping():
        for byte in json.dumps(ASK).encode():
            time.sleep(0.05)
            yield bytes([byte])

    headers = {**bearer("first-key"), "Content-Type": "application/json"}
    assert http.post(CHAT, content=dripping(), headers=headers).status_code == 408


def test_what_is_kept_of_a_prompt_is_told_to_its_own_key_alone(http):
    def cached(key):
        asked = ASK | {"messages": [{"role": "user", "content": "my secret is that I like ports"}]}
        usage = http.post(CHAT, json=asked, headers=bearer(key)).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    first, again = cached("first-key"), cached("first-key")
    stranger, own = cached("second-kéy"), cached("second-kéy")
    assert max(first, stranger) < again == own
