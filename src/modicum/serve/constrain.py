"""Grammars that an answer must follow: compiled under limits by llguidance, kept for a while, and one mask a request.

A schema, regular expression or grammar that cannot be followed in full is refused; nothing is ever left unconstrained.
"""

import asyncio
import json
import re
import sys
from base64 import b64encode
from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from typing import Any

import llguidance
import numpy as np
import torch
from torch import Tensor

from modicum.serve import grammar_child
from modicum.serve.background import Background
from modicum.serve.errors import bad_request, busy
from modicum.serve.limits import Limits
from modicum.serve.schemas import check_schema, compiled_as, spaced
from modicum.tokenizer import Tokenizer
from modicum.tokenizer.special import TOOL_MARKERS

_SCHEMA = "%json"
# A string, a comment or a regular expression, to its end or the text's; or the letters that begin a schema.
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*+"?|//[^\n]*|/(?:\\.|[^/\\])++/?|%json', re.DOTALL)


class Grammars:
    """Compiles grammars for one tokenizer. rows: the width of the model's logits. stop_ids: what ends an answer."""

    def __init__(self, tokenizer: Tokenizer, rows: int, stop_ids: Iterable[int], limits: Limits) -> None:
        tokens = [tokenizer.id_bytes(i) if i < tokenizer.vocab_size else b"" for i in range(rows)]
        self.rows, self._limits = rows, limits
        named = {i: tokenizer.id_bytes(i).decode() for i in tokenizer.special_ids}
        markers = {i for i, name in named.items() if name in TOOL_MARKERS}
        self._markers = {named[i] for i in markers}
        self._ends = sorted(stop_ids)
        # a grammar takes a special token by its name alone, never as text: what is text of an answer must be none
        self._special = sorted((tokenizer.special_ids - tokenizer.spoken_ids) | markers | set(self._ends))
        self._vocabulary = grammar_child.vocabulary(tokens, self._special, self._ends)
        self._sent = [b64encode(token).decode() for token in tokens]
        self._kept: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._turns = asyncio.Semaphore(2)
        self._background = Background()

    @property
    def knows_tool_markers(self) -> bool:
        """Whether a tool call can be told from text, because its markers are control tokens."""
        return {"<tool_call>", "</tool_call>"} <= self._markers

    @property
    def compiling(self) -> bool:
        """Whether a thread is at work on one."""
        return self._background.at_work > 0

    def __len__(self) -> int:
        return len(self._kept)

    async def masks(self, grammar: str, count: int, *, param: str) -> "list[GrammarMask]":
        """`count` masks that allow what the grammar does. Raises ApiError 400 when it cannot be compiled within the
        limits, 503 when too many others are being compiled."""
        if grammar not in self._kept:
            try:
                async with asyncio.timeout(4 * self._limits.schema_seconds):
                    await self._turns.acquire()
            except TimeoutError:
                raise busy("too many grammars are being compiled") from None
            try:
                if grammar not in self._kept:
                    self._keep(grammar, await self._compile(grammar, param))
            finally:
                self._turns.release()
        self._kept.move_to_end(grammar)
        compiled = self._kept[grammar]
        return [GrammarMask(compiled.deep_copy(), self.rows) for _ in range(count)]

    def _keep(self, grammar: str, compiled: llguidance.LLMatcher) -> None:
        self._kept[grammar] = compiled
        while len(self._kept) > self._limits.grammars:
            self._kept.popitem(last=False)

    async def _compile(self, grammar: str, param: str) -> llguidance.LLMatcher:
        fault = await self._fault(grammar)
        if fault:
            raise bad_request(f"{param}: this grammar cannot be followed: {fault}", param, "unsupported_grammar")
        limits = grammar_child.limits()
        compiled = await self._background.run(
            partial(llguidance.LLMatcher, self._vocabulary, grammar, log_level=0, limits=limits)
        )
        if compiled.is_error():
            raise bad_request(f"{param}: this grammar cannot be followed: {compiled.get_error()}", param)
        return compiled

    async def _fault(self, grammar: str) -> str:
        """What is wrong with the grammar, found where it can do no harm; empty when it compiles."""
        request = {"tokens": self._sent, "special": self._special, "ends": self._ends, "grammar": grammar}
        seconds = self._limits.schema_seconds
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", grammar_child.__file__, str(seconds)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(2 * seconds):  # of the clock; its processor time has a limit of its own
                output, _ = await process.communicate(json.dumps(request).encode())
        except TimeoutError:
            return f"it takes longer than {seconds:g} seconds to compile"
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            return f"it takes more than {seconds:g} seconds or too much memory to compile"
        return str(json.loads(output))


class GrammarMask:
    """The engine's TokenMask: what may come next. What it raises ends this request alone."""

    def __init__(self, matcher: llguidance.LLMatcher, rows: int) -> None:
        self._matcher, self._rows = matcher, rows

    def allowed(self) -> Tensor:
        """(rows,) bool. Raises ApiError when the grammar has become too much to follow."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return torch.from_numpy(np.unpackbits(bits, count=self._rows, bitorder="little").view(np.bool_))

    def take(self, token: int) -> None:
        """The token that was chosen."""
        self._matcher.consume_token(token)
        self._check()

    def finished(self) -> bool:
        """Whether nothing but the end can follow."""
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise bad_request(f"the grammar cannot be followed further: {self._matcher.get_error()}", None, "grammar")


def json_grammar(schema: Any, limits: Limits, *, param: str) -> str:
    """llguidance's grammar for a JSON Schema. Raises ApiError 400 for one that is too large or cannot be held in
    full."""
    check_schema(schema, limits, param)
    schema, options = compiled_as(schema)
    try:
        return str(llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options))
    except ValueError as error:  # JSON of Python's that is none of Unicode's: a lone surrogate
        raise bad_request(f"{param}: not a JSON Schema ({error})", param) from None


def regex_grammar(pattern: str, limits: Limits, *, param: str) -> str:
    """The grammar of a regular expression (Rust's syntax), which the whole answer matches."""
    return str(llguidance.LLMatcher.grammar_from_regex(_text(pattern, limits, param)))


def lark_grammar(text: str, limits: Limits, *, param: str) -> str:
    """The grammar of a Lark text (llguidance's dialect) of our own making."""
    return str(llguidance.LLMatcher.grammar_from_lark(_text(text, limits, param)))


def client_grammar(text: str, limits: Limits, *, param: str) -> str:
    """The same of a client's text: a schema in it (`%json ...`) is held as one by itself would be. Every place of these
    letters is either that or refused, so what is read otherwise here than by llguidance gets past nothing."""
    text, parts, size, kept, at = _text(text, limits, param), list[str](), 0, 0, 0
    most = limits.for_tools().schema_bytes
    while found := _TOKEN.search(text, at):
        at = found.end()
        if found[0] != _SCHEMA:
            if _SCHEMA in found[0]:
                where = "a string, a comment or a regular expression"
                raise bad_request(f"{param}: {_SCHEMA} can stand before a JSON Schema alone, not in {where}", param)
            continue
        begins = re.compile(r"\s*").match(text, at)
        assert begins is not None
        try:
            schema, end = json.JSONDecoder().raw_decode(text, begins.end())
        except (ValueError, RecursionError):
            raise bad_request(f"{param}: expected a JSON Schema behind each {_SCHEMA}", param) from None
        check_schema(schema, limits, param)
        parts += [text[kept : begins.end()], spaced(schema)]
        kept = at = end
        size += len(parts[-2]) + len(parts[-1])
        if size > most:
            raise bad_request(f"{param}: its schemas come to more than {most:,} bytes; take fewer of them", param)
    return str(llguidance.LLMatcher.grammar_from_lark("".join([*parts, text[kept:]])))


def _text(text: str, limits: Limits, param: str) -> str:
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError:
        raise bad_request(f"{param}: a lone surrogate is no character", param) from None
    if not text or size > limits.schema_bytes:
        raise bad_request(f"{param}: expected from 1 to {limits.schema_bytes:,} bytes", param)
    return text
