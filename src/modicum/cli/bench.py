"""modicum bench train"""

import json
from enum import StrEnum
from typing import Annotated

import typer

from modicum.cli.app import bench, verb
from modicum.cli.options import Rounds, TableAsJson


class PresetName(StrEnum):
    """The sizes that a recipe can name."""

    NANO = "nano"
    MICRO = "micro"
    MINI = "mini"
    CYBERSLM = "cyberslm"
    SMALL = "small"
    BASE = "base"


class PeerName(StrEnum):
    """Whom to measure against."""

    TRANSFORMERS = "transformers"
    LITGPT = "litgpt"


class PeerMode(StrEnum):
    """How the peer runs."""

    EAGER = "eager"
    COMPILE = "compile"


class OptimizerName(StrEnum):
    """What moves the weights."""

    ADAMW = "adamw"
    MUON = "muon"


class CheckpointingName(StrEnum):
    """What is computed again in the backward pass: nothing, all between linear layers, or all."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class DtypeName(StrEnum):
    """What matrix products run in."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


@verb("train", "modicum bench train --against transformers --peer-mode compile", group=bench)
def train(
    preset: Annotated[PresetName, typer.Option(help="The size of the network.")] = PresetName.CYBERSLM,
    vocab_size: Annotated[int | None, typer.Option(help="Another vocabulary than the preset's.", min=2)] = None,
    rows: Annotated[int, typer.Option(help="Sequences in an update.", min=1)] = 8,
    length: Annotated[int, typer.Option(help="Tokens in a sequence.", min=2)] = 512,
    against: Annotated[PeerName | None, typer.Option(help="The peer; without one, modicum is measured alone.")] = None,
    peer_mode: Annotated[
        list[PeerMode] | None, typer.Option(help="How the peer runs; may be given twice. Default: compile.")
    ] = None,
    peer_dtype: Annotated[
        list[DtypeName] | None,
        typer.Option(help="What the peer multiplies in; may be given twice. By default as ours."),
    ] = None,
    peer_allocator: Annotated[
        bool, typer.Option("--peer-allocator", help="Measure the peer with modicum's allocator settings too.")
    ] = False,
    activation_checkpointing: Annotated[
        CheckpointingName, typer.Option(help="For modicum: what is computed again in the backward pass.")
    ] = CheckpointingName.NONE,
    micro_batch: Annotated[int | None, typer.Option(help="For modicum: rows at once. Default: all.", min=1)] = None,
    optimizer: Annotated[OptimizerName, typer.Option(help="For modicum.")] = OptimizerName.ADAMW,
    rounds: Rounds = 3,
    updates: Annotated[int, typer.Option(help="Updates that count, of each turn.", min=1)] = 4,
    as_json: TableAsJson = False,
) -> None:
    """Measure training updates here: tokens a second and peak memory, beside a peer in the same run.

    Each system runs in a process of its own, in turn, round after round; the table shows medians.
    """
    from modicum.bench import Ours, Peer, bench_training
    from modicum.bench.systems import fast_dtype
    from modicum.cli.bench_table import bench_lines
    from modicum.cli.progress import TerminalListener
    from modicum.model import ModelConfig
    from modicum.recipe import ModelSettings
    from modicum.store import UserError
    from modicum.train import OptimizerSettings

    if against is None and (peer_mode or peer_dtype or peer_allocator):
        raise UserError("--peer-mode, --peer-dtype, --peer-allocator: need --against, which says who the peer is")
    settings = ModelSettings(preset=preset.value)
    config = ModelConfig.from_settings(settings, vocab_size or settings.vocab_size)
    peers = [
        Peer(against.value, mode.value, dtype.value, allocator)
        for mode in peer_mode or [PeerMode.COMPILE]
        for dtype in peer_dtype or [DtypeName(fast_dtype())]
        for allocator in ([False, True] if peer_allocator else [False])
        if against is not None
    ]
    with TerminalListener() as listener:
        found = bench_training(
            config,
            rows=rows,
            length=length,
            peers=peers,
            ours=Ours(
                optimizer=OptimizerSettings(kind=optimizer.value),
                activation_checkpointing=activation_checkpointing.value,
                micro_batch_size=micro_batch,
            ),
            rounds=rounds,
            updates=updates,
            say=listener.say,
        )
    print(json.dumps(found.to_dict(), indent=2) if as_json else "\n".join(bench_lines(found)))
