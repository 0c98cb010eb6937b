"""What a score may claim, in plain words: the sentence follows from the numbers, flattering or not."""

from collections.abc import Mapping
from typing import Any

from modicum.road.words import percent


def choice_verdict(result: Mapping[str, Any]) -> str:
    """One sentence about a multiple-choice score with its interval (`low`, `high`) beside `chance`, `majority` (always
    the commonest answer) and `word_overlap` (the choice sharing most words with the question); all shares of one."""
    low, high, chance = result["low"], result["high"], result["chance"]
    if low <= chance <= high:
        return f"Not distinguishable from chance ({percent(chance)}): the interval covers it."
    if high < chance:
        return f"Below chance ({percent(chance)}): worse than guessing, which ignorance alone does not explain."
    rivals = {"giving the commonest answer": result["majority"], "counting shared words": result["word_overlap"]}
    name, best = max(rivals.items(), key=lambda rival: rival[1])
    if low > best:
        return f"Above chance ({percent(chance)}), and above both baselines."
    if high < best:
        return f"Above chance ({percent(chance)}), but below {name} ({percent(best)})."
    return f"Above chance ({percent(chance)}), but not distinguishable from {name} ({percent(best)})."


def bits_verdict(before: float | None, base: float, chat: float | None) -> str:
    """One sentence about held-out bits per byte before and after pretraining (None: there was none), and after
    fine-tuning."""
    if before is None:
        text = "The starting checkpoint was not pretrained further"
    elif base >= before:
        return f"Pretraining did not help on held-out text: {before:.2f} before, {base:.2f} after."
    else:
        text = f"Pretraining brought it down from {before:.2f}, by {percent(1 - base / before)}"
    if chat is None:
        return f"{text}."
    way = "raised it to" if chat > base else "brought it to"
    return f"{text}; tuning on conversations {way} {chat:.2f}."


def answer_verdict(base: Mapping[str, Any], chat: Mapping[str, Any], shuffled: Mapping[str, Any] | None) -> str:
    """One sentence about the loss on held-out answers: base model, chat model, chat model after prompts of others
    (None: there are no others); each with `nats_per_token` and its interval, `low` to `high`."""
    lower = 1 - chat["nats_per_token"] / base["nats_per_token"]
    first = (
        f"On held-out answers its loss is {percent(lower)} lower than the base model’s"
        if lower > 0
        else "On held-out answers its loss is no lower than the base model’s"
    )
    if shuffled is None:
        return f"{first}."
    if chat["nats_per_token"] >= shuffled["nats_per_token"]:
        return f"{first}; the true prompt helps no more than another’s, so it does not read the prompt."
    if chat["high"] < shuffled["low"]:
        return f"{first}, and lower after the true prompt than after another’s: it reads the prompt."
    return f"{first}, and lower after the true prompt than after another’s, but their intervals overlap."
