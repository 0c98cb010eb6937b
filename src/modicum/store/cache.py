"""The user's cache: what this machine has compiled or measured once and any run may use again."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """XDG_CACHE_HOME/modicum, or ~/.cache/modicum; it need not exist. Raises RuntimeError for a user without a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "modicum"
