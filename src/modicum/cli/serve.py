"""modicum serve CKPT"""

import logging
import os
import sys
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from modicum.cli.app import verb


class EngineName(StrEnum):
    """What runs the model."""

    MODICUM = "modicum"
    GGUF = "gguf"


@verb("serve", "modicum serve runs/quickstart/sft/checkpoints/last --runs runs")
def serve(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CKPT", help="A checkpoint, such as runs/quickstart/sft/checkpoints/last, or a file.gguf."
        ),
    ],
    host: Annotated[str, typer.Option(help="The address to listen at; 0.0.0.0 for every network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keys that open the server, one a line; else MODICUM_API_KEY holds one."),
    ] = None,
    slots: Annotated[int, typer.Option(min=1, max=1024, help="Requests answered at once.")] = 8,
    max_queue: Annotated[int, typer.Option(min=0, help="Requests that may wait; more are told to come back.")] = 64,
    context: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens of prompt and answer together; all that the model has unless given."),
    ] = None,
    engine: Annotated[
        EngineName | None,
        typer.Option(help="gguf: llama.cpp, which a file.gguf gets without being asked; else modicum's own."),
    ] = None,
    eager: Annotated[bool, typer.Option("--eager", help="Do not compile: ready sooner, slower to answer.")] = False,
    runs: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Show the runs of this directory on the page.")
    ] = None,
    cors: Annotated[
        list[str] | None, typer.Option(metavar="ORIGIN", help="A site whose scripts may call; several times for more.")
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A name that a proxy's requests come under; several times for more."),
    ] = None,
    drain_seconds: Annotated[
        int, typer.Option(min=0, help="What answers under way get to end after SIGTERM; then they are cut.")
    ] = 30,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Write requests to the log.")] = False,
) -> None:
    """Serve a checkpoint, or a GGUF file by llama.cpp, through the OpenAI API, with a page to talk to it at /.

    Only this machine reaches it unless --host says otherwise. After SIGTERM answers under way come to their end
    first, and new requests are told to come back (503).
    """
    from modicum.store import UserError

    try:
        from modicum.serve import ServerSettings
        from modicum.serve import serve as run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("modicum"):
            raise
        raise UserError(f"serving needs {error.name}: pip install 'modicum[serve]'") from None
    busy = run(
        checkpoint,
        ServerSettings(
            host=host,
            port=port,
            api_key_file=api_key_file,
            slots=slots,
            max_queue=max_queue,
            context=context,
            engine=None if engine is None else engine.value,
            compiled=not eager,
            runs=runs,
            origins=tuple(cors or ()),
            hosts=tuple(allow_host or ()),
            drain_seconds=drain_seconds,
            log_prompts=log_prompts,
        ),
    )
    if busy:  # see serve
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(0)
