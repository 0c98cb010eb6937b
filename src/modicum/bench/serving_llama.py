"""A program of its own: llama.cpp's HTTP server for one GGUF file, until it is killed.

    python -P serving_llama.py MODEL SLOTS CONTEXT THREADS CONNECTIONS FLASH

CONTEXT: tokens of a slot. FLASH: 0 for plain attention, -1 for what llama.cpp chooses. Set otherwise than by default:
the processor alone; a thread for each of CONNECTIONS; only warnings in the log; no second cache, into which each prompt
that leaves its slot would be copied: that takes time and memory, and serves a prompt that comes back. Says where it
listens on standard error. Imports nothing of ours.
"""

import signal
import sys
from importlib import import_module
from typing import Any


def main(model: str, slots: int, context: int, threads: int, connections: int, flash: int) -> None:
    """Serve until killed. llama.cpp raises where the file cannot be served."""
    llama: Any = import_module("xllamacpp")
    settings = llama.CommonParams()
    settings.model.path = model
    settings.n_parallel = slots
    settings.n_ctx = slots * context
    settings.fit_params = False  # as they stand here, whatever memory is free
    settings.n_gpu_layers = 0
    settings.cpuparams.n_threads = threads
    settings.cpuparams_batch.n_threads = threads
    settings.n_threads_http = connections
    settings.flash_attn_type = flash
    settings.cache_ram_mib = 0
    settings.verbosity = 2
    settings.hostnames = ["127.0.0.1"]
    settings.port = 0  # a free one
    server = llama.Server(settings)
    print(f"llama.cpp at {server.listening_address.rstrip('/')}/", file=sys.stderr, flush=True)
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
