"""`modicum serve` as a process: what it refuses, how it says that it is ready, and how it ends."""

import asyncio
import concurrent.futures
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import httpx2
import pytest
from processes import free_port, start_process, wait_until_ready

from modicum.generate import Engine
from modicum.generate.decoding import Decoding
from modicum.serve import Limits, Served, ServerSettings, Service, model_name, serve
from modicum.serve import server as serve_server
from modicum.store import UserError


def wait_until_draining(client):
    until = time.monotonic() + 10
    while client.get("/health").json() != {"status": "draining"}:
        assert time.monotonic() < until, "it takes no notice of the signal"


def test_sigterm_lets_answers_come_to_their_end_and_the_log_holds_no_prompts(checkpoint, generator):
    port = free_port()
    process = start_process(checkpoint, "--port", port, "--slots", 1, MODICUM_API_KEY="the-key")
    forbidden = {str(i): -100 for i in generator.stop_ids}
    asked = {
        "model": "first-sft",
        "messages": [{"role": "user", "content": "a-secret-question"}],
        "max_tokens": 900,
        "n": 3,
        "logit_bias": forbidden,
        "stream": True,
    }
    headers = {"Authorization": "Bearer the-key"}
    with httpx2.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60) as client:
        wait_until_ready(client, process)
        assert client.get("/v1/models", headers={"Authorization": ""}).status_code == 401
        with client.stream("POST", "/v1/chat/completions", json=asked) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            wait_until_draining(client)
            late = client.post("/v1/chat/completions", json=asked)
            said = [line for line in lines if line.startswith("data: ")]
    assert (late.status_code, late.json()["error"]["code"]) == (503, "shutting_down")
    assert int(late.headers["retry-after"]) > 0
    assert said[-1] == "data: [DONE]"
    choices = [json.loads(line[6:])["choices"][0] for line in said[:-1]]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"] * 3
    output, log = process.communicate(timeout=30)
    assert process.returncode == 0, log
    assert "/v1/chat/completions" in output + log
    assert "a-secret-question" not in output + log
    assert "the-key" not in output + log


@pytest.mark.parametrize("stream", [True, False])
def test_what_does_not_end_in_time_is_cut_with_an_error(checkpoint, generator, stream):
    port = free_port()
    process = start_process(checkpoint, "--port", port, "--slots", 1, "--drain-seconds", 1)
    asked = {"model": "first-sft", "prompt": "a", "max_tokens": 1000, "n": 8, "stream": stream}
    asked["logit_bias"] = {str(i): -100 for i in generator.stop_ids}
    with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        wait_until_ready(client, process)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answer = pool.submit(client.post, "/v1/completions", json=asked)
            while "modicum_active_requests 1" not in client.get("/metrics").text:
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            begun = time.monotonic()
            response = answer.result(30)
    assert time.monotonic() - begun < 10
    if stream:
        *_, last, done = (line for line in response.text.splitlines() if line)
        assert (json.loads(last[6:])["error"]["code"], done) == ("shutting_down", "data: [DONE]")
    else:
        assert (response.status_code, response.json()["error"]["code"]) == (503, "shutting_down")
        assert "retry-after" in response.headers
    _, log = process.communicate(timeout=30)
    assert process.returncode == 0, log


def test_a_second_interrupt_waits_for_nothing(checkpoint, generator):
    port = free_port()
    process = start_process(checkpoint, "--port", port, "--slots", 1, "--drain-seconds", 600)
    asked = {"model": "first-sft", "prompt": "a", "max_tokens": 1000, "n": 8, "stream": True}
    asked["logit_bias"] = {str(i): -100 for i in generator.stop_ids}
    with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        wait_until_ready(client, process)
        with client.stream("POST", "/v1/completions", json=asked) as response:
            next(response.iter_lines())
            process.send_signal(signal.SIGINT)
            wait_until_draining(client)
            begun = time.monotonic()
            process.send_signal(signal.SIGINT)
            _, log = process.communicate(timeout=30)
    assert (time.monotonic() - begun < 3, process.returncode) == (True, 0), log


@pytest.mark.parametrize("missing", ["fastapi", "llguidance"])
def test_what_is_not_installed_is_named_with_the_way_to_get_it(missing):
    script = f"import sys; sys.modules['{missing}'] = None; sys.argv = ['modicum', 'serve', 'x']; "
    script += "from modicum.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip() == f"error: serving needs {missing}: pip install 'modicum[serve]'"


def test_prompts_are_logged_when_that_is_asked_for(start, caplog):
    caplog.set_level("INFO")
    for wanted in (False, True):
        with start(log_prompts=wanted) as server, server.client() as client:
            client.completions.create(model="nano", prompt="a-question", max_tokens=1)
        assert ("a-question" in caplog.text) == wanted


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"runs": Path("nowhere")}, "--runs nowhere"),
        ({"origins": ["*"]}, "--cors"),
        ({"origins": ["https://a.example/path"]}, "--cors"),
        ({"hosts": ["https://a.example"]}, "--allow-host https://a.example"),
        ({"hosts": ["*"]}, "--allow-host"),
        ({"api_key_file": Path("nowhere")}, "--api-key-file nowhere"),
        ({"api_key_file": Path("/dev/null")}, "expected a key a line"),
        ({"host": "no such host"}, "cannot listen"),
    ],
)
def test_a_setting_that_cannot_be_is_the_users_to_mend(checkpoint, settings, word):
    with pytest.raises(UserError, match=word):
        serve(checkpoint, ServerSettings(**settings))


def test_keys_are_the_lines_of_their_file_whatever_program_wrote_it(tmp_path):
    (tmp_path / "keys").write_text("\ufeffone\r\n\n two \n", "utf-8")
    assert serve_server._keys(tmp_path / "keys") == ["one", "two"]


def test_an_engine_that_dies_ends_the_process_with_its_fault_in_the_log(checkpoint, monkeypatch, caplog):
    monkeypatch.setattr(Decoding, "warm", lambda _: 1 / 0)
    late = threading.Timer(60, os.kill, (os.getpid(), signal.SIGTERM))
    late.start()
    with pytest.raises(ZeroDivisionError):
        serve(checkpoint, ServerSettings(port=0, compiled=False))
    late.cancel()
    assert "the engine has failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_what_is_told_to_end_while_it_loads_does_not_start(generator):
    began, go_on = threading.Event(), threading.Event()
    engine = Engine(generator, slots=1, compiled=False)

    def load():
        began.set()
        go_on.wait(20)
        return Served("nano", generator, engine, Limits())

    async def end_early():
        service = Service(load, Limits())
        loading = asyncio.ensure_future(service.start())
        await asyncio.to_thread(began.wait, 20)
        await service.close()
        go_on.set()
        await loading
        return service

    service = asyncio.run(end_early())
    assert (service.served, service.fault, service.state) == (None, None, "draining")
    assert not engine._thread.is_alive()
    assert engine._thread.ident is None  # it never was


def test_within_another_program_it_returns_and_says_that_a_thread_is_left(checkpoint, monkeypatch):
    go_on = threading.Event()

    def slow(*_, **__):
        os.kill(os.getpid(), signal.SIGTERM)
        go_on.wait(20)

    monkeypatch.setattr("modicum.serve.server.Engine", slow)
    try:
        assert serve(checkpoint, ServerSettings(port=0)) is True
    finally:
        go_on.set()


@pytest.mark.parametrize("fails", [False, True])
def test_a_fault_while_it_closes_is_told(checkpoint, monkeypatch, fails):
    async def stop(service):
        await asyncio.sleep(0.2)  # it listens by now
        service.on_fault()

    async def close(_, **__):
        return 1 / 0 if fails else None

    monkeypatch.setattr(Service, "start", stop)
    monkeypatch.setattr(Service, "close", close)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        assert serve(checkpoint, ServerSettings(port=0)) is False


SLOW = """
import sys, torch
from modicum.cli import main
from modicum.generate.decoding import Decoding
from modicum.serve import chat, server

def slow(*_, **__):
    print("it began", flush=True)
    numbers = torch.ones(200, 200)
    while True:  # in native code, which would abort a Python that ends beside it
        numbers = numbers @ numbers * 0

stages = {"load": (server, "Engine"), "warm": (Decoding, "warm"), "prepare": (chat, "chat_prompt")}
setattr(*stages[sys.argv.pop(1)], slow)
main()
"""


@contextmanager
def slow_process(checkpoint, port, stage):
    """One that never comes to the end of a stage."""
    command = [sys.executable, "-c", SLOW, stage, "serve", str(checkpoint), "--port", str(port), "--eager"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("stage", ["load", "warm"])
def test_what_is_not_ready_yet_is_not_waited_for(checkpoint, stage, number):
    with slow_process(checkpoint, free_port(), stage) as process:
        assert process.stdout.readline() == "it began\n", process.communicate()
        begun = time.monotonic()
        process.send_signal(number)
        _, log = process.communicate(timeout=30)
    assert (time.monotonic() - begun < 10, process.returncode) == (True, 0), log


def test_a_second_interrupt_does_not_wait_for_a_prompt_that_is_made(checkpoint):
    port = free_port()
    asked = {"model": "first-sft", "messages": [{"role": "user", "content": "go"}]}
    address = {"base_url": f"http://127.0.0.1:{port}", "timeout": 60}
    with (
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        httpx2.Client(**address) as client,
        slow_process(checkpoint, port, "prepare") as process,
    ):
        wait_until_ready(client, process)
        answer = pool.submit(client.post, "/v1/chat/completions", json=asked)
        assert "it began\n" in process.stdout
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, log = process.communicate(timeout=30)
        assert (time.monotonic() - begun < 3, process.returncode) == (True, 0), log
        concurrent.futures.wait([answer], 30)  # whatever it is told


def test_a_proxys_name_is_let_in_where_it_is_named(checkpoint):
    port = free_port()
    process = start_process(checkpoint, "--port", port, "--allow-host", "chat.example.org")
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            wait_until_ready(client, process)
            hosts = ("chat.example.org", "Chat.example.org:443", "127.0.0.1", "other.example.org")
            statuses = [client.get("/health", headers={"Host": host}).status_code for host in hosts]
    finally:
        process.terminate()
    process.communicate(timeout=30)
    assert statuses == [200, 200, 200, 421]


def test_a_port_that_is_taken_is_the_users_to_mend(checkpoint):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"--port {port}: cannot listen"):
            serve(checkpoint, ServerSettings(port=port))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("runs/quickstart/sft/checkpoints/last", "quickstart-sft"),
        ("/models/my model (1)", "my-model-1"),
        ("/", "model"),
    ],
)
def test_a_models_name_holds_no_path(path, name):
    assert model_name(Path(path)) == name
