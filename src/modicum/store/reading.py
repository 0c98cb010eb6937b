"""Read a JSON file that may come from anywhere."""

import json
from pathlib import Path
from typing import Any

from modicum.store.errors import UserError

LARGEST = 1 << 26


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises UserError for what is not one, or is larger or deeper than any of ours."""
    if not file.is_file():
        raise UserError(f"{file}: missing, or no regular file")
    if file.stat().st_size > LARGEST:
        raise UserError(f"{file}: larger than {LARGEST >> 20} MiB; no such file is")
    try:
        value = json.loads(file.read_text("utf-8"))
    except RecursionError:
        raise UserError(f"{file}: nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{file}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{file}: expected a JSON object")
    return value
