"""Requests of every bad kind at a server of a small random model: what it answers, what it keeps, and what it leaks.

    python benchmarks/hostile_requests.py                       10,000 requests; two minutes on two cores
    python benchmarks/hostile_requests.py --requests 2000 --clients 48

Whole answers, streams left early or before their first byte, bodies that are cut off, no JSON or no request, schemas,
and more askers than there are slots and places in the queue. The status is 1 when a slot or an answer is lost, when
the server's memory after the first thousand grows by more than 5 %, when a status is 5xx but not 503 with Retry-After,
and when the server does not answer any more in the end.
"""

import argparse
import gzip
import http.client
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from modicum.checkpoint import save_checkpoint
from modicum.model import Decoder, ModelConfig
from modicum.tokenizer import train_tokenizer

TEXTS = Path(__file__).parents[1] / "data" / "small" / "instruct.jsonl.gz"
STEP, ALLOWED = 1000, 1.05
PATHS = ("/v1/chat/completions", "/v1/completions")
BAD = (
    b"{", b"[]", b"\xff", b'{"model": "nano"}', b'{"model": "other", "messages": []}', b"[" * 20_000,
    b'{"model": "nano", "messages": [{"role": "user", "content": 3}]}', b'{"model": "nano", "temperature": NaN}',
    b'{"model": "nano", "messages": [{"role": "user", "content": "a"}], "guided_json": {}}',
    b'{"model": "nano", "messages": [{"role": "user", "content": "' + b"a " * 4000 + b'"}]}',
)  # fmt: skip
SCHEMAS = (
    {"type": "integer", "minimum": 0, "maximum": 9}, {"enum": ["yes", "no"]}, {"type": "object", "requird": ["a"]},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}, {"type": "string", "pattern": "(?=a)"},
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="modicum-") as folder:
        port = _free_port()
        command = [sys.executable, "-m", "modicum", "serve", str(_checkpoint(Path(folder))), "--port", str(port)]
        command += ["--eager", "--slots", "4", "--max-queue", "12"]
        server = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            sys.exit(_run(given, port, server))
        finally:
            server.terminate()
            server.wait(60)


def _run(given: argparse.Namespace, port: int, server: "subprocess.Popen[bytes]") -> int:
    _wait_until(lambda: server.poll() is None and _get(port, "/health")[0] == 200, 60)
    begun, counts, sizes = time.perf_counter(), Counter[str](), []
    with ThreadPoolExecutor(given.clients) as pool:
        for start in range(0, given.requests, STEP):
            numbers = range(start, min(start + STEP, given.requests))
            counts.update(pool.map(lambda number: _one(port, random.Random(given.seed * 10**9 + number)), numbers))
            _wait_until(lambda: _figures(port)["active_requests"] + _figures(port)["queued_requests"] == 0, 60)
            sizes.append(_memory(server.pid))
            print(f"{numbers.stop:>7,} requests, {time.perf_counter() - begun:6.1f} s, {sizes[-1] / 1e6:.1f} MB")
    figures = _figures(port)
    ended = sum(figures[f"engine_{how}_total"] for how in ("finished", "cancelled", "failed"))
    lost = figures["engine_requests_total"] - ended
    grown = max(sizes) / sizes[0]
    wrong = sorted(kind for kind in counts if kind.startswith(("5", "no answer")) and kind != "503, Retry-After")
    print("\n| answered | requests |\n|---|---|")
    for kind, count in sorted(counts.items()):
        print(f"| {kind} | {count:,} |")
    print(
        f"\nslots taken at the end: {figures['active_requests']:g} of {figures['slots']:g}\n"
        f"answers asked of the engine: {figures['engine_requests_total']:,g}; not ended: {lost:g}; failed: "
        f"{figures['engine_failed_total']:g}\nmemory after the first {STEP:,}: {sizes[0] / 1e6:.1f} MB; at the end: "
        f"{sizes[-1] / 1e6:.1f} MB; at most {100 * (grown - 1):+.1f} %"
    )
    healthy = _get(port, "/health")[0] == 200
    return int(bool(not healthy or lost or wrong or grown > ALLOWED or figures["active_requests"]))


def _one(port: int, dice: random.Random) -> str:
    """One request; how it was answered."""
    path, kind = dice.choice(PATHS), dice.random()
    text = "x" * dice.randint(1, 300)
    asked = {
        "model": "nano",
        "max_tokens": dice.randint(0, 12),
        "seed": dice.randint(0, 99),
        "n": dice.choice([1, 1, 4, 8]),
    }
    asked |= {"prompt": text} if path == PATHS[1] else {"messages": [{"role": "user", "content": text}]}
    if kind < 0.45:
        return _ask(port, path, asked | {"stream": dice.random() < 0.5})
    if kind < 0.65:  # left while it goes on
        lines = dice.choice([0, 0, 1, 2, 9])
        return _ask(port, path, asked | {"stream": True, "max_tokens": 900, "n": 1}, leave_after=lines)
    if kind < 0.7:  # left before anything came, or before all of it was sent
        return _leave(port, path, json.dumps(asked | {"max_tokens": 900}).encode(), dice.random())
    if kind < 0.75:
        schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": dice.choice(SCHEMAS)}}
        return _ask(port, path, asked | {"response_format": schema, "max_tokens": 40})
    return _ask(port, path, dice.choice(BAD) if dice.random() < 0.9 else asked | {"n": -1})


def _ask(port: int, path: str, asked: "dict[str, object] | bytes", leave_after: int | None = None) -> str:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        body = asked if isinstance(asked, bytes) else json.dumps(asked).encode()
        client.request("POST", path, body, {"Content-Type": "application/json"})
        response = client.getresponse()
        if response.status == 200 and leave_after is not None:
            for _ in range(2 * leave_after):
                response.readline()
            return "200, left early"
        if b'"internal_error"' in response.read() and response.status == 200:
            return "500 within a stream"
        if response.status == 503:  # some of those who are told to come back wait a little, or nobody gets an answer
            time.sleep(0.1)
        return f"{response.status}, Retry-After" if response.getheader("Retry-After") else str(response.status)
    except (OSError, http.client.HTTPException) as error:
        return f"no answer ({type(error).__name__})"
    finally:
        client.close()


def _leave(port: int, path: str, body: bytes, share: float) -> str:
    lines = (f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json")
    head = "\r\n".join((*lines, f"Content-Length: {len(body)}", "", ""))
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(head.encode() + (body if share < 0.5 else body[: int(len(body) * share)]))
        time.sleep(0.005)
    return "left before an answer"


def _get(port: int, path: str) -> tuple[int, str]:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        client.request("GET", path)
        response = client.getresponse()
        return response.status, response.read().decode()
    except OSError:
        return 0, ""
    finally:
        client.close()


def _figures(port: int) -> dict[str, float]:
    lines = [line.split(" ") for line in _get(port, "/metrics")[1].splitlines() if line.startswith("modicum_")]
    return {name.removeprefix("modicum_"): float(value) for name, value in lines if "{" not in name}


def _memory(process: int) -> int:
    """Bytes that are resident."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))


def _wait_until(holds, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until:
            sys.exit("the server does not come to rest")
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def _checkpoint(folder: Path) -> Path:
    """A random model that is called nano."""
    with gzip.open(TEXTS, "rt", encoding="utf-8") as file:
        texts = [message["content"] for _ in range(400) for message in json.loads(next(file))["messages"]]
    tokenizer = train_tokenizer(texts, vocab_size=512, min_frequency=2, sample_bytes=200_000, seed=0)[0]
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    model = Decoder(ModelConfig(vocab_size=512, max_position_embeddings=1024, initializer_range=0.1, **sizes))
    model.init_weights(5)
    made = save_checkpoint(
        folder, 1, config=model.config, weights=model.state_dict(), tokenizer=tokenizer, chat=True, training=None
    )
    return made.rename(folder / "nano")


if __name__ == "__main__":
    main()
