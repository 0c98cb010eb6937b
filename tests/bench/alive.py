"""Whether a process lives."""

import subprocess
import time


def alive(process):
    told = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True, check=False)
    return bool(told.stdout.strip()) and not told.stdout.startswith("Z")


def gone_within(seconds, *processes):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not any(map(alive, processes)):
            return True
        time.sleep(0.05)
    return False
