"""A server's life: begun, waited for, and over when we are, whichever way we end."""

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from alive import alive, gone_within

from modicum.bench.serving_process import running
from modicum.bench.serving_worker import measure
from modicum.store import UserError, peak_memory_bytes

STUB = [sys.executable, str(Path(__file__).with_name("stub_server.py"))]


def program(text):
    return [sys.executable, "-c", textwrap.dedent(text)]


def test_it_is_ready_when_its_health_says_so_and_dead_after_the_block():
    with running([*STUB, "ready=0.5"], threads=1) as server:
        assert server.ready_s >= 0.5
        assert alive(server.process.pid)
        server.check()
    assert not alive(server.process.pid)


def test_one_that_was_killed_is_told_as_too_little_memory():
    with running(STUB, threads=1) as server:
        server.process.kill()
        with pytest.raises(UserError, match="ended by SIGKILL, as happens where memory runs out; it said: stub at"):
            server.check()


def test_it_is_dead_after_a_block_that_failed():
    with pytest.raises(KeyboardInterrupt), running(STUB, threads=1) as server:
        raise KeyboardInterrupt
    assert not alive(server.process.pid)


def test_one_that_ends_before_it_is_ready_is_told_in_one_line_with_its_last_words():
    dying = program("import sys; print('a\\nb', file=sys.stderr); sys.exit('no such weights')")
    with pytest.raises(UserError, match=r"^the server ended with status 1; it said: a \| b \| no such weights$"):
        running(dying, threads=1).__enter__()


def test_one_that_is_not_ready_in_time_is_ended():
    with pytest.raises(UserError, match="not ready in time; it said: stub at"):
        running([*STUB, "ready=60"], threads=1, start_seconds=1.0).__enter__()


def test_it_has_the_threads_that_were_asked_for_and_no_key(monkeypatch):
    monkeypatch.setenv("MODICUM_API_KEY", "secret")
    telling = program("import os, sys; sys.exit(f\"{os.environ['OMP_NUM_THREADS']} {os.getenv('MODICUM_API_KEY')}\")")
    with pytest.raises(UserError, match="it said: 3 None"):
        running(telling, threads=3).__enter__()


def test_it_does_not_outlive_a_bench_that_is_killed(tmp_path):
    """Three generations: a parent that is killed, the process that measures, and its server."""
    child = f"""
        import time
        from modicum.bench.serving_process import running
        with running({STUB!r}, threads=1) as server:
            open({str(tmp_path / "pid")!r}, "w").write(f"{{server.process.pid}}\\n")
            time.sleep(600)
    """
    parent = program(f"import subprocess, time; subprocess.Popen({program(child)!r}); time.sleep(600)")
    told = tmp_path / "pid"
    with subprocess.Popen(parent) as process:
        until = time.monotonic() + 120
        while not (told.exists() and told.read_text().endswith("\n")):
            assert time.monotonic() < until
            time.sleep(0.05)
        server = int(told.read_text())
        assert alive(server)
        process.kill()
    assert gone_within(20, server)


def order(*settings, users=2, limit=60.0):
    asked = [{"prompt": [1, number], "tokens": 4, "at": 0.0} for number in range(8)]
    shape = {"threads": 1, "ends": [0], "users": users, "limit_s": limit}
    return {**shape, "command": [*STUB, *settings], "warm": asked[:2], "asked": asked}


def test_a_turn_starts_a_server_warms_it_and_counts_only_what_was_asked(tmp_path):
    found = measure(order("first=0.05", "between=0.02", f"log={tmp_path / 'log'}"))
    assert (found["requests"], found["errors"]) == (8, 0)
    assert len((tmp_path / "log").read_text().splitlines()) == 10
    # two users, four answers each one after the other, each of at least 0.11 s
    assert 8 * 4 / 2 < found["tokens_per_s"] <= 8 * 4 / (4 * 0.11)
    assert found["ready_s"] > 0
    assert found["peak_rss_mb"] > 5


def test_a_server_that_dies_under_load_is_told_with_its_last_words():
    with pytest.raises(UserError, match=r"the server ended with status 3; it said: .*the last thing it says"):
        measure(order("die=5"))


def test_a_load_that_takes_too_long_is_ended():
    with pytest.raises(UserError, match=r"not all requests were answered in 0.5 s"):
        measure(order("first=30", limit=0.5) | {"warm": []})


def test_a_warm_up_that_takes_too_long_is_ended_and_one_without_answers_begins_no_load(tmp_path):
    begun = time.monotonic()
    with pytest.raises(UserError, match=r"not all requests were answered in 0.5 s"):
        measure(order("first=30", limit=0.5))
    assert time.monotonic() - begun < 20
    with pytest.raises(UserError, match="no request of the warm-up was answered: status 503: too many"):
        measure(order("refuse=1", f"log={tmp_path / 'log'}"))
    assert len((tmp_path / "log").read_text().splitlines()) == 2


def test_the_peak_of_another_process_is_the_largest_it_ever_had():
    holding = program("x = bytearray(200_000_000); del x; print(flush=True); input()")
    with subprocess.Popen(holding, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert 200e6 < peak_memory_bytes(process.pid) < 300e6
        process.kill()
