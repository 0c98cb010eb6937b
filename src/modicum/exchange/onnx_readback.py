"""What lies in a written ONNX folder, read back and held against the checkpoint: weights bit for bit, configs.

Where it differs, the likeliest cause is named.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from modicum.checkpoint import Checkpoint
from modicum.exchange.layouts import relaid
from modicum.exchange.names import EMBEDDING, HEAD
from modicum.exchange.onnx_nodes import onnx_library
from modicum.exchange.onnx_weights import ROUNDED, SCALES, Numbers, OnnxQuant, onnx_tensors
from modicum.exchange.onnx_writing import genai_config
from modicum.store import UserError, read_json


def read_back(folder: Path, file: str, name: str, checkpoint: Checkpoint, quant: OnnxQuant) -> int:
    """How many weights the graph has, when each is what it should be and answers end where the checkpoint's do.

    Raises UserError, `name` in front, listing what is not so.
    """
    model = onnx_library().load_model(folder / file, load_external_data=False)
    faults = [*_outside(model, folder / file), *_configs(folder, checkpoint, quant)]
    if not faults:
        found = {one.name: one for one in model.graph.initializer}
        faults += [*_vocabulary(found, checkpoint), *_weights(found, (folder / file).parent, checkpoint, quant)]
    if faults:
        more = [f"and {len(faults) - 12} more"] if len(faults) > 12 else []
        heading = f"{name}: read back, it is not the checkpoint, and was not written"
        raise UserError("\n  ".join([heading, *faults[:12], *more]))
    return sum(not weight.startswith("constant.") for weight in found)


def _outside(model: Any, file: Path) -> Iterator[str]:
    """Weights that lie where they should not: a file elsewhere would be left behind when the folder is moved."""
    for one in model.graph.initializer:
        places = {entry.value for entry in one.external_data if entry.key == "location"}
        if places - {f"{file.name}_data"}:
            there = ", ".join(map(repr, sorted(places)))
            yield f"{one.name}: lies in {there}, not in {file.name}_data beside the graph"


def _configs(folder: Path, checkpoint: Checkpoint, quant: OnnxQuant) -> Iterator[str]:
    """What transformers.js and onnxruntime-genai are told of the model, of ends and of the template."""
    ends = read_json(folder / "generation_config.json").get("eos_token_id")
    if (ends if isinstance(ends, list) else [ends]) != checkpoint.stop_ids:
        yield f"generation_config.json: eos_token_id is {ends}, the checkpoint ends an answer at {checkpoint.stop_ids}"
    yield from _other_values(read_json(folder / "genai_config.json"), genai_config(checkpoint, quant))
    config, ours = (read_json(place / "config.json") for place in (folder, checkpoint.path))
    differing = [key for key, value in ours.items() if config.get(key) != value]
    if differing:
        yield f"config.json: {', '.join(differing)} not as in the checkpoint's"
    if read_json(folder / "tokenizer_config.json").get("chat_template") != checkpoint.tokenizer.chat_template:
        yield "tokenizer_config.json: chat_template is not the checkpoint's, and transformers.js has no other"


def _other_values(found: Any, wanted: Any, place: str = "") -> Iterator[str]:
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in sorted({*found, *wanted}):
            yield from _other_values(found.get(key), wanted.get(key), f"{place}.{key}" if place else key)
    elif found != wanted:
        yield f"genai_config.json: {place} is {found}, should be {wanted}"


def _vocabulary(found: dict[str, Any], checkpoint: Checkpoint) -> Iterator[str]:
    """What has not a row for each token, whatever the writer took for the weights."""
    tokens = checkpoint.config.vocab_size
    for name in (EMBEDDING, HEAD, EMBEDDING + ROUNDED, HEAD + ROUNDED):
        if name in found and found[name].dims[0] != tokens:
            yield f"{name}: has rows for {found[name].dims[0]} tokens, the checkpoint's vocabulary has {tokens}"


def _weights(found: dict[str, Any], place: Path, checkpoint: Checkpoint, quant: OnnxQuant) -> Iterator[str]:
    """found: initializers by name, whose numbers may lie beside the graph in `place`; read one at a time."""
    wanted = set()
    for name, ours in onnx_tensors(checkpoint.weights, quant):
        wanted.add(name)
        if name not in found:
            yield f"{name}: missing"
            continue
        there = onnx_library().numpy_helper.to_array(found[name], str(place))
        if (there.dtype, there.shape) != (ours.dtype, ours.shape):
            yield f"{name}: is {there.dtype} {list(there.shape)}, should be {ours.dtype} {list(ours.shape)}"
        elif not np.array_equal(there, ours):
            yield f"{name}: {_cause(there, ours, name, checkpoint, quant)}"
    for name in sorted(found.keys() - wanted):
        if not name.startswith("constant."):
            tied = name.startswith(HEAD) and checkpoint.config.tie_word_embeddings
            yield f"{name}: left over{' (the head is tied: it is the embedding)' if tied else ''}"


def _cause(there: Numbers, ours: Numbers, name: str, checkpoint: Checkpoint, quant: OnnxQuant) -> str:
    moved = relaid(checkpoint.weights, head_dim=checkpoint.config.head_dim, source="half", target="interleaved")
    if any(np.array_equal(other, there) for title, other in onnx_tensors(moved, quant) if title == name):
        return "its rows are in the interleaved rotary layout"
    for title, other in _alike(onnx_tensors(checkpoint.weights, quant), there):
        if np.array_equal(other, there):
            return f"holds the numbers of {title}"
    places = np.argwhere(there != ours)
    what = "scales" if name.endswith(SCALES) else "numbers"
    return f"{len(places)} of {ours.size} {what} differ, the first at {places[0].tolist()}"


def _alike(tensors: Iterable[tuple[str, Numbers]], there: Numbers) -> Iterator[tuple[str, Numbers]]:
    return ((title, other) for title, other in tensors if other.shape == there.shape and other.dtype == there.dtype)
