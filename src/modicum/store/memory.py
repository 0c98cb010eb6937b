"""How much memory this process may have, and could have now."""

import os
import sys
from pathlib import Path

_CGROUP_USE = {
    "memory.max": ("memory.current", "inactive_file"),
    "memory.limit_in_bytes": ("memory.usage_in_bytes", "total_inactive_file"),
}
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
    limit = min(memory_limit(), _container_room())
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return min(limit, int(line.split()[1]) * 1024)
    return limit


def _container_room() -> int:
    """What the container's limit leaves, file pages that can be dropped counted as free; no bound without a limit."""
    for path in _CGROUP_LIMITS:
        text = path.read_text("ascii").strip() if path.is_file() else ""
        use, droppable = _CGROUP_USE[path.name]
        used = path.with_name(use)
        if text.isdecimal() and used.is_file():
            stat = path.with_name("memory.stat")
            lines = stat.read_text("ascii").splitlines() if stat.is_file() else []
            cached = sum(int(line.split()[1]) for line in lines if line.split()[0] == droppable)
            return max(0, int(text) - max(0, int(used.read_text("ascii")) - cached))
    return sys.maxsize
