"""Paths in a recipe: relative to its folder, which is the validation context's `folder`. An InputPath must exist."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator


def _plain_path(value: Any, info: Any) -> Any:
    if not isinstance(value, str | Path) or not str(value).strip():
        raise ValueError("expected a path")
    folder = (info.context or {}).get("folder")
    try:
        return (Path(folder) / Path(value).expanduser()).resolve() if folder else Path(value)
    except (OSError, RuntimeError) as error:  # no such user behind ~, links that lead round in a circle
        raise ValueError(f"{value}: {error}") from None


def _existing_path(value: Any, info: Any) -> Any:
    path = _plain_path(value, info)
    try:
        there = path.exists()
    except OSError as error:  # a name that is too long, a folder that this user may not enter
        raise ValueError(f"{path}: {error.strerror}") from None
    if not there:
        raise ValueError(f"no such file or folder: {path}")
    return path


RecipePath = Annotated[Path, BeforeValidator(_plain_path)]
InputPath = Annotated[Path, BeforeValidator(_existing_path)]
