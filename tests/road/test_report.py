"""The report of a real, tiny run: every figure of its stages, the page, the plots; whole where parts are missing."""

import json
import re

import pytest

from modicum.recipe import load_recipe
from modicum.road.report import write_report
from modicum.road.report.gather import gather
from modicum.road.report.sections import plan_view
from modicum.road.stages import run
from modicum.store import RunDirectory
from modicum.train import read_metrics


def test_the_report_of_a_run_holds_what_its_stages_measured(tiny):
    road = run(load_recipe(tiny(pretrain={"log_every_steps": 1})))
    folder = road.folder("report")
    figures = json.loads((folder / "report.json").read_text())
    page = (folder / "index.html").read_text()
    results = json.loads((road.folder("evaluate") / "results.json").read_text())
    assert figures["heldout"] == results["heldout"]
    assert figures["choices"] == results["choices"]
    assert figures["answers"] == results["answers"]
    losses = [r["loss"] for r in read_metrics(road.folder("pretrain") / "metrics.jsonl") if r["kind"] == "train"]
    assert figures["training"]["pretrain"]["curve"]["loss"] == losses
    assert len(losses) == figures["training"]["pretrain"]["steps"] == 4
    assert figures["training"]["pretrain"]["chosen"]["dtype"] == "float32"
    assert figures["model"]["parameters"]["total"] == sum(
        number for part, number in figures["model"]["parameters"].items() if part != "total"
    )
    assert [stage["stage"] for stage in figures["stages"]][:4] == ["corpus", "tokenizer", "shards", "pretrain"]
    assert figures["measured"]["seconds"]["whole run"] > figures["measured"]["seconds"]["pretrain"] > 0
    assert figures["corpus"]["sources"][0]["licences"]
    for name in ("pretrain-loss.png", "pretrain-learning-rate.png", "pretrain-speed.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    assert f"{results['heldout']['base']['total']['bits_per_byte']:.3f}" in page
    assert "vocab_size: 512" in page, "the resolved recipe stands on the page"
    assert not re.search(r"https?://", page)


def test_memory_of_a_gpu_stands_beside_the_plans_of_a_gpu(tiny):
    recipe = load_recipe(tiny(sft=None, evaluate={"items": []}))
    road = run(recipe, until="pretrain")
    metrics = road.folder("pretrain") / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps({**line, "device_memory_mb": 7}) + "\n" for line in lines))
    state = road.run.checkpoints("pretrain") / "last" / "training" / "state.json"
    found = json.loads(state.read_text())
    state.write_text(json.dumps({**found, "choices": {**found["choices"], "device": "cuda"}}))
    memory = gather(road.run, recipe, code_version="0.1.0")["measured"]["peak_memory_bytes"]
    assert memory == {"pretrain": 7_000_000, "whole run": 7_000_000}


def test_a_run_that_went_on_for_longer_is_not_held_against_the_plan_of_the_shorter_one():
    plan = {
        "how": "cpu",
        "stages": [{"name": "shards", "steps": None}, {"name": "pretrain", "steps": 300}],
        "seconds": {"shards": 1.0, "pretrain": 10.0, "whole run": 11.0},
        "peak_memory_bytes": {"pretrain": 10**9},
    }
    used = {
        "seconds": {"shards": 1.0, "pretrain": 100.0, "whole run": 101.0},
        "peak_memory_bytes": {"pretrain": 10**9},
    }
    kept = {row["name"]: row["off"] for row in plan_view(plan, used, {"pretrain": 300})["rows"]}
    assert kept["pretrain, time"] == "−90 %"
    about = {row["name"]: row["off"] for row in plan_view(plan, used, {"pretrain": 301})["rows"]}
    assert about == kept
    longer = {row["name"]: row["off"] for row in plan_view(plan, used, {"pretrain": 3000})["rows"]}
    assert longer == {**kept, **dict.fromkeys(("pretrain, time", "pretrain, memory", "whole run, time"))}
    assert longer["shards, time"] == "+0 %"


def test_a_run_that_stopped_early_still_has_a_report(tiny):
    recipe = load_recipe(tiny(sft=None, evaluate={"items": []}))
    road = run(recipe, until="pretrain")
    page = write_report(road.run, recipe, code_version="0.1.0")
    figures = json.loads((page.parent / "report.json").read_text())
    assert figures["heldout"] is None
    assert set(figures["training"]) == {"pretrain"}
    assert "How it learned" in page.read_text()


def test_a_run_that_did_nothing_has_nothing_to_report_but_its_recipe(tiny):
    recipe = load_recipe(tiny())
    empty = RunDirectory(recipe.run_folder)
    figures = gather(empty, recipe, code_version="0.1.0")
    assert (figures["training"], figures["model"], figures["stages"]) == ({}, None, [])
    assert "tiny" in write_report(empty, recipe, code_version="0.1.0").read_text()


def test_a_damaged_figure_is_a_fault_and_not_left_out(tiny):
    recipe = load_recipe(tiny())
    results = recipe.run_folder / "evaluate" / "results.json"
    results.parent.mkdir(parents=True)
    results.write_text('{"heldout": ')
    with pytest.raises(json.JSONDecodeError):
        gather(RunDirectory(recipe.run_folder), recipe, code_version="0.1.0")


def test_a_second_report_takes_the_place_of_the_first(tiny):
    recipe = load_recipe(tiny())
    page = write_report(RunDirectory(recipe.run_folder), recipe, code_version="first")
    (page.parent / "stale.png").write_bytes(b"")
    write_report(RunDirectory(recipe.run_folder), recipe, code_version="second")
    assert sorted(path.name for path in page.parent.iterdir()) == ["index.html", "report.json"]
    assert "modicum second" in page.read_text()
