"""What the moments of many answers come to."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from modicum.bench.serving_client import Answered
from modicum.store import UserError


def figures(answers: Sequence[Answered]) -> dict[str, Any]:
    """One turn's: tokens a second of all answers together, from the first request to the last answer's end; percentiles
    of the time to the first piece and of the time between pieces, in ms; how many failed, and by what.

    Only whole answers count, and for times only those with text. Raises UserError when there is none, or none came in
    pieces.
    """
    whole = [answer for answer in answers if answer.fault is None]
    faults = Counter(answer.fault for answer in answers if answer.fault is not None)
    if not whole:
        raise UserError(f"no request was answered: {faults.most_common(1)[0][0]}")
    gaps = [after - before for answer in whole for before, after in pairwise(answer.pieces)]
    if not gaps:
        raise UserError("no answer came in several pieces of text; ask for longer ones")
    seconds = max(answer.ended for answer in answers) - min(answer.due for answer in answers)
    tokens = sum(answer.tokens for answer in whole)
    return {
        "requests": len(answers),
        "errors": faults.total(),
        "faults": dict(faults),
        "tokens_per_s": tokens / seconds,
        **_percentiles("first_token", [answer.pieces[0] - answer.due for answer in whole if answer.pieces]),
        **_percentiles("between_tokens", gaps),
        "tokens_per_piece": tokens / sum(len(answer.pieces) for answer in whole),
    }


def _percentiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    middle, high, highest = (1000 * float(value) for value in np.percentile(seconds, (50, 95, 99)))
    return {f"{name}_ms": middle, f"{name}_p95_ms": high, f"{name}_p99_ms": highest}
