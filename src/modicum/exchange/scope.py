"""How much a gate compares: enough to tell a converted model from another, in a time that one waits."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Scope:
    """texts: how many, of at most `tokens` ids each, are read by both; heldout: where they come from (without it, the
    held-out text of the checkpoint's run, or what it writes itself). strings: whose ids must be the same.
    continuations: greedy ones, of `steps` tokens."""

    texts: int = 50
    tokens: int = 64
    strings: int = 10_000
    continuations: int = 8
    steps: int = 64
    heldout: Path | None = None


SCOPE = Scope()
