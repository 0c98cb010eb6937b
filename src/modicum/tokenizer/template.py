"""A chat template that can be rendered: the shipped ones here, anyone else's in a process with limits of its own."""

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modicum.store import UserError
from modicum.tokenizer import sandbox

CHATML = Path(__file__).with_name("chatml.jinja").read_text("utf-8")
CYBERSLM_TEMPLATE = Path(__file__).with_name("cyberslm.jinja").read_text("utf-8")
SHIPPED = (CHATML, CYBERSLM_TEMPLATE)

MAX_TEMPLATE_CHARACTERS = 1 << 20
MEMORY_BYTES = 1 << 30


@dataclass(frozen=True)
class RenderedText:
    """blocks: (start, end) in characters of what the template marks as the assistant's own (`{% generation %}`)."""

    text: str
    blocks: list[tuple[int, int]]


class Template:
    """A compiled chat template.

    The shipped templates render in this process. A foreign one is untrusted: it renders in a child process that the
    kernel ends after `seconds` of processor time, that can hold 1 GiB and writes no files, because nothing inside
    Python can stop a single `'a' * 10**10`. Both use the same sandbox.

    Raises UserError when it does not compile.
    """

    def __init__(self, source: str, *, seconds: float = 5.0, max_characters: int = 1 << 26) -> None:
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise UserError(
                f"chat.template: longer than {MAX_TEMPLATE_CHARACTERS:,} characters; no chat template needs that"
            )
        self.source = source
        self.shipped = source in SHIPPED
        self._max_characters = max_characters
        self._child = None if self.shipped else _Child(source, seconds)

    def render(self, context: dict[str, Any], *, now: float) -> RenderedText:
        """context: plain JSON data. now: seconds since the epoch, for strftime_now.

        Raises UserError with the template's own words when it refuses the conversation, fails, or overruns its limits.
        """
        if self._child is None:
            try:
                text, blocks = _shipped(self.source).render(context, now=now, max_characters=self._max_characters)
            except Exception as error:
                raise UserError(f"chat template: {sandbox.explain(error)}") from error
            return RenderedText(text, blocks)
        answer = self._child.ask({"context": context, "now": now, "max_characters": self._max_characters})
        return RenderedText(answer["text"], [(start, end) for start, end in answer["blocks"]])


@functools.cache
def _shipped(source: str) -> sandbox.Sandbox:
    return sandbox.Sandbox(source)


class _Child:
    """The process one foreign template renders in: started when needed, again after a fork or a death."""

    def __init__(self, source: str, seconds: float) -> None:
        self._source, self._seconds = source, seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._finalizer: weakref.finalize[..., _Child] | None = None
        with self._lock:
            self._start()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            if self._process is None or self._owner != os.getpid():
                self._start()
            return self._exchange(request)

    def _start(self) -> None:
        # -P: this folder's module names must not shadow the standard library's
        self._process = subprocess.Popen(
            [sys.executable, "-P", sandbox.__file__, str(self._seconds), str(MEMORY_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for us; it ends when its stdin does
        )
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, _end, self._process, self._owner)
        self._exchange({"template": self._source})

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process is not None
        try:
            line = self._line(process, json.dumps(request).encode() + b"\n")
        except BaseException:
            self._forget()  # an answer still to come would be taken for that of the next request
            raise
        if not line.endswith(b"\n"):
            status = process.wait()
            self._forget()
            if status in (-signal.SIGPROF, -signal.SIGALRM):
                raise UserError(f"chat.template: still running after {self._seconds:g} seconds; does it loop?")
            raise UserError(f"chat.template: its process ended with status {status}, most likely for lack of memory")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise UserError(f"chat.template: {answer['error']}")
        return answer

    @staticmethod
    def _line(process: subprocess.Popen[bytes], request: bytes) -> bytes:
        """One line back for one line sent, or less than a line when the process ended."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(request)
            process.stdin.flush()
        except BrokenPipeError:
            return b""
        return process.stdout.readline()

    def _forget(self) -> None:
        """End the process; the next request starts another."""
        self._process = None
        if self._finalizer is not None:
            self._finalizer()


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """Let the child go; in a forked copy of this process it is not ours to end."""
    if owner == os.getpid():
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # what it had not read yet is lost with it
                    pipe.close()
