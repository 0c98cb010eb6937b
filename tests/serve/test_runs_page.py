"""The runs in a real browser: curves that grow, samples, and what of them is said aloud."""

import json
import os

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture
def runs(tmp_path):
    (tmp_path / "first" / "pretrain" / "checkpoints" / "step-00000010").mkdir(parents=True)
    lines = [{"kind": "train", "step": s, "loss": 8 - s / 10, "tokens_per_second": 1000.0 + s} for s in range(1, 11)]
    write(tmp_path / "first" / "pretrain" / "metrics.jsonl", lines)
    (tmp_path / "first" / "evaluate").mkdir()
    sample = {"messages": [{"role": "text", "content": "Ports"}, {"role": "assistant", "content": "<b>are</b> doors"}]}
    (tmp_path / "first" / "evaluate" / "results.json").write_text(json.dumps({"samples": [sample]}))
    return tmp_path


def write(path, lines, mode="w"):
    with path.open(mode) as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


@pytest.fixture
def page(tab, start, runs):
    with start(runs=runs) as server:
        page = tab()
        page.open(server.address)
        page.wait("!document.querySelector('#show-runs').hidden")
        page.click("#show-runs")
        yield page
        assert page.complaints == []
        page.close()


def test_runs_are_shown_and_grow_while_they_train(page, runs):
    page.wait("document.querySelectorAll('figure svg').length === 2")
    assert "7 at update 10" in page.text("#charts")
    assert "1 checkpoints" in page.text("#run-state")
    assert page.do("document.querySelector('#samples').textContent.includes('<b>are</b> doors')")
    metrics = runs / "first" / "pretrain" / "metrics.jsonl"
    write(metrics, [{"kind": "train", "step": 11, "loss": 3.5}, {"kind": "heldout", "step": 11, "loss": 4.0}], "a")
    page.wait("document.querySelector('#charts').innerText.includes('3.5 at update 11')", 10)
    assert page.do("document.querySelectorAll('circle').length") == 1
    with metrics.open("a") as file:
        file.write('{"kind": "tr\n')
    page.wait("document.querySelector('#run-state').innerText.includes('1 damaged lines')", 10)
    again = runs / "again"
    write(again, [{"kind": "train", "step": 1, "loss": 2.25}])
    os.replace(again, metrics)
    page.wait("document.querySelector('#charts').innerText.includes('2.25 at update 1')", 10)


def test_a_live_run_is_said_aloud_when_it_is_chosen_and_when_it_fails(page, runs):
    said = "document.querySelector('#run-said').textContent"
    assert page.wait(said) == "live, update 10, 1 checkpoints"
    assert page.do("document.querySelector('#run-state').closest('[role], [aria-live]')") is None
    (runs / "first" / "sft").mkdir()
    write(runs / "first" / "sft" / "metrics.jsonl", [{"kind": "train", "step": 3, "loss": 2.0}])
    write(runs / "first" / "pretrain" / "metrics.jsonl", [{"kind": "train", "step": 11, "loss": 3.5}], "a")
    page.wait("document.querySelector('#run-state').innerText.includes('update 11')", 10)
    assert page.do(said) == "live, update 10, 1 checkpoints"
    page.wait("document.querySelector('#stage').length === 2", 10)
    page.do("document.querySelector('#stage').value = 'sft'")
    page.do("document.querySelector('#stage').dispatchEvent(new Event('change'))")
    page.wait(f"{said} === 'live, update 3, 0 checkpoints'")
    page.do("window.there = window.fetch; window.fetch = () => Promise.reject(new TypeError('Failed to fetch'))")
    page.wait(f"{said} === 'The server cannot be reached.'", 10)
    page.do("window.fetch = window.there")
    page.wait(f"{said} === 'live, update 3, 0 checkpoints'", 10)
