"""How much memory this process may have, and could have now."""

import os
from pathlib import Path

_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def memory_limit() -> int:
    """Bytes of memory that this machine, or the container around the process, has in all."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in _CGROUP_LIMITS:
        text = path.read_text("ascii").strip() if path.is_file() else ""
        if text.isdecimal():
            return min(physical, int(text))
    return physical


def free_memory() -> int:
    """Bytes that a new process could have now; where the system does not say, all there are."""
    limit = memory_limit()
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return min(limit, int(line.split()[1]) * 1024)
    return limit
