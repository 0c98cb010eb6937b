"""What one self-check found."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["ok", "failed", "told"]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's answer.

    outcome: "ok", "failed", or "told" for a circumstance that is neither (no compiler here: slower, not wrong).
    yours: whether a failure lies in the user's own file, which the user can mend, or in our arithmetic, which we must.
    """

    name: str
    outcome: Outcome
    detail: str
    yours: bool = False


def judged(name: str, good: bool, detail: str, *, yours: bool = False) -> Finding:
    return Finding(name, "ok" if good else "failed", detail, yours)


def exit_status(findings: Iterable[Finding]) -> int:
    """0 when nothing failed; 1 when any of our arithmetic did; 2 when only the user's files did."""
    failed = [finding for finding in findings if finding.outcome == "failed"]
    if not failed:
        return 0
    return 2 if all(finding.yours for finding in failed) else 1
