"""A server whose times are known: streams of `x`, from an event loop of its own that knows nothing of modicum.

    python stub_server.py [NAME=VALUE...]

first, between: seconds before the first piece of an answer, and between two. tokens: in a piece. slots: answers at a
time. ready: seconds until /health says 200. short: tokens that each answer lacks. refuse, broken: every so many one
request is refused, or fails inside its stream. die: it ends with this request. log: a file of what was asked.
"""

import asyncio
import json
import os
import sys
import time

SETTINGS = {"first": 0.0, "between": 0.0, "tokens": 1, "slots": 1000, "ready": 0.0, "short": 0}
SETTINGS |= {"refuse": 0, "broken": 0, "die": 0, "log": ""}
for pair in sys.argv[1:]:
    name, value = pair.split("=", 1)
    SETTINGS[name] = value if name == "log" else type(SETTINGS[name])(value)
STARTED, COUNT = time.monotonic(), 0


def head(status, kind="application/json"):
    return f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n".encode()


def event(**fields):
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


async def complete(asked, number, write):
    async with slots:
        wanted = asked["max_tokens"] - int(SETTINGS["short"])
        await asyncio.sleep(SETTINGS["first"])
        await write(head(200, "text/event-stream") + b": a comment\n\n")
        for place in range(-(-wanted // SETTINGS["tokens"])):
            if place:
                await asyncio.sleep(SETTINGS["between"])
            await write(event(choices=[{"text": "x", "index": 0, "finish_reason": None}], usage=None))
            if SETTINGS["broken"] and number % SETTINGS["broken"] == 0:
                await write(event(error={"message": "out of luck"}))
                return
        await write(event(choices=[{"text": "", "index": 0, "finish_reason": "length"}], usage=None))
        await write(event(choices=[], usage={"completion_tokens": wanted, "prompt_tokens": len(asked["prompt"])}))
        await write(b"data: [DONE]\n\n")


async def serve(reader, writer):
    global COUNT

    async def write(data):
        writer.write(data)
        await writer.drain()

    request = (await reader.readuntil(b"\r\n\r\n")).decode()
    path = request.split()[1]
    if path == "/health":
        await write(head(200 if time.monotonic() - STARTED >= SETTINGS["ready"] else 503) + b"{}")
    elif path == "/v1/models":
        await write(head(200) + json.dumps({"data": [{"id": "stub"}]}).encode())
    else:
        length = next(line.split(":")[1] for line in request.lower().splitlines() if "content-length" in line)
        asked = json.loads(await reader.readexactly(int(length)))
        COUNT += 1
        if SETTINGS["log"]:
            with open(SETTINGS["log"], "a") as log:
                log.write(json.dumps({"at": time.monotonic(), **asked}) + "\n")
        if SETTINGS["die"] == COUNT:
            print("the last thing it says", file=sys.stderr, flush=True)
            os._exit(3)
        if SETTINGS["refuse"] and COUNT % SETTINGS["refuse"] == 0:
            await write(head(503) + json.dumps({"error": {"message": "too many"}}).encode())
        else:
            await complete(asked, COUNT, write)
    writer.close()


async def main():
    global slots
    slots = asyncio.Semaphore(int(SETTINGS["slots"]))
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    print(f"stub at http://127.0.0.1:{port}/", file=sys.stderr, flush=True)
    await server.serve_forever()


asyncio.run(main())
