"""What llama.cpp makes of a GGUF file: asked in a process of its own, which a faulty file may end."""

import json
import signal
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from modicum.exchange import gguf_child, gguf_quantizer
from modicum.exchange.children import limit_seconds, passing_folder, run_child
from modicum.store import UserError, written_by_numpy

INSTALL = "pip install 'modicum[gguf]'"


@dataclass(frozen=True)
class Answer:
    """ids: of each text, with what the file says goes around it. logits: (T, V) float32 of each prompt. greedy: how one
    goes on. The others are the vocabulary as llama.cpp has it: tokens in it, ids (-1: none), what ends an answer."""

    tokens: int
    context: int
    pre: str | None
    bos: int
    eos: int
    eot: int
    pad: int
    add_bos: bool
    add_eos: bool
    ends: list[int]
    template: str | None
    ids: list[list[int]]
    logits: list[NDArray[np.float32]]
    greedy: list[list[int]]


def library() -> Path:
    """The shared library that holds llama.cpp. Raises UserError with the pip line where it is not installed."""
    spec = find_spec("xllamacpp")  # not imported: a fault in it must not be ours
    places = list(spec.submodule_search_locations or []) if spec else []
    found = [file for place in places for file in sorted(Path(place).glob("xllamacpp*.so"))]
    if not found:
        raise UserError(f"a GGUF file is proven in llama.cpp, and xllamacpp is not installed: {INSTALL}")
    return found[0]


def ask(
    model: Path,
    *,
    name: str | None = None,
    texts: Sequence[str] = (),
    prompts: Iterable[Iterable[int]] = (),
    begun: Iterable[Iterable[int]] = (),
    steps: int = 0,
    limit: float | None = None,
    work: Path | None = None,
) -> Answer:
    """Load `model` in llama.cpp on the CPU, tokenize `texts`, run `prompts` (ids), and go on from those `begun`.

    Keys and values are float32, control tokens in texts are text. Raises UserError, beginning with `name` (the file's),
    in llama.cpp's own words where it refuses the file, crashes, or takes longer than `limit` seconds (without it, what
    such work may take). work: a folder with room for the logits; without it, where the system puts passing files.
    """
    name = name or str(model)
    request: dict[str, Any] = {
        "model": str(model),
        "threads": torch.get_num_threads(),
        "texts": list(texts),
        "prompts": [list(map(int, prompt)) for prompt in prompts],
        "begun": [list(map(int, prompt)) for prompt in begun],
        "steps": steps,
    }
    tokens = sum(map(len, request["prompts"])) + sum(len(ids) + steps for ids in request["begun"])
    with passing_folder(work) as folder:
        _run(gguf_child.__file__, request, folder, name, limit or limit_seconds(model.stat().st_size, tokens))
        facts: dict[str, Any] = json.loads((folder / "facts.json").read_text("utf-8"))
        # mapped, so that a large vocabulary's need no memory; they stay readable when their names are gone
        logits = [np.load(folder / f"logits-{number}.npy", mmap_mode="c") for number in range(len(request["prompts"]))]
        greedy = json.loads((folder / "greedy.json").read_text("utf-8")) if request["begun"] else []
    return Answer(**facts, logits=logits, greedy=greedy)


def timed(
    model: Path, prompt: Sequence[int], short: Sequence[int], *, tokens: int, repeats: int, threads: int
) -> dict[str, Any]:
    """Seconds of `prompt` ("prefill") and of `tokens` tokens after `short` ("decode"), one after the other, in each of
    `repeats`, on a CPU, as llama.cpp is set by default; "load_seconds" before; "peak_bytes" of resident memory, and
    "memory_bytes", the part of it that came with the file."""
    how = {"prompt": list(prompt), "short": list(short), "tokens": tokens, "repeats": repeats}
    with passing_folder() as folder:
        request = {"model": str(model), "threads": threads, "timed": how}
        work = (len(prompt) + len(short) + tokens) * (repeats + 1)
        _run(gguf_child.__file__, request, folder, str(model), limit_seconds(model.stat().st_size, work))
        answer: dict[str, Any] = json.loads((folder / "times.json").read_text("utf-8"))
    return answer


def quantized(
    rows: Sequence[tuple[NDArray[np.float32], int, int, int]], work: Path | None = None
) -> list[NDArray[np.uint8]]:
    """Rows as the bytes of a type, by ggml's own kernels: of each (rows, ggml's number of the type, block, bytes).

    work: a folder with room for all of them, as in `ask`. Raises UserError where they do not fit.
    """
    request = [{"kind": kind, "block": block, "bytes": size} for _, kind, block, size in rows]
    with passing_folder(work) as folder:
        for number, (data, *_) in enumerate(rows):
            with written_by_numpy(folder / f"{number}.npy"):
                np.save(folder / f"{number}.npy", data)
        # a number is looked at about as often as a weight is in a thousand tokens
        limit = limit_seconds(sum(data.nbytes for data, *_ in rows), 1000)
        _run(gguf_quantizer.__file__, request, folder, "quantizing", limit)
        return [np.load(folder / f"{number}.out.npy") for number in range(len(rows))]


def _run(program: str, request: Any, folder: Path, name: str, limit: float) -> None:
    """Let a program answer the request in `folder`. Raises UserError, `name` in front, where it does not."""
    (folder / "request.json").write_text(json.dumps(request), "utf-8")
    ended = run_child(program, [library(), folder], name=name, runtime="llama.cpp", limit=limit)
    if ended.returncode != 0:
        raise UserError(f"{name}: {_fault(ended)}")


def _fault(ended: subprocess.CompletedProcess[bytes]) -> str:
    """How the process ended, and the lines in which llama.cpp says why."""
    lines = ended.stderr.decode("utf-8", "replace").splitlines()
    if ended.returncode < 0:
        what = f"llama.cpp crashed on it ({signal.Signals(-ended.returncode).name})"
    else:
        what, lines = (lines[-1], lines[:-1]) if lines else ("llama.cpp failed without a word", [])
    reasons = [line.strip() for line in lines if "error" in line.lower() or "assert" in line.lower()] or lines[-2:]
    return "\n".join([what, *(f"  {reason[:300]}" for reason in reasons[-4:])])
