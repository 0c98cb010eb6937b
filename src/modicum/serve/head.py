"""What every completion object begins with."""

import secrets
import time
from dataclasses import dataclass
from typing import TypedDict

from modicum import __version__
from modicum.serve.service import Served


class HeadFields(TypedDict):
    id: str
    created: int
    model: str
    system_fingerprint: str


@dataclass(frozen=True)
class Head:
    """One response's identity, the same in each of its chunks."""

    id: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, served: Served) -> "Head":
        return cls(f"{prefix}-{secrets.token_hex(12)}", int(time.time()), served.name)

    def fields(self) -> HeadFields:
        """As they stand in the object."""
        return {
            "id": self.id,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"modicum-{__version__}",
        }
