"""Systems measured in turn, each in a fresh process, so that what else the machine does falls on all of them alike."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from modicum.store import UserError

Say = Callable[[str], None]


def take_turns(
    module: str, orders: Mapping[str, Mapping[str, Any]], *, rounds: int, say: Say
) -> dict[str, list[dict[str, Any]]]:
    """Run `python -m module` once a round for each named order, one after the other; each one's answers.

    An order goes in as JSON, the last line that comes out is the answer. The order of the systems turns round by
    round: whoever went first goes last. Raises UserError when a process is killed or says that the user can mend it.
    """
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in orders}
    for number in range(rounds):
        for name in _turned(list(orders), number):
            answer = _ask(module, name, orders[name])
            answers[name].append(answer)
            say(f"round {number + 1} of {rounds}, {name}: {answer['said']}")
    return answers


def take_order(measure: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """What a worker's process does: the order from standard input, its answer as one line to standard output.

    Exit status 2 with one line for what the user can mend.
    """
    try:
        print(json.dumps(measure(json.load(sys.stdin))))
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def _turned(names: Sequence[str], by: int) -> list[str]:
    start = by % len(names)
    return [*names[start:], *names[:start]]


def _ask(module: str, name: str, order: Mapping[str, Any]) -> dict[str, Any]:
    environment = {**os.environ, **order.get("environment", {})}
    command = [sys.executable, "-m", module]
    # a session of its own, so that whatever it has started can be ended with it
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(json.dumps(order))
        finally:
            with suppress(ProcessLookupError):  # nothing is left, as it should be
                os.killpg(process.pid, signal.SIGKILL)
    status = process.returncode
    if status < 0:
        raise UserError(f"{name}: killed by signal {-status}, as happens where memory runs out; fewer rows")
    last = (errors.strip().splitlines() or ["no message"])[-1]
    if status == 2:
        raise UserError(f"{name}: {last}")
    if status:
        raise RuntimeError(f"{name} failed:\n{errors}")
    answer: dict[str, Any] = json.loads(output.splitlines()[-1])
    return answer
