"""The one immutable sandbox that chat templates render in, and the process that a foreign template runs in.

Run as a program it is that process: a template cannot loop, allocate or write its way out of limits that the kernel
holds, where a limit inside Python would miss a single long multiplication. It imports Jinja and the standard library
alone.
"""

import json
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox


class GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`: what stands inside is the assistant's own. Renders as if it were not
    there.
    """

    tags = {"generation"}  # noqa: RUF012 (Jinja's own shape of an extension)

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Callable[[], str]) -> str:
        text = caller()
        rendering = _RENDERING.get()
        rendering.blocks.append((rendering.characters, rendering.characters + len(text)))
        return text


@dataclass
class _Rendering:
    """What one rendering has brought forth so far."""

    now: datetime
    characters: int = 0
    blocks: list[tuple[int, int]] = field(default_factory=list)


_RENDERING: ContextVar[_Rendering] = ContextVar("rendering")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON as transformers writes it: Jinja's own filter would escape <, > and & for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class _Namespace(jinja2.utils.Namespace):
    """A namespace that keeps no underscored names, which could shadow Python's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        for name in dict(*args[1:], **kwargs):
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: Any) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold the underscored name {name!r}")


class Sandbox:
    """One compiled template. Its functions are those transformers gives to templates, but for the random ones."""

    def __init__(self, source: str) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        # a training example must not change from one reading to the next
        del environment.filters["random"], environment.globals["lipsum"]
        environment.globals |= {
            "raise_exception": _raise_exception,
            "namespace": _Namespace,
            "strftime_now": lambda pattern: _RENDERING.get().now.strftime(pattern),
        }
        self._template = environment.from_string(source)

    def render(self, context: dict[str, Any], *, now: float, max_characters: int) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the (start, end) of each generation block in it, in characters.

        now: seconds since the epoch, what strftime_now tells. Raises Jinja's errors, and ValueError above
        max_characters.
        """
        rendering = _Rendering(datetime.fromtimestamp(now))
        token = _RENDERING.set(rendering)
        chunks = []
        try:
            for chunk in self._template.generate(**context):
                chunks.append(chunk)
                rendering.characters += len(chunk)
                if rendering.characters > max_characters:
                    raise ValueError(f"it writes more than {max_characters:,} characters")
        finally:
            _RENDERING.reset(token)
        return "".join(chunks), rendering.blocks


def explain(error: Exception) -> str:
    """A template's fault in one line."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"line {error.lineno}: {error.message}"
    if isinstance(error, jinja2.exceptions.SecurityError):
        return f"not allowed in a template: {error}"
    if isinstance(error, MemoryError):
        return "it needs more memory than a template may have"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error) or type(error).__name__


def _serve(seconds: float, memory_bytes: int) -> None:
    """Answer each line of JSON with one until stdin ends. The first holds the template, the others its data."""
    for kind, limit in ((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        with suppress(ValueError, OSError):  # macOS knows no limit of address space; time still bounds what it can fill
            resource.setrlimit(kind, (limit, limit))
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    sys.dont_write_bytecode = True
    sandbox: Sandbox | None = None
    for line in sys.stdin.buffer:
        request = json.loads(line)
        # Both clocks end the process, in the middle of a single instruction too: processor time as the limit, since a
        # template cannot sleep and a busy machine is not its fault, and the wall's as a second net.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, 10 * seconds)
        try:
            if sandbox is None:
                sandbox = Sandbox(request["template"])
                answer: dict[str, Any] = {}
            else:
                text, blocks = sandbox.render(
                    request["context"], now=request["now"], max_characters=request["max_characters"]
                )
                answer = {"text": text, "blocks": blocks}
        except Exception as error:
            answer = {"error": explain(error)}
        out = json.dumps(answer).encode() + b"\n"
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(out)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve(float(sys.argv[1]), int(sys.argv[2]))
