"""The process that measures one system's answers; reads its order from standard input, prints one line."""

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from modicum.bench.turns import take_order
from modicum.checkpoint import load_checkpoint
from modicum.exchange.gguf_runtime import timed
from modicum.generate import Generator, SamplingParams
from modicum.store import UserError, peak_memory_bytes

Answering = Callable[[list[int], int], Any]


def measure(order: dict[str, Any]) -> dict[str, Any]:
    """Tokens a second while answering and while reading, and the peak of resident memory, in 10^6 bytes.

    order: system, path (a checkpoint, or a GGUF file), prompt and short (ids), tokens, repeats, threads.
    """
    torch.set_num_threads(order["threads"])
    prompt, short, tokens, repeats = (order[name] for name in ("prompt", "short", "tokens", "repeats"))
    if order["system"] == "llama.cpp":
        found = timed(Path(order["path"]), prompt, short, tokens=tokens, repeats=repeats, threads=order["threads"])
    else:
        answering = {"modicum": _modicum, "transformers": _transformers}[order["system"]](order["path"])
        found = _timed(answering, prompt, short, tokens, repeats)
    decode, prefill = tokens / median(found["decode"]), len(prompt) / median(found["prefill"])
    peak = found["peak_bytes"] / 1e6
    said = f"{decode:,.0f} tokens/s, {prefill:,.0f} while reading, {peak:,.0f} MB"
    return {"tokens_per_s": decode, "prefill_tokens_per_s": prefill, "peak_rss_mb": peak, "said": said}


def _timed(answer: Answering, prompt: list[int], short: list[int], tokens: int, repeats: int) -> dict[str, Any]:
    """The first token's time is the prompt's; what `tokens` more take is theirs."""
    prefill, decode = [], []
    for _ in range(repeats + 1):
        prefill.append(_seconds(answer, prompt, 1))
        one = _seconds(answer, short, 1)
        decode.append(_seconds(answer, short, tokens + 1) - one)
    # the first of each finds its memory and its kernels
    return {"prefill": prefill[1:], "decode": decode[1:], "peak_bytes": peak_memory_bytes()}


def _seconds(answer: Answering, ids: list[int], tokens: int) -> float:
    start = time.perf_counter()
    answer(ids, tokens)
    return time.perf_counter() - start


def _modicum(path: str) -> Answering:
    loaded = load_checkpoint(Path(path), verify=False)
    generator = Generator(loaded.model(), loaded.tokenizer, stop_ids=[])

    def answer(ids: list[int], tokens: int) -> Any:
        return generator.generate([ids], SamplingParams(temperature=0, max_new_tokens=tokens))

    return answer


def _transformers(path: str) -> Answering:
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise UserError("transformers is not installed here: pip install 'modicum[bench]'") from None

    # from_pretrained leaves it in evaluation mode
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def answer(ids: list[int], tokens: int) -> Any:
        row = torch.tensor([ids])
        lengths = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        return model.generate(row, attention_mask=torch.ones_like(row), do_sample=False, **lengths)

    return answer


if __name__ == "__main__":
    take_order(measure)
