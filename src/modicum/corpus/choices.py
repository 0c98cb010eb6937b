"""Multiple-choice questions for evaluation: one {"id", "question", "choices", "answer", "kind"} a line."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modicum.corpus.files import kind, read_json_lines
from modicum.store import UserError

KINDS = ("recall", "generalisation")


@dataclass(frozen=True)
class Choice:
    """answer counts from 0. kind: "recall" asks for facts of the corpus; "generalisation" must not stand in it."""

    id: str
    question: str
    choices: list[str]
    answer: int
    kind: str
    source: str | None


def read_choices(path: Path) -> list[Choice]:
    """The questions of a .jsonl file (also .gz, .zst); keys that are not known are ignored.

    Raises UserError with file and line at the first fault: a field missing or of the wrong type, fewer than two
    choices or two equal ones, an answer that is none of them, an unknown kind, an id that comes twice, no question.
    """
    items: list[Choice] = []
    seen: dict[str, int] = {}
    for number, record in read_json_lines(path):
        origin = f"{path}:{number}"
        item = _choice(record, origin)
        if item.id in seen:
            raise UserError(f"{origin}: id {item.id!r} is that of line {seen[item.id]} too; ids must differ")
        seen[item.id] = number
        items.append(item)
    if not items:
        raise UserError(f"{path}: no question in it")
    return items


def _choice(record: dict[str, Any], origin: str) -> Choice:
    choices, answer, source = record.get("choices"), record.get("answer"), record.get("source")
    if not isinstance(choices, list) or not all(isinstance(choice, str) and choice.strip() for choice in choices):
        raise UserError(f"{origin}: choices must be a list of strings that are not blank")
    if len(choices) < 2 or len(set(choices)) < len(choices):
        raise UserError(f"{origin}: expected at least two choices, all different")
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        raise UserError(f"{origin}: answer must be a number from 0 to {len(choices) - 1}, found {answer!r}")
    if source is not None and not isinstance(source, str):
        raise UserError(f"{origin}: source must be a string, found {kind(source)}")
    what = _string(record, "kind", origin)
    if what not in KINDS:
        raise UserError(f"{origin}: kind is {what!r}; expected {' or '.join(KINDS)}")
    return Choice(_string(record, "id", origin), _string(record, "question", origin), choices, answer, what, source)


def _string(record: dict[str, Any], field: str, origin: str) -> str:
    value = record.get(field)
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{origin}: {field} must be a string that is not blank, found {kind(value)}")
    return value
