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
from pathlib import Path

from modicum.store import UserError, peak_memory_bytes

_START_SECONDS = 600.0  # a first start may build kernels
_ADDRESS = re.compile(r" at http://([0-9.]+:[0-9]+)/")  # what it says on standard error when it listens


@dataclass(frozen=True)
class Running:
    """host: its address and port. ready_s: seconds from its start until it said at /health that it is ready."""

    process: subprocess.Popen[bytes]
    host: str
    ready_s: float
    log: Path

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
    with tempfile.TemporaryDirectory(prefix="modicum-") as place:
        log = Path(place) / "log"
        begun = time.perf_counter()
        with log.open("wb") as said:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, env=environment
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


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path, until: float) -> str:
    host = None
    while time.perf_counter() < until:
        _check(process, log)
        if host is None:
            found = _ADDRESS.search(log.read_text("utf-8", "replace"))
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


def _check(process: subprocess.Popen[bytes], log: Path) -> None:
    status = process.poll()
    if status is None:
        return
    how = f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
    hint = ", as happens where memory runs out" if status == -signal.SIGKILL else ""
    raise UserError(f"the server ended {how}{hint}; it said: {_last_words(log)}")


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    return " | ".join(line[:300] for line in lines[-3:]) or "nothing"
