"""The machine that does the work: processor, cores, memory, disk, versions. Asked without loading torch."""

import importlib.metadata
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

from modicum.road.words import size
from modicum.store import memory_limit, processor_name


@dataclass(frozen=True)
class Machine:
    """`memory_bytes` is what a process here may have at most: the machine's, or its container's limit."""

    processor: str
    cores: int
    memory_bytes: int
    system: str
    python: str
    torch: str

    def line(self) -> str:
        """The machine in one line."""
        cores = f"{self.cores} core{'s' if self.cores != 1 else ''}"
        return (
            f"{self.processor}, {cores}, {size(self.memory_bytes)} of memory, {self.system}, "
            f"Python {self.python}, torch {self.torch}"
        )


def describe_machine() -> Machine:
    return Machine(
        processor=processor_name(),
        cores=usable_cores(),
        memory_bytes=memory_limit(),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=importlib.metadata.version("torch"),
    )


def usable_cores() -> int:
    """Cores this process may use, which a container or `taskset` may have made fewer than the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_disk(path: Path) -> int:
    """Bytes free on the disk where `path` lies or would lie."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def bytes_below(path: Path) -> int:
    """Bytes of the files that lie in a folder already; 0 when there is none."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())


def busy_cores() -> float:
    """How many threads have wanted a core over the last minute, on average."""
    return os.getloadavg()[0]
