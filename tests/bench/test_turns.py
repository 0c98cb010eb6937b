"""Turns are fair, and what goes wrong in one is told by name."""

import subprocess
import textwrap
import time

import pytest
from alive import gone_within

from modicum.bench.turns import take_turns
from modicum.store import UserError


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """A function that makes a module out of the body of a program which has its order in `order`."""

    def worker(body):
        head = "import json, os, signal, sys\norder = json.load(sys.stdin)\n"
        (tmp_path / "its_turn.py").write_text(head + textwrap.dedent(body))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return "its_turn"

    return worker


def test_each_system_has_a_turn_in_each_round_and_whoever_was_first_goes_last(worker):
    module = worker("print('noise'); print(json.dumps({'said': order['name'], 'process': os.getpid()}))")
    said = []
    answers = take_turns(module, {name: {"name": name} for name in "abc"}, rounds=3, say=said.append)
    assert [line.rsplit(" ", 1)[1] for line in said] == list("abc" + "bca" + "cab")
    assert {name: [answer["said"] for answer in given] for name, given in answers.items()} == {
        name: [name] * 3 for name in "abc"
    }
    processes = [answer["process"] for given in answers.values() for answer in given]
    assert len(set(processes)) == 9, "each turn has a process of its own"


def test_what_the_user_can_mend_is_told_with_the_systems_name(worker):
    module = worker("print('first', file=sys.stderr); print('peer is not installed', file=sys.stderr); sys.exit(2)")
    with pytest.raises(UserError, match=r"^peer: peer is not installed$"):
        take_turns(module, {"peer": {}}, rounds=1, say=[].append)


def test_a_killed_process_is_told_as_too_little_memory(worker):
    module = worker("os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(UserError, match="peer: killed by signal 9"):
        take_turns(module, {"peer": {}}, rounds=1, say=[].append)


def test_a_fault_of_ours_is_no_users_error(worker):
    module = worker("raise ValueError('inner')")
    with pytest.raises(RuntimeError, match=r"(?s)peer failed:.*ValueError: inner"):
        take_turns(module, {"peer": {}}, rounds=1, say=[].append)


def test_an_order_may_bring_its_own_environment(worker):
    module = worker("print(json.dumps({'said': os.environ['COLOUR']}))")
    answers = take_turns(module, {"peer": {"environment": {"COLOUR": "red"}}}, rounds=1, say=[].append)
    assert answers["peer"][0]["said"] == "red"


BEARING = """
    import subprocess, time
    child = subprocess.Popen(['sleep', '600'], stdin=-3, stdout=-3, stderr=-3)
    print(json.dumps({'said': f'{os.getpid()} {child.pid}'}), file=open(order['told'], 'w'))
"""


def test_what_a_turn_has_started_ends_with_it(worker, tmp_path):
    told = tmp_path / "told"
    module = worker(BEARING + "    print(open(order['told']).read().strip())")
    (answer,) = take_turns(module, {"peer": {"told": str(told)}}, rounds=1, say=[].append)["peer"]
    assert gone_within(10, *answer["said"].split())


def test_an_interrupted_bench_leaves_no_process(worker, tmp_path, monkeypatch):
    told = tmp_path / "told"

    def interrupted(process, order):
        process.stdin.write(order)
        process.stdin.close()
        until = time.monotonic() + 60
        while not (told.exists() and told.read_text().endswith("\n")):
            assert time.monotonic() < until
            time.sleep(0.02)
        raise KeyboardInterrupt

    module = worker(BEARING + "    time.sleep(600)")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(subprocess.Popen, "communicate", interrupted)
        take_turns(module, {"peer": {"told": str(told)}}, rounds=1, say=[].append)
    processes = told.read_text().split('"')[3].split()
    assert len(processes) == 2
    assert gone_within(10, *processes)
