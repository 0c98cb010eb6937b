"""A server as a process of its own on this machine: started, waited for, and ended whatever happens."""

import http.client
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO

from modicum.store import UserError, peak_memory_bytes

_START_SECONDS = 600.0  # a first start may build kernels
_ADDRESS = re.compile(r" at http://([0-9.]+:[0-9]+)/")  # what it says on standard error when it listens


@dataclass(frozen=True)
class Running:
    """host: its address and port. ready_s: seconds from its start until it said at /health that it is ready."""

    process: subprocess.Popen[bytes]
    host: str
    ready_s: float
    log: IO[bytes]

    @property
    def peak_bytes(self) -> int:
        """Its largest resident set so far."""
        return peak_memory_bytes(self.process.pid)

    def check(self) -> None:
        """Raises UserError, with its last words, when it has ended, or is just about to."""
        with suppress(subprocess.TimeoutExpired):  # connections are refused a little before a process is over
            self.process.wait(0.2)
        _check(self.process, self.log)


@contextmanager
def running(command: Sequence[str], *, threads: int, start_seconds: float = _START_SECONDS) -> Iterator[Running]:
    """A server that says " at http://HOST:PORT/" on standard error, and answers at /health, inside this block.

    threads: of its arithmetic. It is killed at the end of the block, and when the process that started this one is
    gone. Raises UserError, in one line with its last words, when it ends before it is ready, or is not in time.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    environment.pop("MODICUM_API_KEY", None)  # the requests have none
    with tempfile.TemporaryFile() as log:  # it has no name, so that nothing of it stays if we are killed
        begun = time.perf_counter()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        threading.Thread(target=_end_with_parent, args=(os.getppid(), process), daemon=True).start()
        try:
            host = _wait_until_ready(process, log, begun + start_seconds)
            yield Running(process, host, time.perf_counter() - begun, log)
        finally:
            process.kill()
            process.wait()


def _end_with_parent(parent: int, process: subprocess.Popen[bytes]) -> None:
    """Nobody is left who would end us: a parent that is killed cannot."""
    while process.returncode is None:
        if os.getppid() != parent:
            process.kill()
            os._exit(1)
        time.sleep(0.5)


def _wait_until_ready(process: subprocess.Popen[bytes], log: IO[bytes], until: float) -> str:
    host = None
    while time.perf_counter() < until:
        _check(process, log)
        if host is None:
            found = _ADDRESS.search(_text(log))
            host = found and found[1]
        elif _is_ready(host):
            return host
        time.sleep(0.02)
    raise UserError(f"the server was not ready in time; it said: {_last_words(log)}")


def _is_ready(host: str) -> bool:
    connection = http.client.HTTPConnection(host, timeout=10)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False  # not yet; one that has died is told from its process
    finally:
        connection.close()


def _check(process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    status = process.poll()
    if status is None:
        return
    how = f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
    hint = ", as happens where memory runs out" if status == -signal.SIGKILL else ""
    raise UserError(f"the server ended {how}{hint}; it said: {_last_words(log)}")


def _last_words(log: IO[bytes]) -> str:
    lines = [line.strip() for line in _text(log).splitlines() if line.strip()]
    return " | ".join(line[:300] for line in lines[-3:]) or "nothing"


def _text(log: IO[bytes]) -> str:
    """All of it, read beside the place where the server writes, which it has in common with us."""
    return os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0).decode("utf-8", "replace")
