"""The process that starts one server and puts one load on it; reads its order from standard input, prints one line."""

import asyncio
import json
from collections.abc import Awaitable
from http.client import HTTPConnection
from typing import Any

from modicum.bench.serving_client import Answered, Target, run_arrivals, run_users
from modicum.bench.serving_figures import figures
from modicum.bench.serving_load import Asked
from modicum.bench.serving_process import running
from modicum.bench.turns import take_order
from modicum.store import UserError


def measure(order: dict[str, Any]) -> dict[str, Any]:
    """The figures of one turn, seconds until the server was ready, and its peak of resident memory in 10^6 bytes.

    order: command and threads (of the server), ends (ids), warm and asked (requests), users (None: each at its moment),
    limit_s (of the warm-up, and of the load).
    """
    warm, asked = ([Asked(**one) for one in order[name]] for name in ("warm", "asked"))
    with running(order["command"], threads=order["threads"]) as server:
        target = Target(f"http://{server.host}", _model(server.host), order["ends"])
        users, limit = order["users"], order["limit_s"]
        warmed = asyncio.run(_within(run_users(target, warm, len(warm)), limit))
        server.check()
        if warmed and all(answer.fault for answer in warmed):
            raise UserError(f"no request of the warm-up was answered: {warmed[0].fault}")
        load = run_arrivals(target, asked) if users is None else run_users(target, asked, users)
        answers = asyncio.run(_within(load, limit))
        server.check()
        peak = server.peak_bytes / 1e6
    found = figures(answers)
    said = (
        f"{found['tokens_per_s']:,.0f} tokens/s, first token in {found['first_token_ms']:,.0f} ms, "
        f"{found['errors']} errors, ready in {server.ready_s:.1f} s, {peak:,.0f} MB"
    )
    return {**found, "ready_s": server.ready_s, "peak_rss_mb": peak, "said": said}


async def _within(load: Awaitable[list[Answered]], seconds: float) -> list[Answered]:
    try:
        async with asyncio.timeout(seconds):
            return await load
    except TimeoutError:
        raise UserError(f"not all requests were answered in {seconds:g} s; ask for fewer or shorter ones") from None


def _model(host: str) -> str:
    connection = HTTPConnection(host, timeout=60)
    try:
        connection.request("GET", "/v1/models")
        return str(json.load(connection.getresponse())["data"][0]["id"])
    finally:
        connection.close()


if __name__ == "__main__":
    take_order(measure)
