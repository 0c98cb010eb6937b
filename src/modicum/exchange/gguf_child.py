"""A program of its own: load a GGUF file in llama.cpp, say what it makes of it, and exit.

    python -P gguf_child.py LIBRARY FOLDER

LIBRARY is the shared library of the xllamacpp wheel: llama.cpp, compiled in, with its C interface for all to call.
FOLDER holds request.json: {"model", "threads", "texts", "prompts", "begun", "steps"}. Written there: facts.json;
logits-N.npy, float32 (T, V), for prompt N; greedy.json, the likeliest `steps` tokens after each text begun. With
"timed", {"prompt", "short", "tokens", "repeats"}, instead of all that times.json: seconds of the prompt and of so many
tokens after the short one, repeated, in the settings that llama.cpp has by default; of loading; and bytes of memory.
It runs apart because a faulty file may end the process that reads it. Imports nothing of ours.
"""

import ctypes
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

# llama.h of 2025 and 2026. Structures go by value: room for more than they hold is harmless, for less is not.
_ROOM = 128
_F32, _F16 = 0, 1  # ggml_type
_UNKNOWN = "the {} of this llama.cpp lie in places that are not known here; take another release of xllamacpp"


class _Settings(ctypes.Structure):
    _fields_ = (("words", ctypes.c_uint64 * _ROOM),)


class _Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
        ("more", ctypes.c_uint64 * 16),  # room for what later releases put behind
    )


_POINTER, _INT, _BOOL, _TEXT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_bool, ctypes.c_char_p
_ROLES = ("bos", "eos", "eot", "pad")
_INTERFACE: dict[str, tuple[Any, list[Any]]] = {
    "llama_backend_init": (None, []),
    "llama_model_default_params": (_Settings, []),
    "llama_context_default_params": (_Settings, []),
    "llama_model_load_from_file": (_POINTER, [_TEXT, _Settings]),
    "llama_init_from_model": (_POINTER, [_POINTER, _Settings]),
    "llama_set_n_threads": (None, [_POINTER, _INT, _INT]),
    "llama_get_memory": (_POINTER, [_POINTER]),
    "llama_memory_clear": (None, [_POINTER, _BOOL]),
    "llama_batch_init": (_Batch, [_INT, _INT, _INT]),
    "llama_batch_get_one": (_Batch, [ctypes.POINTER(_INT), _INT]),
    "llama_batch_free": (None, [_Batch]),
    "llama_decode": (_INT, [_POINTER, _Batch]),
    "llama_get_logits": (ctypes.POINTER(ctypes.c_float), [_POINTER]),
    "llama_model_get_vocab": (_POINTER, [_POINTER]),
    "llama_vocab_n_tokens": (_INT, [_POINTER]),
    "llama_vocab_is_eog": (_BOOL, [_POINTER, _INT]),
    "llama_vocab_get_add_bos": (_BOOL, [_POINTER]),
    "llama_vocab_get_add_eos": (_BOOL, [_POINTER]),
    "llama_model_n_ctx_train": (_INT, [_POINTER]),
    "llama_model_chat_template": (_TEXT, [_POINTER, _TEXT]),
    "llama_model_meta_val_str": (_INT, [_POINTER, _TEXT, _POINTER, ctypes.c_size_t]),
    "llama_tokenize": (_INT, [_POINTER, _TEXT, _INT, ctypes.POINTER(_INT), _INT, _BOOL, _BOOL]),
    **{f"llama_vocab_{role}": (_INT, [_POINTER]) for role in _ROLES},
}


def main(library: str, folder: Path) -> None:
    """Answer the request in `folder`. Exits with a line on standard error for what cannot be done."""
    request = json.loads((folder / "request.json").read_text("utf-8"))
    llama = open_library(library)
    llama.llama_backend_init()
    check_batches(llama)
    before, began = _resident("VmRSS"), time.perf_counter()
    model = llama.llama_model_load_from_file(request["model"].encode(), _model_settings(llama))
    if not model:
        sys.exit("llama.cpp does not load the file")
    if "timed" in request:
        seconds = time.perf_counter() - began
        times = _timed(llama, model, request["threads"], **request["timed"])
        times |= {"load_seconds": seconds, "memory_bytes": times["peak_bytes"] - before}
        (folder / "times.json").write_text(json.dumps(times))
        return
    vocab = llama.llama_model_get_vocab(model)
    facts = _facts(llama, model, vocab)
    facts["ids"] = [_tokenize(llama, vocab, text) for text in request["texts"]]
    (folder / "facts.json").write_text(json.dumps(facts), "utf-8")
    lengths = [len(prompt) for prompt in request["prompts"]]
    lengths += [len(prompt) + request["steps"] for prompt in request["begun"]]
    if not lengths:
        return
    context = llama.llama_init_from_model(model, exact_settings(llama, max(lengths)))
    if not context:
        sys.exit("llama.cpp makes no context for the file")
    llama.llama_set_n_threads(context, request["threads"], request["threads"])
    for number, prompt in enumerate(request["prompts"]):
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        np.save(folder / f"logits-{number}.npy", _say(llama, context, prompt, 0, facts["tokens"]))
    found = [_go_on(llama, context, prompt, request["steps"], facts["tokens"]) for prompt in request["begun"]]
    (folder / "greedy.json").write_text(json.dumps(found), "utf-8")


def open_library(library: str) -> Any:
    """llama.cpp, with the types of the functions that are called here; a server calls them, and more, by this account.
    AttributeError where it has others."""
    llama = ctypes.CDLL(library)
    for name, (result, arguments) in _INTERFACE.items():
        function = getattr(llama, name)
        function.restype, function.argtypes = result, arguments
    return llama


def _model_settings(llama: Any) -> _Settings:
    """The defaults, on the CPU: n_gpu_layers, -1 for all, stands behind two pointers and before split_mode."""
    settings: _Settings = llama.llama_model_default_params()
    words = ctypes.cast(ctypes.byref(settings), ctypes.POINTER(ctypes.c_int32))
    if words[4:6] != [-1, 1]:
        sys.exit(_UNKNOWN.format("settings"))
    words[4] = 0
    return settings


def exact_settings(llama: Any, length: int) -> _Settings:
    """The defaults, but `length` positions at once, plain attention, and keys and values in float32.

    Half-precision keys alone would move logits by a thousandth. New releases put fields in and take some out, so the
    place is found by what is around it: four automatic kinds (-1), two zeros and four times -1.0.
    """
    settings: _Settings = llama.llama_context_default_params()
    words = ctypes.cast(ctypes.byref(settings), ctypes.POINTER(ctypes.c_int32))
    floats = ctypes.cast(words, ctypes.POINTER(ctypes.c_float))
    places = [
        at
        for at in range(4, 40)
        if [words[at + i] for i in range(6)] == [-1, -1, -1, -1, 0, 0]
        and all(floats[at + 6 + i] == -1 for i in range(4))
    ]
    sizes = [words[i] for i in range(3)]
    if len(places) != 1 or sizes != [512, 2048, 512]:
        sys.exit(_UNKNOWN.format("settings"))
    (at,) = places
    kinds = next((k for k in range(at + 10, at + 24) if (words[k], words[k + 1]) == (_F16, _F16)), None)
    if kinds is None:
        sys.exit(_UNKNOWN.format("settings"))
    words[0] = words[1] = words[2] = length
    words[at + 3] = 0  # flash attention off
    words[kinds] = words[kinds + 1] = _F32
    return settings


def check_batches(llama: Any) -> None:
    """A batch of one token must hold what is known of it: only what is a list has an address."""
    token = (ctypes.c_int32 * 1)(7)
    given, made = llama.llama_batch_get_one(token, 1), llama.llama_batch_init(1, 0, 1)
    lists = (made.token, made.pos, made.n_seq_id, made.seq_id, made.logits)
    known = (
        given.n_tokens == 1
        and ctypes.addressof(token) == ctypes.cast(given.token, ctypes.c_void_p).value
        and not any((given.embd, given.pos, given.n_seq_id, given.seq_id, given.logits))
        and all(lists)
        and not (made.n_tokens or made.embd)
    )
    if not known or not made.seq_id[0] or made.seq_id[1]:  # a list of lists, with none behind the last
        sys.exit(_UNKNOWN.format("batches"))
    llama.llama_batch_free(made)


def _facts(llama: Any, model: Any, vocab: Any) -> dict[str, Any]:
    tokens = llama.llama_vocab_n_tokens(vocab)
    template = llama.llama_model_chat_template(model, None)
    return {
        "tokens": tokens,
        "context": llama.llama_model_n_ctx_train(model),
        "pre": _metadata(llama, model, b"tokenizer.ggml.pre"),
        **{role: getattr(llama, f"llama_vocab_{role}")(vocab) for role in _ROLES},
        "add_bos": llama.llama_vocab_get_add_bos(vocab),
        "add_eos": llama.llama_vocab_get_add_eos(vocab),
        "ends": [number for number in range(tokens) if llama.llama_vocab_is_eog(vocab, number)],
        "template": None if template is None else template.decode("utf-8"),
    }


def _metadata(llama: Any, model: Any, key: bytes) -> str | None:
    room = ctypes.create_string_buffer(1 << 10)
    found = llama.llama_model_meta_val_str(model, key, room, len(room))
    return None if found < 0 else room.value.decode("utf-8")


def _tokenize(llama: Any, vocab: Any, text: str) -> list[int]:
    """The ids of a text as a user's: control tokens in it are text; what the file says goes before and after it."""
    data = text.encode("utf-8")
    room = len(data) + 8
    ids = (ctypes.c_int32 * room)()
    found = llama.llama_tokenize(vocab, data, len(data), ids, room, True, False)
    if found < 0:
        sys.exit(f"llama.cpp does not tokenize {text!r}")
    return list(ids[:found])


def _say(llama: Any, context: Any, ids: list[int], start: int, width: int) -> Any:
    """Logits (T, V) float32 of ids that stand from position `start` on; what came before is in the context's cache."""
    batch = llama.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for place, token in enumerate(ids):
        batch.token[place], batch.pos[place], batch.logits[place] = token, start + place, 1
        batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
    if llama.llama_decode(context, batch) != 0:
        sys.exit(f"llama.cpp does not run {len(ids)} tokens from position {start} on")
    said = np.ctypeslib.as_array(llama.llama_get_logits(context), shape=(len(ids), width)).copy()
    llama.llama_batch_free(batch)
    return said


def _go_on(llama: Any, context: Any, prompt: list[int], steps: int, width: int) -> list[int]:
    llama.llama_memory_clear(llama.llama_get_memory(context), True)
    said = _say(llama, context, prompt, 0, width)
    ids: list[int] = []
    while len(ids) < steps:
        ids.append(int(said[-1].argmax()))
        said = _say(llama, context, ids[-1:], len(prompt) + len(ids) - 1, width)
    return ids


def _timed(
    llama: Any, model: Any, threads: int, prompt: list[int], short: list[int], tokens: int, repeats: int
) -> dict[str, Any]:
    settings: _Settings = llama.llama_context_default_params()
    words = ctypes.cast(ctypes.byref(settings), ctypes.POINTER(ctypes.c_uint32))
    if words[0:3] != [512, 2048, 512]:
        sys.exit(_UNKNOWN.format("settings"))
    words[0] = max(len(prompt), len(short) + tokens)
    context = llama.llama_init_from_model(model, settings)
    if not context:
        sys.exit("llama.cpp makes no context for the file")
    llama.llama_set_n_threads(context, threads, threads)
    width = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    most = words[1]  # tokens of a batch, above which it aborts
    batch = llama.llama_batch_init(most, 0, 1)

    def likeliest(ids: list[int], start: int) -> int:
        for at in range(0, len(ids), most):
            piece = ids[at : at + most]
            batch.n_tokens = len(piece)
            for place, token in enumerate(piece):
                batch.token[place], batch.pos[place] = token, start + at + place
                batch.logits[place] = at + place == len(ids) - 1
                batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
            if llama.llama_decode(context, batch) != 0:
                sys.exit(f"llama.cpp does not run {len(piece)} tokens from position {start + at} on")
        return int(np.ctypeslib.as_array(llama.llama_get_logits(context), shape=(width,)).argmax())

    times: dict[str, list[float]] = {"prefill": [], "decode": []}
    for _ in range(repeats + 1):
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        begun = time.perf_counter()
        likeliest(prompt, 0)
        times["prefill"].append(time.perf_counter() - begun)
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        token = likeliest(short, 0)
        begun = time.perf_counter()
        for place in range(tokens):
            token = likeliest([token], len(short) + place)
        times["decode"].append(time.perf_counter() - begun)
    warm = {name: seconds[1:] for name, seconds in times.items()}
    return {**warm, "peak_bytes": _resident("VmHWM")}


def _resident(field: str) -> int:
    """Bytes of this process, now (VmRSS) or at most (VmHWM), by the system's account; where it keeps none, the most.

    Linux has another figure in getrusage: there the process that started this one counts too.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        return next(int(line.split()[1]) << 10 for line in status.read_text().splitlines() if line.startswith(field))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
