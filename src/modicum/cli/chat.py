"""modicum chat CKPT"""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from modicum.cli.app import verb
from modicum.cli.options import (
    NEVER_TALKED,
    Checkpoint,
    MaxNewTokens,
    MinP,
    RepetitionPenalty,
    Seed,
    Temperature,
    TopK,
    TopP,
)
from modicum.cli.reading import read_text

if TYPE_CHECKING:
    from modicum.generate import ChatSession

HELP = """/reset           forget what was said
/system TEXT     set the system message (and forget what was said)
/help            this list
/quit            leave (Ctrl-D too); Ctrl-C stops an answer"""


@verb("chat", "modicum chat runs/quickstart/sft/checkpoints/last")
def chat(
    checkpoint: Checkpoint,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.7,
    top_k: TopK = 0,
    top_p: TopP = 0.95,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = 0,
) -> None:
    """Talk with a chat model; /help lists what can be typed."""
    from modicum.checkpoint import load_checkpoint
    from modicum.generate import ChatSession, Generator, SamplingParams
    from modicum.store import UserError

    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    loaded = load_checkpoint(checkpoint)
    if not loaded.talks:
        print(f"{checkpoint}: {NEVER_TALKED}", file=sys.stderr)
    generator = Generator(loaded.model(), loaded.tokenizer, stop_ids=loaded.stop_ids)
    session = ChatSession(generator, params, system=system)
    print(f"{checkpoint}: type a message; /help lists commands", file=sys.stderr)
    while (line := _read()) is not None:
        command, _, rest = line.strip().partition(" ")
        if command == "/quit":
            return
        if command == "/reset":
            session.reset()
        elif command == "/system":
            session.system = rest.strip() or None
            session.reset()
        elif command == "/help":
            print(HELP)
        elif line.strip():
            try:
                _answer(session, line)
            except UserError as error:  # one message that cannot be answered does not end the conversation
                print(f"error: {error}", file=sys.stderr)


def _read() -> str | None:
    """The next line typed or piped, without its end; None at the end of input."""
    if sys.stdin.isatty():
        try:
            return read_text(lambda: input("> "))
        except EOFError:
            return None
    line = read_text(sys.stdin.readline)
    return line.rstrip("\r\n") if line else None


def _answer(session: "ChatSession", line: str) -> None:
    answer = session.stream(line)
    if session.notice:
        print(f"({session.notice})", file=sys.stderr)
    try:
        for chunk in answer:
            print(chunk.text, end="", flush=True)
    except KeyboardInterrupt:
        answer.close()  # what was said until here stays part of the conversation
    print()
