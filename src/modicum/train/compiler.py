"""torch.compile's tool chain: whether it works here, and mending what a kill left in its cache.

The compiler's cache holds a library as soon as the linker opens it. A process that is killed in that moment, or a power
cut, leaves a part of one, which every later process would take for whole.
"""

import os
import struct
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

_JUST_WRITTEN_SECONDS = 5.0


def compile_errors() -> tuple[type[Exception], ...]:
    """What torch.compile raises when code cannot be made or loaded: its own errors, and some that it does not wrap."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import CppCompileError

    return (TorchDynamoException, CppCompileError, ImportError, OSError)


def compiler_fault(device: str) -> str | None:
    """Why torch.compile cannot make code here, or None when a trial function went through the whole tool chain."""
    # Before anything is loaded: a cut-off probe of the processor would be taken for a processor without vectors.
    mend_cache()
    # a trial finds what a search for the compiler's name does not: missing headers, a broken linker
    for last_try in (False, True):
        try:
            torch.compile(_trial, dynamic=False)(torch.ones(8, device=device))
            return None
        except compile_errors() as error:
            if last_try or not mend_cache(headers=True):
                return f"no working compiler ({_cause(error)}); on Debian, `apt install g++ python3-dev` brings one"
    raise AssertionError("the last try returns")


def mend_cache(*, headers: bool = False) -> bool:
    """Delete from the compiler's cache what is cut off, and forget what was compiled; whether anything was deleted.

    What another process has open is being written, by a run beside this one, and stays.
    headers: where nothing is found, delete the precompiled headers, which do not show whether they are whole; they are
    made again in seconds.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

    roots = [Path(folder) for folder in sorted({cache_dir(), default_cache_dir()})]
    broken = cut_off(file for root in roots for kind in ("*.so", "*.o") for file in root.rglob(kind))
    if broken:
        written = being_written(broken)
        # looked at again: one that was open at the first look may have been finished and closed since
        broken = cut_off(file for file in broken if file not in written)
    elif headers:
        broken = [file for root in roots for file in root.rglob("*.gch") if file.is_file()]
    for file in broken:
        file.unlink(missing_ok=True)
    if broken:
        torch.compiler.reset()
    return bool(broken)


def _cause(error: Exception) -> str:
    """The line that says why: a compiler's own "error:" line where there is one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.endswith("raised:")]
    telling = [line for line in lines if " error: " in line] or lines or [type(error).__name__]
    return telling[0][:200]


def cut_off(files: Iterable[Path]) -> list[Path]:
    """Those of the libraries and objects that end before their own table of sections, which linkers write last."""
    return [file for file in files if not _is_whole(file)]


def being_written(files: Sequence[Path]) -> set[Path]:
    """Those that some process has open; where the system does not say (macOS), those that changed a moment ago."""
    if not files:
        return set()
    processes = Path("/proc")
    if not (processes / "self" / "fd").is_dir():
        now = time.time()
        return {file for file in files if file.exists() and now - file.stat().st_mtime < _JUST_WRITTEN_SECONDS}
    wanted = {str(file.resolve()): file for file in files}
    found = set()
    for folder in processes.glob("[0-9]*/fd"):
        found |= {wanted[name] for name in _open_files(folder) & wanted.keys()}
    return found


def _open_files(folder: Path) -> set[str]:
    """What one process has open. None of it when it has ended, or is another user's, who has a cache of his own."""
    opened = set()
    with suppress(OSError):
        for entry in os.scandir(folder):
            with suppress(OSError):  # closed since it was listed
                opened.add(os.readlink(entry))
    return opened


def _is_whole(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            data = opened.read(64)
        size = file.stat().st_size
    except OSError:
        return True  # another process has cleared it, or it is nothing that a linker wrote
    if data[:6] != b"\x7fELF\x02\x01":
        # another format (macOS) shows no more than that it is not empty
        return size > 0 and data[:4] != bytes(4) and not b"\x7fELF".startswith(data[:4])
    if len(data) < 64:
        return False
    # ELF-64 header, little endian: e_shoff at 0x28; e_shentsize and e_shnum at 0x3A
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry, count = struct.unpack_from("<HH", data, 0x3A)
    return bool(table) and bool(table + entry * count <= size)


def _trial(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1
