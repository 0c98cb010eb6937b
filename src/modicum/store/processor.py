"""The processor's name and abilities, as the system tells them."""

import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def processor_name() -> str:
    """Such as "AMD EPYC"; where the system has no better word, its kind ("arm64")."""
    for line in _cpuinfo():
        if line.lower().startswith(("model name", "hardware", "cpu part")):
            return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine()


def processor_flags() -> frozenset[str]:
    """The instruction sets that Linux names, such as "avx512_bf16"; none on other systems.

    Nothing else of what it tells: a clock rate is another one at each look, and what is kept for a processor would be
    made anew.
    """
    named = (line for line in _cpuinfo() if line.lower().startswith(("flags", "features")))
    return frozenset(word for line in named for word in line.partition(":")[2].split())


def _cpuinfo() -> list[str]:
    return _CPUINFO.read_text("utf-8", "replace").splitlines() if _CPUINFO.is_file() else []
