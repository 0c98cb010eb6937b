"""What users ask of a server: prompts, lengths and moments, drawn from one seed, so that every system gets the same."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

# Answers that are given at once; of more users than that the others wait, in every system.
_MOST_SLOTS = 16


@dataclass(frozen=True)
class Load:
    """Either so many users, each of whom asks again when answered (closed), or requests a second on average, which come
    whether the server is done with others or not (open, a Poisson process)."""

    users: int | None = None
    rate: float | None = None

    def words(self) -> str:
        if self.users is None:
            return f"{self.rate:g} requests/s"
        return f"{self.users} user{'' if self.users == 1 else 's'}"

    def slots(self) -> int:
        """How many answers a server gives at once."""
        return min(self.users or _MOST_SLOTS, _MOST_SLOTS)

    def requests(self) -> int:
        """How many make a turn where nobody says: enough for a tail, and three of each user."""
        return 64 if self.users is None else max(32, 3 * self.users)


@dataclass(frozen=True)
class Mix:
    """Tokens of prompts and of answers. One of each list is drawn for each request, all as likely; to be drawn more
    often, a length stands there several times. shared: so many first tokens all prompts have in common."""

    prompt: Sequence[int] = (512,)
    answer: Sequence[int] = (128,)
    shared: int = 0


@dataclass(frozen=True)
class Asked:
    """One request: token ids, tokens of the answer, and the second at which it is sent (of users: when one is free)."""

    prompt: list[int]
    tokens: int
    at: float = 0.0


def draw_requests(
    count: int, mix: Mix, ids: Sequence[int], *, start: int, seed: int, rate: float | None = None
) -> list[Asked]:
    """So many requests. Prompts begin with `start`, and go on with random ones of `ids`. rate: of open arrival."""
    dice = random.Random(f"{seed} requests")
    common = [start, *dice.choices(ids, k=max(0, mix.shared - 1))]
    moments = [0.0] * count if rate is None else arrivals(count, rate, seed=seed)
    requests = []
    for at in moments:
        rest = dice.choices(ids, k=dice.choice(mix.prompt) - len(common))
        requests.append(Asked(common + rest, dice.choice(mix.answer), at))
    return requests


def arrivals(count: int, rate: float, *, seed: int) -> list[float]:
    """The first `count` moments, in seconds, of a Poisson process of `rate` a second."""
    dice = random.Random(f"{seed} arrivals")
    return list(accumulate(dice.expovariate(rate) for _ in range(count)))
