"""llama.cpp as a runtime of the engine: slots are its sequences, and sampling, grammars and stops stay the engine's.

Its C interface is called in this process, by the same account of its structures by which files are proven.
"""

import ctypes
import logging
import os
import weakref
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modicum.exchange import gguf_child
from modicum.exchange.gguf_runtime import library
from modicum.serve.gguf import GgufSource
from modicum.store import UserError

_LOG = logging.getLogger("modicum.serve")
_POINTER, _INT, _BOOL = ctypes.c_void_p, ctypes.c_int32, ctypes.c_bool
_INTERFACE: dict[str, tuple[Any, list[Any]]] = {
    "llama_log_set": (None, [_POINTER, _POINTER]),
    "llama_model_free": (None, [_POINTER]),
    "llama_free": (None, [_POINTER]),
    "llama_model_n_embd_inp": (_INT, [_POINTER]),
    "llama_n_ctx_seq": (ctypes.c_uint32, [_POINTER]),
    "llama_memory_seq_rm": (_BOOL, [_POINTER, _INT, _INT, _INT]),
    "llama_memory_seq_cp": (None, [_POINTER, _INT, _INT, _INT, _INT]),
    **{
        f"llama_model_{fact}": (_BOOL, [_POINTER])
        for fact in ("is_recurrent", "is_hybrid", "is_diffusion", "has_encoder", "has_decoder")
    },
}
_ERROR = 4  # ggml_log_level
_SIZES = [512, 2048, 512, 1]  # n_ctx, n_batch, n_ubatch, n_seq_max as llama.cpp has them by default
_STEP = 256  # llama.cpp rounds the room of a sequence up to so many tokens
_END = -1  # of a range of positions: open


class LlamaModel:
    """A file's model, loaded, on whatever devices the installed llama.cpp finds. Raises UserError where it has no
    positions to go back to, as recurrent models have none."""

    def __init__(self, source: GgufSource) -> None:
        self._source, self.config = source, source.sizes
        self._llama = _opened()
        settings = self._llama.llama_model_default_params()
        self._model = self._llama.llama_model_load_from_file(os.fsencode(source.path), settings)
        if not self._model:
            raise UserError(f"{source.path}: llama.cpp does not load the file here, though it did before")
        weakref.finalize(self, self._llama.llama_model_free, self._model).atexit = False
        strange = [fact for fact in ("is_recurrent", "is_hybrid", "is_diffusion", "has_encoder") if self._is(fact)]
        if strange or not self._is("has_decoder"):
            word = strange[0].partition("_")[2] if strange else "no decoder"
            raise UserError(f"{source.path}: a model of this kind ({word}) cannot be served; plain decoders can")

    def _is(self, fact: str) -> bool:
        return bool(getattr(self._llama, f"llama_model_{fact}")(self._model))

    def slot_bytes(self, slots: int, capacity: int) -> int:
        """The memory that keys and values take."""
        return self._source.cache_numbers * (4 if self._source.float32 else 2) * slots * _padded(capacity)

    def passes(self, *, slots: int, capacity: int, longest: int) -> "LlamaPasses":
        """Its passes. Raises UserError where llama.cpp makes no context of that size."""
        exact = self._source.float32
        settings = self._llama.llama_context_default_params()
        words = ctypes.cast(ctypes.byref(settings), ctypes.POINTER(ctypes.c_uint32))
        if words[0:4] != _SIZES:
            raise UserError("the settings of this llama.cpp lie in unknown places; take another release of xllamacpp")
        if exact:
            settings = _checked(gguf_child.exact_settings, self._llama, longest)
            words = ctypes.cast(ctypes.byref(settings), ctypes.POINTER(ctypes.c_uint32))
        longest = max(longest, _STEP)
        words[0], words[1], words[2], words[3] = slots * _padded(capacity), longest, longest, slots
        context = self._llama.llama_init_from_model(self._model, settings)
        if not context or self._llama.llama_n_ctx_seq(context) < capacity:
            raise UserError(f"llama.cpp makes no context of {slots} slots of {capacity} tokens; take fewer slots")
        width = self._llama.llama_model_n_embd_inp(self._model)
        return LlamaPasses(self, self._llama, context, slots=slots, capacity=capacity, longest=longest, embedding=width)


class LlamaPasses:
    """llama.cpp's passes; slot n is its sequence n."""

    def __init__(
        self,
        model: LlamaModel,
        llama: Any,
        context: int,
        *,
        slots: int,
        capacity: int,
        longest: int,
        embedding: int,
    ) -> None:
        self.slots, self.capacity, self.device = slots, capacity, torch.device("cpu")
        self._llama, self._context = llama, context
        self._width, self._batch = model.config.vocab_size, llama.llama_batch_init(longest, 0, 1)
        # it holds the model, which must not be freed before
        weakref.finalize(self, _free, llama, self._batch, context, model).atexit = False
        llama.llama_set_n_threads(context, torch.get_num_threads(), torch.get_num_threads())
        self._memory = llama.llama_get_memory(context)
        self._nothing = np.zeros((_STEP, embedding), np.float32)
        # how many tokens each slot holds, and up to where its memory was ever written
        self._held, self._written = [0] * slots, [0] * slots

    def read(self, ids: Sequence[int], slot: int, start: int, *, last: bool) -> Tensor | None:
        self._cut(slot, start)
        self._decode((token, slot, start + n, last and n == len(ids) - 1) for n, token in enumerate(ids))
        self._hold(slot, start + len(ids))
        return self._logits(1) if last else None

    def step(self, ids: Sequence[int], slots: Sequence[int], places: Sequence[int]) -> Tensor:
        for slot, place in zip(slots, places, strict=True):
            self._cut(slot, place)
        self._decode((token, slot, place, True) for token, slot, place in zip(ids, slots, places, strict=True))
        for slot, place in zip(slots, places, strict=True):
            self._hold(slot, place + 1)
        return self._logits(len(ids))

    def copy(self, source: int, target: int, length: int) -> None:
        # between sequences with memory of their own llama.cpp copies all or nothing
        self._llama.llama_memory_seq_cp(self._memory, source, target, _END, _END)
        self._held[target], self._written[target] = self._held[source], self._written[source]
        self._cut(target, length)

    def clear(self, slot: int) -> None:
        # What is forgotten stays in memory, and with plain attention NaN there reaches those who may not see it. So it
        # is written over, in pieces of no less than what attention looks at beyond the last token.
        self._cut(slot, 0)
        written, self._written[slot] = self._written[slot], 0
        for start in range(0, written, _STEP):
            self._decode_nothing(slot, range(start, min(start + _STEP, written)))
        self._held[slot] = written
        self._cut(slot, 0)

    def warm(self) -> None:
        self.read([0], 0, 0, last=True)
        self._cut(0, 0)

    def _hold(self, slot: int, length: int) -> None:
        self._held[slot], self._written[slot] = length, max(length, self._written[slot])

    def _cut(self, slot: int, length: int) -> None:
        """Forget what stands in a slot beyond `length` tokens."""
        if self._held[slot] < length:
            raise RuntimeError(f"slot {slot} holds {self._held[slot]} tokens, not {length}")
        if self._held[slot] > length:
            if not self._llama.llama_memory_seq_rm(self._memory, slot, length, _END):
                raise RuntimeError(f"llama.cpp does not forget the tokens of slot {slot} beyond {length}")
            self._held[slot] = length

    def _decode(self, tokens: Iterable[tuple[int, int, int, bool]]) -> None:
        """Of each an id, its slot, its place, and whether its logits are wanted."""
        batch, count = self._batch, 0
        for token, slot, place, wanted in tokens:
            batch.token[count], batch.pos[count], batch.logits[count] = token, place, wanted
            batch.n_seq_id[count], batch.seq_id[count][0] = 1, slot
            count += 1
        batch.n_tokens = count
        self._run(batch)

    def _decode_nothing(self, slot: int, places: range) -> None:
        """Zeros instead of tokens, any of which may be the damaged one."""
        self._batch.n_tokens = len(places)
        batch = type(self._batch).from_buffer_copy(self._batch)
        batch.token, batch.embd = None, self._nothing.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        for number, place in enumerate(places):
            batch.pos[number], batch.logits[number] = place, False
            batch.n_seq_id[number], batch.seq_id[number][0] = 1, slot
        self._run(batch)

    def _run(self, batch: Any) -> None:
        if (status := self._llama.llama_decode(self._context, batch)) != 0:
            raise RuntimeError(f"llama.cpp does not decode a batch of {batch.n_tokens} tokens (status {status})")

    def _logits(self, rows: int) -> Tensor:
        found = self._llama.llama_get_logits(self._context)
        return torch.from_numpy(np.ctypeslib.as_array(found, shape=(rows, self._width)).copy())


def _free(llama: Any, batch: Any, context: int, _: LlamaModel) -> None:
    llama.llama_batch_free(batch)
    llama.llama_free(context)


def _padded(tokens: int) -> int:
    return -(-tokens // _STEP) * _STEP


@cache
def _opened() -> Any:
    """The library, once in a process. Raises UserError where it is not installed, or not as it is known."""
    try:
        llama = gguf_child.open_library(str(library()))
        for name, (result, arguments) in _INTERFACE.items():
            function = getattr(llama, name)
            function.restype, function.argtypes = result, arguments
    except AttributeError as error:
        raise UserError(f"the llama.cpp of this xllamacpp is not known here ({error}); take another release") from None
    llama.llama_log_set(_SAY, None)
    llama.llama_backend_init()
    _checked(gguf_child.check_batches, llama)
    return llama


def _checked(asked: Any, *given: Any) -> Any:
    """A program's last words are an error here."""
    try:
        return asked(*given)
    except SystemExit as end:
        raise UserError(str(end.code)) from None


def _say(level: int, text: bytes, _: Any) -> None:
    """llama.cpp tells much; what went wrong is worth the log."""
    if level == _ERROR:
        _LOG.error("llama.cpp: %s", text.decode("utf-8", "replace").strip())


_SAY = ctypes.CFUNCTYPE(None, _INT, ctypes.c_char_p, _POINTER)(_say)  # kept, for llama.cpp keeps it
