"""Run `modicum` and die by SIGKILL at the n-th call of one function, before it begins or when it has ended.

    python kill_at.py MODULE:NAME N before|after NOTE_FILE -- ARGUMENTS OF modicum

The note file says that the kill really came; without it the run has ended before the n-th call.
"""

import importlib
import os
import signal
import sys
from pathlib import Path


def main():
    target, number, moment, note = sys.argv[1:5]
    module, _, name = target.partition(":")
    owner = importlib.import_module(module)
    *parents, last = name.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original, calls = getattr(owner, last), 0

    def deadly(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == int(number) and moment == "before":
            die(note)
        result = original(*args, **kwargs)
        if calls == int(number) and moment == "after":
            die(note)
        return result

    setattr(owner, last, deadly)
    sys.argv = ["modicum", *sys.argv[6:]]
    from modicum.cli import main as modicum

    modicum()


def die(note):
    Path(note).write_text("killed")
    os.kill(os.getpid(), signal.SIGKILL)


main()
