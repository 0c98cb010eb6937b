"""What no knowledge scores on multiple choice: guessing, the commonest answer, and echoing the question's words."""

import re
from collections import Counter
from collections.abc import Sequence

from modicum.corpus import Choice

_WORD = re.compile(r"\w+")


def credit(scores: Sequence[float], answer: int) -> float:
    """1 when the answer alone has the highest score, 1/k when k choices share it and the answer is one, else 0."""
    best = max(scores)
    return 1 / list(scores).count(best) if scores[answer] == best else 0.0


def chance(item: Choice) -> float:
    """Expected credit of a guess."""
    return 1 / len(item.choices)


def commonest_answer(items: Sequence[Choice]) -> str:
    """The text that is the right answer most often; of several, the first in the alphabet."""
    counts = Counter(item.choices[item.answer] for item in items)
    return min(counts, key=lambda text: (-counts[text], text))


def majority(item: Choice, commonest: str) -> float:
    """Credit for choosing the commonest answer where it can be chosen, and guessing elsewhere."""
    return credit([choice == commonest for choice in item.choices], item.answer)


def word_overlap(item: Choice) -> float:
    """Credit for the choice that has the most words in common with the question, case aside."""
    asked = set(_WORD.findall(item.question.casefold()))
    return credit([len(asked & set(_WORD.findall(choice.casefold()))) for choice in item.choices], item.answer)
