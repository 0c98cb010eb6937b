"""A program of its own: run an ONNX file in onnxruntime, say what it says, and exit.

    python -P onnx_child.py FOLDER

FOLDER holds request.json: {"model", "threads", "runs", "begun", "steps"}. A run is {"ids": rows, "mask": rows, "cuts":
places where the pass is broken off and taken up with the cache}; its logits become logits-N.npy, float32 (B, T, V).
begun: texts that are continued by the likeliest `steps` tokens, into greedy.json. facts.json: inputs, outputs, the time
to load, tokens a second of the last continuation, and memory then. Imports nothing of ours: a faulty file may end it.
"""

import json
import sys
import time
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

onnxruntime: Any = import_module("onnxruntime")  # which tells no types


def main(folder: Path) -> None:
    """Answer the request in `folder`."""
    request = json.loads((folder / "request.json").read_text("utf-8"))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = request["threads"]
    options.log_severity_level = 3
    before, began = _memory("VmRSS"), time.perf_counter()
    session = onnxruntime.InferenceSession(request["model"], options, providers=["CPUExecutionProvider"])
    facts: dict[str, Any] = {
        "load_seconds": time.perf_counter() - began,
        "inputs": {one.name: [one.type, one.shape] for one in session.get_inputs()},
        "outputs": {one.name: [one.type, one.shape] for one in session.get_outputs()},
    }
    greedy: list[list[int]] = []
    facts["tokens_per_second"] = 0.0
    for text in request["begun"]:
        began = time.perf_counter()
        greedy.append(_go_on(session, text, request["steps"]))
        facts["tokens_per_second"] = len(greedy[-1]) / (time.perf_counter() - began)
    facts["memory_bytes"] = max(0, _memory("VmHWM") - before)
    (folder / "greedy.json").write_text(json.dumps(greedy), "utf-8")
    for number, run in enumerate(request["runs"]):
        ids, mask = (np.array(run[part], dtype=np.int64) for part in ("ids", "mask"))
        said, cache, places = [], None, [0, *run["cuts"], ids.shape[1]]
        for start, end in pairwise(places):
            logits, cache = _say(session, ids[:, start:end], mask[:, :end], cache)
            said.append(logits)
        np.save(folder / f"logits-{number}.npy", np.concatenate(said, axis=1))
    (folder / "facts.json").write_text(json.dumps(facts), "utf-8")


def _say(session: Any, ids: Any, mask: Any, cache: Any) -> tuple[Any, Any]:
    """Logits (B, T, V) of ids (B, T) behind a cache, and the new cache. mask: (B, past + T)."""
    past = [one for one in session.get_inputs() if one.name.startswith("past_key_values.")]
    if cache is None:
        kind = np.float16 if past[0].type == "tensor(float16)" else np.float32
        cache = [np.zeros((len(ids), one.shape[1], 0, one.shape[3]), dtype=kind) for one in past]
    # padding has the place of the first token: it is not seen
    places = np.maximum(mask.cumsum(axis=1) - 1, 0)[:, -ids.shape[1] :]
    named = {one.name: part for one, part in zip(past, cache, strict=True)}
    outputs = ["logits", *(one.name.replace("past_key_values", "present") for one in past)]
    given = {"input_ids": ids, "attention_mask": mask, "position_ids": places, **named}
    logits, *cache = session.run(outputs, given)
    return logits, cache


def _go_on(session: Any, text: list[int], steps: int) -> list[int]:
    said, cache = _say(session, np.array([text]), np.ones((1, len(text)), dtype=np.int64), None)
    ids: list[int] = []
    while len(ids) < steps:
        ids.append(int(said[0, -1].argmax()))
        seen = np.ones((1, len(text) + len(ids)), dtype=np.int64)
        said, cache = _say(session, np.array([ids[-1:]]), seen, cache)
    return ids


def _memory(field: str) -> int:
    """Bytes of this process, by the system's own account; 0 where it keeps none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except FileNotFoundError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
