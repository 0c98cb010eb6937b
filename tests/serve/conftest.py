"""A real server on this machine: a real tokenizer, a small model with random weights, and the official client."""

import asyncio
import gzip
import json
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import openai
import pytest
import uvicorn
from chatting import connect
from chromium import PATH, browser
from httpx2 import Client

from modicum.checkpoint import save_checkpoint
from modicum.generate import Engine, Generator
from modicum.model import Decoder, ModelConfig
from modicum.serve import Limits, Served, Service, create_app
from modicum.tokenizer import train_tokenizer

INSTRUCT = Path(__file__).parents[2] / "data" / "small" / "instruct.jsonl.gz"
LIMITS = Limits(seconds=60, retry_seconds=3)


@pytest.fixture(scope="session")
def tokenizer():
    with gzip.open(INSTRUCT, "rt", encoding="utf-8") as file:
        texts = [m["content"] for _ in range(400) for m in json.loads(next(file))["messages"]]
    return train_tokenizer(texts, vocab_size=512, min_frequency=2, sample_bytes=200_000, seed=0)[0]


@pytest.fixture(scope="session")
def generator(tokenizer):
    """Random weights; more rows in the embedding than tokens, as imported models have them."""
    model = Decoder(
        ModelConfig(
            vocab_size=tokenizer.vocab_size + 64,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=96,
            max_position_embeddings=1024,
            initializer_range=0.1,
        )
    )
    model.init_weights(5)
    return Generator(model.eval(), tokenizer, stop_ids=[tokenizer.eot_id, tokenizer.end_of_turn_id])


@pytest.fixture(scope="session")
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


class Running:
    """A server that answers: its address, its model, and what a test asks of it."""

    def __init__(self, address, service):
        self.address, self.service = address, service

    @property
    def engine(self):
        return self.service.served.engine

    def client(self, **options):
        return openai.OpenAI(base_url=f"{self.address}/v1", api_key="none", max_retries=0, **options)

    def http(self, **options):
        return Client(base_url=self.address, timeout=60, **options)

    def wait_until_idle(self, seconds=20):
        """Raises unless every slot is free in time."""
        until = time.monotonic() + seconds
        while (numbers := self.engine.numbers()).active or numbers.queued:
            assert time.monotonic() < until, f"still busy: {numbers}"
            time.sleep(0.01)


@contextmanager
def run_server(generator, *, limits=LIMITS, slots=4, max_queue=16, wait=True, load=None, log_prompts=False, **options):
    def build():
        engine = Engine(generator, slots=slots, max_queue=max_queue, compiled=False)
        return Served("nano", generator, engine, limits)

    service = Service(load or build, limits, log_prompts=log_prompts)
    app = create_app(service, **options)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    try:
        until = time.monotonic() + 60
        while not server.started or (wait and not (service.served and service.served.engine.ready)):
            assert service.fault is None, repr(service.fault)
            assert thread.is_alive(), "the server ended"
            assert time.monotonic() < until, "the server did not start"
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Running(f"http://127.0.0.1:{port}", service)
    finally:
        server.should_exit = True
        thread.join(30)


@pytest.fixture(scope="session")
def start(generator):
    """A function that runs a server with other limits, slots or access, as a context manager."""

    def start(*, limits=None, **options):
        return run_server(generator, limits=replace(LIMITS, **limits or {}), **options)

    return start


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    """A function that opens a tab of a browser."""
    assert PATH, "these tests need chromium"
    with browser(tmp_path_factory.mktemp("chromium")) as tab:
        yield tab


@pytest.fixture(scope="module")
def site(start, tmp_path_factory):
    with start(runs=tmp_path_factory.mktemp("runs")) as server:
        yield server


@pytest.fixture
def page(tab, site):
    page = tab()
    page.open(site.address)
    page.do("localStorage.clear(); sessionStorage.clear()")
    connect(page, site)
    yield page
    assert page.complaints == []
    assert {url.split("/")[2] for url in page.requests if url.startswith("http")} == {site.address.split("/")[2]}


@pytest.fixture(scope="session")
def server(generator):
    with run_server(generator) as running:
        yield running


@pytest.fixture(scope="session")
def client(server):
    with server.client() as client:
        yield client
