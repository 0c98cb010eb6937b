"""The kernels in C++: compiled for this processor when they are first needed, kept in the user's cache.

Without a compiler, or headers of PyTorch's that it does not know, the plain operations do the same work slower.
"""

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch

from modicum.store import cache_folder, processor_flags, processor_name

SOURCES = sorted(Path(__file__).with_name("kernels").glob("*.*"))
_LIMIT_SECONDS = 300


@functools.cache
def kernel_fault() -> str | None:
    """Load the kernels; None when they are there, otherwise the line that says why not. Tried once a process."""
    compiler = os.environ.get("CXX") or next((name for name in ("g++", "clang++") if shutil.which(name)), None)
    if compiler is None:
        return "no C++ compiler; on Debian, `apt install g++` brings one"
    home = Path(torch.__file__).parent
    command = [
        *compiler.split(),
        *("-O3", "-march=native", "-std=c++20", "-fPIC", "-shared"),
        *(("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ("-fopenmp",)),
        f"-I{home / 'include'}",
        *(str(source) for source in SOURCES if source.suffix == ".cpp"),
        *(f"-L{home / 'lib'}", f"-Wl,-rpath,{home / 'lib'}", "-ltorch_cpu"),
    ]
    try:
        library = _place(command)
    except (OSError, RuntimeError) as error:  # a user without a home
        return f"no folder for the compiled kernels: {error}; XDG_CACHE_HOME names one"
    if not library.is_file():
        fault = _build(command, library)
        if fault is not None:
            return fault
    try:
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except (OSError, RuntimeError) as error:
        library.unlink(missing_ok=True)  # cut off by a full disk, say: made anew the next time
        return f"{library}: {error}"
    return None


def _place(command: list[str]) -> Path:
    """Where the library lies: a name for each source text, compiler, release of PyTorch and processor."""
    texts = (source.read_text("utf-8") for source in SOURCES)
    parts = (*texts, *command, torch.__version__, processor_name(), *sorted(processor_flags()))
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return cache_folder() / f"kernels-{digest}.so"


def _build(command: list[str], library: Path) -> str | None:
    """Compile into `library`, whole or not at all; what the compiler says where it fails."""
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        _clear(library.parent)
        with tempfile.TemporaryDirectory(dir=library.parent, prefix=".tmp-") as folder:
            made = Path(folder) / library.name
            ended = subprocess.run(
                [*command, "-o", str(made)], capture_output=True, text=True, check=False, timeout=_LIMIT_SECONDS
            )
            if ended.returncode:
                lines = ended.stderr.strip().splitlines() or ["without a word"]
                return f"{command[0]}: {next((line for line in lines if 'error' in line), lines[-1])[:200]}"
            made.replace(library)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    return None


def _clear(folder: Path) -> None:
    """Remove what a process left that was killed while it compiled; none that still does is older than the limit."""
    for left in folder.glob(".tmp-*/"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _LIMIT_SECONDS:
                shutil.rmtree(left)
