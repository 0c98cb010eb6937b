"""`modicum serve` as a process of its own."""

import socket
import subprocess
import sys
import time

import httpx2


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
