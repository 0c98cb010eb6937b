"""The process: a socket, what is loaded behind it, and an orderly end."""

import asyncio
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Literal

import uvicorn

from modicum.checkpoint import load_checkpoint, opening_of
from modicum.generate import Engine, Generator
from modicum.generate.passes import Runtime
from modicum.model import Decoder
from modicum.serve.answers import LAST_WORDS
from modicum.serve.app import Access, create_app
from modicum.serve.limits import Limits
from modicum.serve.service import Served, Service, model_name
from modicum.store import UserError
from modicum.tokenizer import Tokenizer

KEY_VARIABLE = "MODICUM_API_KEY"
_OWN_NAMES = ("localhost", "127.0.0.1", "[::1]")
_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")


@dataclass(frozen=True)
class ServerSettings:
    """host, port: where it listens; port 0 takes a free one. api_key_file: a key a line; else MODICUM_API_KEY has one.
    slots: requests answered at once; max_queue: that wait. context: tokens of one, prompt and answer together; None for
    all that the model has. engine: what runs the model; None for llama.cpp where its file ends in .gguf, else modicum.
    compiled: decode by the kernel that is made for this processor, where a checkpoint is run, whatever GPU there is.
    runs: the directory of the page's second view. origins: sites whose scripts may call. hosts: names under which
    requests may come, beside this machine's own; without any, all names will do where other machines can reach it.
    drain_seconds: what answers that are under way get when the server is told to end. log_prompts: whether the log
    holds what is asked.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: Path | None = None
    slots: int = 8
    max_queue: int = 64
    context: int | None = None
    engine: Literal["modicum", "gguf"] | None = None
    compiled: bool = True
    runs: Path | None = None
    origins: Sequence[str] = ()
    hosts: Sequence[str] = ()
    drain_seconds: int = 30
    log_prompts: bool = False


def serve(checkpoint: Path, settings: ServerSettings, *, limits: Limits | None = None) -> bool:
    """Serve a checkpoint, or a GGUF file, which llama.cpp runs, until SIGTERM or Ctrl-C; then answers that are under
    way come to their end first.

    True where a thread is left at work: native code in it would abort a Python that takes itself down, so the caller
    ends the process by os._exit. Faults of the checkpoint and of the settings are raised before anything listens.
    """
    limits = limits or Limits()
    keys = _keys(settings.api_key_file)
    if settings.runs is not None and not settings.runs.is_dir():
        raise UserError(f"--runs {settings.runs}: no such directory")
    for origin in settings.origins:
        if origin == "*" or "://" not in origin or origin.count("/") != 2:
            raise UserError(f"--cors {origin}: expected one site, such as https://chat.example.org")
    for host in settings.hosts:
        if not _HOST.fullmatch(host):
            raise UserError(f"--allow-host {host}: expected a name alone, such as chat.example.org")
    by_llama = settings.engine == "gguf" or (settings.engine is None and checkpoint.suffix == ".gguf")
    model_of, tokenizer, stop_ids, opening, runtime = (_gguf if by_llama else _own)(checkpoint)

    def load() -> Served:
        generator = Generator(model_of(), tokenizer, stop_ids=stop_ids, opening=opening, context=settings.context)
        engine = Engine(
            generator,
            slots=settings.slots,
            max_queue=settings.max_queue,
            compiled=settings.compiled,
            spare_core=True,
        )
        return Served(model_name(checkpoint), generator, engine, limits)

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(name)s: %(message)s")
    logging.getLogger("modicum").setLevel(logging.INFO)
    service = Service(load, limits, log_prompts=settings.log_prompts)
    local = _is_loopback(settings.host)
    if not local and not keys:
        print(f"warning: anyone who reaches {settings.host} can use this server; give it a key", file=sys.stderr)
    hosts = (*_OWN_NAMES, settings.host, *settings.hosts) if local or settings.hosts else None
    app = create_app(service, access=Access(keys, hosts, settings.origins), runs=settings.runs)
    config = uvicorn.Config(
        app,
        timeout_graceful_shutdown=LAST_WORDS,
        server_header=False,
        log_level="info",
    )
    server = _Server(config, service, settings.drain_seconds)
    service.on_fault = server.stop
    with _listening(settings.host, settings.port) as listening:
        print(f"{model_name(checkpoint)}{runtime} at http://{_shown(listening)}/", file=sys.stderr)
        server.run(sockets=[listening])
    if service.fault is not None:
        raise service.fault
    return service.busy


_Known = tuple[Callable[[], Decoder | Runtime], Tokenizer, Sequence[int], Sequence[int], str]


def _own(checkpoint: Path) -> _Known:
    """What loads the model of a checkpoint, once it is known to be whole; its tokenizer, its stop ids, what stands
    before a text, and words for what runs it."""
    if checkpoint.is_file():
        raise UserError(f"{checkpoint}: a file, where a checkpoint is a folder; --engine gguf serves a GGUF file")
    loaded = load_checkpoint(checkpoint)
    return loaded.model, loaded.tokenizer, loaded.stop_ids, loaded.opening, ""


def _gguf(file: Path) -> _Known:
    """The same of a GGUF file."""
    from modicum.serve.gguf import read_source  # these need exchange and llama.cpp, which nothing else here does
    from modicum.serve.llama import LlamaModel

    source = read_source(file)
    opening = opening_of(source.tokenizer)
    return partial(LlamaModel, source), source.tokenizer, source.stop_ids, opening, " (llama.cpp runs it)"


class _Server(uvicorn.Server):
    """uvicorn's, but ending by SIGTERM is a good end: status 0, once all answers are given, or `drain_seconds` are over
    and the rest is cut with an error. Until then it listens, so that others are told to come back."""

    def __init__(self, config: uvicorn.Config, service: Service, drain_seconds: float) -> None:
        super().__init__(config)
        self._service, self._drain_seconds = service, drain_seconds
        self._cutting: asyncio.Future[None] | None = None

    async def main_loop(self) -> None:
        """Until it is told to end, and what was begun has ended. A second Ctrl-C waits for nothing."""
        await super().main_loop()
        draining = asyncio.ensure_future(self._service.close(drain_seconds=self._drain_seconds))
        while not draining.done() and not self.force_exit:
            await asyncio.sleep(0.05)
        if draining.done():
            draining.result()
        else:  # what is under way is cut, so that its connections end; kept here, since the loop itself would lose it
            self._cutting = asyncio.ensure_future(self._service.close())

    def stop(self) -> None:
        """End as a signal would."""
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        kept = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in kept.items():
                signal.signal(number, handler)


def _keys(file: Path | None) -> list[str]:
    if file is None:
        key = os.environ.get(KEY_VARIABLE, "").strip()
        return [key] if key else []
    try:
        keys = [line.strip() for line in file.read_text("utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--api-key-file {file}: cannot be read ({error})") from None
    if not keys:
        raise UserError(f"--api-key-file {file}: expected a key a line, found none")
    return keys


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        raise UserError(f"--host {host} --port {port}: cannot listen there ({error})") from None


def _shown(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
