"""One stage of a run: a folder that is finished when its manifest.json says which inputs it was made from."""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from modicum.store.atomic import write_bytes, write_json


@dataclass(frozen=True)
class StageManifest:
    """What a finished stage was made from and what it took.

    `inputs` maps a name to a SHA-256 or a short value. wall_seconds counts the last, finishing attempt; peak_memory_mb
    is the process's largest resident set until then, in units of 10^6 bytes.
    """

    stage: str
    inputs: dict[str, str]
    code_version: str
    seed: int
    device: str
    wall_seconds: float
    peak_memory_mb: int


class Stage:
    """A stage's folder. It is finished only when its manifest exists; whatever else lies there may be partial."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name

    def manifest(self) -> StageManifest | None:
        """The manifest, or None when the stage has not finished (or an older version wrote it)."""
        try:
            return StageManifest(**json.loads((self.path / "manifest.json").read_text("utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def changed_inputs(self, inputs: Mapping[str, str]) -> list[str] | None:
        """Names of the inputs that differ from the finished stage's; [] when up to date; None when unfinished."""
        manifest = self.manifest()
        if manifest is None:
            return None
        names = sorted(set(inputs) | set(manifest.inputs))
        return [name for name in names if inputs.get(name) != manifest.inputs.get(name)]

    @contextmanager
    def record(
        self, inputs: Mapping[str, str], *, code_version: str, seed: int, device: Callable[[], str]
    ) -> Iterator[None]:
        """Run the stage's work inside this block; the manifest is written when it ends well. When it does not, none is
        left, but for the former one where the work was refused before it changed anything.

        device: asked when the work is done, for only then it is known.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        path = self.path / "manifest.json"
        former = path.read_bytes() if path.exists() else None
        path.unlink(missing_ok=True)
        before = self._files() if former else {}
        start = time.monotonic()
        try:
            yield
        except BaseException:
            if former and self._files() == before:
                write_bytes(path, former)
            raise
        wall = round(time.monotonic() - start, 3)
        manifest = StageManifest(
            self.name, dict(inputs), code_version, seed, device(), wall, peak_memory_bytes() // 10**6
        )
        write_json(path, asdict(manifest))

    def _files(self) -> dict[Path, tuple[int, int]]:
        """Size and time of all that lies in the folder, by which a change would show."""
        return {path: ((status := path.lstat()).st_size, status.st_mtime_ns) for path in self.path.rglob("*")}


def peak_memory_bytes(process: int | None = None) -> int:
    """The largest resident set so far of this process, or of another (what it has now, where only that is told)."""
    # Linux keeps two figures: getrusage's counts what the parent had when it started this process, this one does not
    status = Path(f"/proc/{process or 'self'}/status")
    lines = status.read_text("utf-8").splitlines() if status.is_file() else []
    own = next((line for line in lines if line.startswith("VmHWM:")), None)
    if own is not None:
        return int(own.split()[1]) * 1024
    if process is not None:
        told = subprocess.run(["ps", "-o", "rss=", "-p", str(process)], capture_output=True, text=True, check=True)
        return int(told.stdout) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB
