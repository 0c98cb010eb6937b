"""`modicum serve` as a process: what it refuses, how it says that it is ready, and how it ends."""

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest

from modicum.checkpoint import save_checkpoint
from modicum.serve import ServerSettings, model_name, serve
from modicum.store import UserError


@pytest.fixture(scope="module")
def checkpoint(generator, tmp_path_factory):
    model = generator.model
    return save_checkpoint(
        tmp_path_factory.mktemp("runs") / "first" / "sft" / "checkpoints",
        1,
        config=model.config,
        weights=model.state_dict(),
        tokenizer=generator.tokenizer,
        chat=True,
        training=None,
    )


def start_process(checkpoint, *options, **environment):
    command = [sys.executable, "-m", "modicum", "serve", str(checkpoint), "--eager", *map(str, options)]
    kept = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"} | environment
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=kept)


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def wait_until_ready(client, process):
    for _ in range(1500):
        assert process.poll() is None, process.stderr.read()
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx2.TransportError:
            pass
        time.sleep(0.02)
    raise AssertionError("not ready in time")


def test_sigterm_lets_an_answer_come_to_its_end_and_the_log_holds_no_prompts(checkpoint, generator):
    port = free_port()
    process = start_process(checkpoint, "--port", port, MODICUM_API_KEY="the-key")
    forbidden = {str(i): -100 for i in generator.stop_ids}
    asked = {
        "model": "first-sft",
        "messages": [{"role": "user", "content": "a-secret-question"}],
        "max_tokens": 900,
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
            said = [line for line in lines if line.startswith("data: ")]
    assert said[-1] == "data: [DONE]"
    assert json.loads(said[-2][6:])["choices"][0]["finish_reason"] == "length"
    output, log = process.communicate(timeout=30)
    assert process.returncode == 0, log
    assert "/v1/chat/completions" in output + log
    assert "a-secret-question" not in output + log
    assert "the-key" not in output + log


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
        ({"api_key_file": Path("nowhere")}, "--api-key-file nowhere"),
        ({"api_key_file": Path("/dev/null")}, "expected a key a line"),
        ({"host": "no such host"}, "cannot listen"),
    ],
)
def test_a_setting_that_cannot_be_is_the_users_to_mend(checkpoint, settings, word):
    with pytest.raises(UserError, match=word):
        serve(checkpoint, ServerSettings(**settings))


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
