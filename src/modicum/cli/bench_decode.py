"""modicum bench decode CKPT"""

import json
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from modicum.cli.app import bench, verb
from modicum.cli.options import Checkpoint, Rounds, TableAsJson

if TYPE_CHECKING:
    from modicum.bench.decoding import DecodeBench


class WeightsName(StrEnum):
    """The weights that modicum is measured with."""

    AS_STORED = "as-stored"
    INT8 = "int8"
    INT4 = "int4"


_PEERS = ("transformers", "llama.cpp")
_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")


@verb("decode", "modicum bench decode CKPT --quant int8 --against transformers,llama.cpp", group=bench)
def decode(
    checkpoint: Checkpoint,
    quant: Annotated[
        list[WeightsName] | None,
        typer.Option(help="Round its weights first, plainly; may be given several times. Default: as-stored."),
    ] = None,
    against: Annotated[
        str, typer.Option(metavar="PEERS", help="transformers, llama.cpp, or both with a comma between.")
    ] = "",
    gguf: Annotated[
        str | None,
        typer.Option(metavar="TYPES", help=f"llama.cpp's number types, of {', '.join(_TYPES)}. Default: f32,q8_0."),
    ] = None,
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt that is read.", min=1)] = 512,
    tokens: Annotated[int, typer.Option(help="Tokens of the answer.", min=1)] = 128,
    rounds: Rounds = 3,
    as_json: TableAsJson = False,
) -> None:
    """Measure one answer here: tokens a second, those of a prompt that is read, and memory, beside peers.

    Each system runs in a process of its own with the same threads, in turn, round after round; the table shows medians.
    """
    from modicum.bench.decoding import bench_decoding
    from modicum.cli.progress import TerminalListener
    from modicum.store import UserError

    peers = _names("--against", against, _PEERS)
    if gguf is not None and "llama.cpp" not in peers:
        raise UserError("--gguf: needs --against llama.cpp, whose number types it names")
    types = _names("--gguf", gguf or "f32,q8_0", _TYPES)
    with TerminalListener() as listener:
        found = bench_decoding(
            checkpoint,
            ours=[kind.value for kind in quant or [WeightsName.AS_STORED]],
            transformers="transformers" in peers,
            llama=types if "llama.cpp" in peers else [],  # type: ignore[arg-type]
            prompt=prompt,
            tokens=tokens,
            rounds=rounds,
            say=listener.say,
        )
    print(json.dumps(found.to_dict(), indent=2) if as_json else "\n".join(decode_lines(found)))


def decode_lines(bench: "DecodeBench") -> list[str]:
    """What, where, a row a system, and the first beside each other."""
    table = [("system", "tokens/s", "slowest to fastest", "reading", "peak MB", "faster", "reading faster")]
    ratios = bench.ratios
    for row in bench.rows:
        name = f"{row.system} {row.mode}"
        beside = [ratios[figure].get(name) for figure in ("tokens_per_s", "prefill_tokens_per_s")]
        table.append(
            (
                name,
                f"{row.tokens_per_s:,.0f}",
                f"{row.low:,.0f} to {row.high:,.0f}",
                f"{row.prefill_tokens_per_s:,.0f}",
                f"{row.peak_rss_mb:,.0f}",
                *("" if ratio is None else f"{ratio:.2f} x" for ratio in beside),  # type: ignore[arg-type]
            )
        )
    widths = [max(len(row[place]) for row in table) for place in range(len(table[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in table
    ]
    return [bench.what, bench.machine["line"], "", *(line.rstrip() for line in lines)]


def _names(option: str, given: str, known: tuple[str, ...]) -> list[str]:
    from modicum.store import UserError

    names = [name for name in given.split(",") if name]
    strangers = [name for name in names if name not in known]
    if strangers:
        raise UserError(f"{option}: {', '.join(strangers)}: expected of {', '.join(known)}")
    return names
