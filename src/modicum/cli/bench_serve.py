"""modicum bench serve CKPT"""

import json
import math
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from modicum.cli.app import bench, verb
from modicum.cli.options import Checkpoint, Rounds, TableAsJson

if TYPE_CHECKING:
    from modicum.bench.serving import ServeBench, ServeRow


class ServerName(StrEnum):
    """Whose server to measure against."""

    LLAMA_CPP = "llama.cpp"


class GgufName(StrEnum):
    """Number types of the peer's file."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    Q8_0 = "q8_0"
    Q6_K = "q6_k"
    Q5_K = "q5_k"
    Q4_K = "q4_k"
    Q4_0 = "q4_0"


@verb("serve", "modicum bench serve CKPT --against llama.cpp --users 1,16 --prompt 64,512", group=bench)
def serve(
    checkpoint: Checkpoint,
    against: Annotated[
        ServerName | None, typer.Option(help="The peer; without one, modicum's server is measured alone.")
    ] = None,
    gguf: Annotated[
        GgufName | None, typer.Option(help="The number type of the peer's file. Default: the checkpoint's nearest.")
    ] = None,
    peer_plain_attention: Annotated[
        bool, typer.Option("--peer-plain-attention", help="Measure the peer with plain attention too.")
    ] = False,
    users: Annotated[
        str | None,
        typer.Option(metavar="N,...", help="Users who ask again when answered. Default: 1,4,16,64, unless --rate."),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(metavar="R,...", help="Requests a second, which come at random whoever is still waiting."),
    ] = None,
    prompt: Annotated[
        str, typer.Option(metavar="N,...", help="Tokens of a prompt; each request draws one of several lengths.")
    ] = "512",
    tokens: Annotated[
        str, typer.Option(metavar="N,...", help="Tokens of an answer; each request draws one of several lengths.")
    ] = "128",
    shared_prefix: Annotated[int, typer.Option(min=0, help="First tokens that all prompts have in common.")] = 0,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Requests of a turn. Default: 3 a user and at least 32; 64 with --rate.")
    ] = None,
    rounds: Rounds = 3,
    seed: Annotated[int, typer.Option(help="Of prompts, lengths and moments.")] = 0,
    as_json: TableAsJson = False,
) -> None:
    """Measure the server under load here: tokens a second, the wait for the first and between tokens, memory.

    Each system answers the same requests greedily, in a process of its own, in turn, round after round, on the same
    threads; the table shows medians. Who asks takes part of the same processor, from all of them alike.
    """
    from modicum.bench.serving import USERS, bench_serving
    from modicum.bench.serving_load import Load, Mix
    from modicum.cli.progress import TerminalListener
    from modicum.store import UserError

    if against is None and (gguf is not None or peer_plain_attention):
        raise UserError("--gguf, --peer-plain-attention: need --against, which says who the peer is")
    closed = _whole("--users", users) if users else [] if rate else list(USERS)
    loads = [Load(users=number) for number in closed] + [Load(rate=number) for number in _numbers("--rate", rate or "")]
    with TerminalListener() as listener:
        found = bench_serving(
            checkpoint,
            loads=loads,
            mix=Mix(_whole("--prompt", prompt), _whole("--tokens", tokens), shared_prefix),
            llama=against is not None,
            gguf=None if gguf is None else gguf.value,
            plain_attention=peer_plain_attention,
            requests=requests,
            rounds=rounds,
            seed=seed,
            say=listener.say,
        )
    print(json.dumps(found.to_dict(), indent=2) if as_json else "\n".join(serve_lines(found)))


def serve_lines(bench: "ServeBench") -> list[str]:
    """What, where, a row for each system and load, ours beside each peer, and what failed."""
    head = ("system", "slots", "tokens/s", "slowest to fastest", "first token ms (95, 99 %)")
    table = [(*head, "between tokens ms (95, 99 %)", "ready s", "peak MB", "errors", "faster", "first token sooner")]
    ratios = bench.ratios
    for row in bench.rows:
        wait = ratios["first_token_ms"].get(row.name)
        beside = (ratios["tokens_per_s"].get(row.name), wait and 1 / wait)
        table.append(
            (
                row.name,
                str(row.slots),
                f"{row.tokens_per_s:,.0f}",
                f"{row.low:,.0f} to {row.high:,.0f}",
                f"{row.first_token_ms:,.0f} ({row.first_token_p95_ms:,.0f}, {row.first_token_p99_ms:,.0f})",
                f"{row.between_tokens_ms:,.1f} ({row.between_tokens_p95_ms:,.1f}, {row.between_tokens_p99_ms:,.1f})",
                f"{row.ready_s:.1f}",
                f"{row.peak_rss_mb:,.0f}",
                f"{row.errors} of {row.requests}" if row.errors else "0",
                *("" if ratio is None else f"{ratio:.2f} x" for ratio in beside),  # type: ignore[arg-type]
            )
        )
    widths = [max(len(row[place]) for row in table) for place in range(len(table[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in table
    ]
    return [bench.what, bench.machine["line"], "", *(line.rstrip() for line in lines), *map(_faults, _failing(bench))]


def _failing(bench: "ServeBench") -> list["ServeRow"]:
    return [row for row in bench.rows if row.faults]


def _faults(row: "ServeRow") -> str:
    return f"{row.name}: " + "; ".join(f"{count} x {cause}" for cause, count in row.faults.items())


def _whole(option: str, given: str) -> list[int]:
    numbers = _numbers(option, given)
    if any(number != int(number) for number in numbers):
        _refuse(option, given, "whole numbers")
    return [int(number) for number in numbers]


def _numbers(option: str, given: str) -> list[float]:
    try:
        numbers = [float(part) for part in given.split(",") if part]
    except ValueError:
        numbers = [math.nan]
    if not all(math.isfinite(number) and number > 0 for number in numbers) or (given and not numbers):
        _refuse(option, given, "numbers above 0")
    return numbers


def _refuse(option: str, given: str, wanted: str) -> NoReturn:
    from modicum.store import UserError

    raise UserError(f"{option} {given}: expected {wanted} with commas between, such as 4,16")
