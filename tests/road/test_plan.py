"""The plan: exact where it is arithmetic, honest where it is estimated, refusing what cannot fit."""

import json
from dataclasses import replace

import pytest
from plan_trials import CONFIG, trial

from modicum.model import ModelConfig
from modicum.recipe import load_recipe
from modicum.road import plan as room
from modicum.road.context import Road
from modicum.road.disk import checkpoints_kept, disk_of
from modicum.road.memory import expected_memory, rows_to_try
from modicum.road.plan import plan
from modicum.road.planning import keep_plan
from modicum.road.sizes import checkpoint_bytes, logits_bytes
from modicum.road.stages import run
from modicum.road.timing import training_plan
from modicum.road.works import training_works
from modicum.train.loss import chunk_rows


def test_a_plan_without_measuring_knows_sizes_and_no_times(recipe):
    found = plan(recipe, measure=False)
    assert found.parameters.total == ModelConfig.from_settings(recipe.model, 512).parameter_count()
    assert found.tokens == 100 * 4 * 128
    assert found.seconds is None
    assert [stage.name for stage in found.stages] == [
        "corpus",
        "tokenizer",
        "shards",
        "pretrain",
        "sft",
        "evaluate",
        "report",
    ]
    assert not found.text.exact
    assert any("estimated" in note for note in found.notes)
    assert json.loads(json.dumps(found.to_dict()))["parameters"]["total"] == found.parameters.total


def test_what_is_estimated_before_a_run_is_about_what_its_shards_and_checkpoints_then_say(tiny):
    recipe = load_recipe(tiny(pretrain={"steps": 2}))
    found = plan(recipe, measure=False)
    road = run(recipe, until="shards")
    after = plan(recipe, measure=False)
    assert after.text.exact
    index = json.loads((road.folder("shards") / "train" / "index.json").read_text())
    assert after.text.tokens == sum(source["tokens"] for source in index["sources"].values())
    assert found.text.tokens == pytest.approx(after.text.tokens, rel=0.35)
    run(recipe, until="sft")
    state = json.loads((road.run.checkpoints("sft") / "last" / "training" / "state.json").read_text())
    planned = next(stage for stage in after.stages if stage.name == "sft")
    assert planned.steps == pytest.approx(state["step"], abs=1)


def test_a_stages_time_is_its_updates_looks_saves_and_one_compilation(recipe):
    work = training_works(recipe, CONFIG, plan(recipe, measure=False).text)[0]
    found = training_plan(CONFIG, work, trial())
    looks = 2 * 1024 / (4 * 128) * 0.5
    saves = 50 * checkpoint_bytes(CONFIG, "muon") / 150e6
    assert found.seconds == pytest.approx(100 * 2.0 + looks + saves + 7.0)
    assert found.tokens_per_second == 4 * 128 / 2.0
    halved = training_plan(CONFIG, work, trial(rows=2, update_seconds=1.2, first_seconds=8.2))
    assert halved.seconds == pytest.approx(found.seconds + looks), "two half updates, but one step of the optimizer"


def test_a_smaller_trial_is_scaled_up_in_what_grows_with_rows(recipe):
    work = training_works(recipe, CONFIG, plan(recipe, measure=False).text)[0]
    whole, half = expected_memory(CONFIG, work, trial()), expected_memory(CONFIG, work, trial(rows=2))
    assert whole.total == 900_000_000 + 100_000_000, "the trial, and what earlier stages leave in the process"
    assert whole.measured
    fewer = logits_bytes(CONFIG, chunk_rows(CONFIG.vocab_size, 2 * work.length), bytes_each=4)
    assert half.activations == 2 * (whole.activations + whole.logits - fewer)
    assert (half.program, half.weights, half.logits) == (whole.program, whole.weights, whole.logits)


def test_memory_on_a_gpu_is_the_gpus(recipe):
    work = training_works(recipe, CONFIG, plan(recipe, measure=False).text)[0]
    memory = expected_memory(CONFIG, work, trial(device_bytes=500_000_000))
    assert (memory.program, memory.total) == (0, 500_000_000)


def test_a_trial_leaves_half_of_the_free_memory_alone(recipe):
    work = replace(training_works(recipe, CONFIG, plan(recipe, measure=False).text)[0], rows=64, batch_size=64)
    assert rows_to_try(CONFIG, work, 10**12) == 64
    total = expected_memory(CONFIG, work, None).total
    assert rows_to_try(CONFIG, work, 2 * total) == 64
    assert rows_to_try(CONFIG, work, 2 * total - 10) == 32
    assert rows_to_try(CONFIG, work, 0) == 1


def test_shards_that_the_run_would_write_anew_are_not_counted(tiny, tmp_path):
    path = tiny()
    run(load_recipe(path), until="shards")
    assert plan(load_recipe(path, ["pretrain.steps=9"]), measure=False).text.exact
    for override in ("tokenizer.vocab_size=1024", "corpus.heldout_fraction=0.3", "seed=7"):
        found = plan(load_recipe(path, [override]), measure=False).text
        assert not found.exact
        assert found.vocab_size == (1024 if "vocab" in override else 512)
    whole = (tmp_path / "text.jsonl").read_text()
    (tmp_path / "text.jsonl").write_text("\n".join(whole.splitlines()[:75]) + "\n")
    found = plan(load_recipe(path), measure=False).text
    assert not found.exact
    assert found.bytes < len(whole) * 0.75
    (tmp_path / "text.jsonl").write_text(whole)
    assert plan(load_recipe(path), measure=False).text.exact
    (load_recipe(path).run_folder / "tokenizer" / "files" / "tokenizer.json").unlink()
    assert not plan(load_recipe(path), measure=False).text.exact


def test_activation_checkpointing_and_short_rows_need_less(recipe):
    work = training_works(recipe, CONFIG, plan(recipe, measure=False).text)[0]
    some, all_ = (replace(work, wishes=replace(work.wishes, activation_checkpointing=k)) for k in ("selective", "full"))
    short = replace(work, length=work.length // 2)
    totals = [expected_memory(CONFIG, one, None).activations for one in (work, some, all_, short)]
    assert totals[2] < totals[1] < totals[0]
    assert totals[3] < totals[0] / 2


def test_disk_counts_the_checkpoints_that_retention_keeps(recipe):
    settings = recipe.pretrain.model_copy(update={"checkpoint_every_steps": 10, "keep_last": 2})
    assert checkpoints_kept(settings, 100) == 3
    assert checkpoints_kept(settings, 10) == 1
    every = settings.model_copy(update={"keep_every_steps": 25})
    assert checkpoints_kept(every, 100) == 7
    sizes = {"text_bytes": 0, "sft_steps": 4}
    muon, adamw = checkpoint_bytes(CONFIG, "muon"), checkpoint_bytes(CONFIG, "adamw")
    assert muon < adamw == 12 * CONFIG.parameter_count()
    kept = checkpoints_kept(recipe.pretrain, 100) * muon + checkpoints_kept(recipe.sft, 4) * adamw
    assert disk_of(recipe, CONFIG, tokens=0, **sizes).checkpoints == kept + adamw
    assert disk_of(recipe, CONFIG, tokens=10, **sizes).shards == 20
    assert disk_of(recipe, replace(CONFIG, vocab_size=70_000), tokens=10, **sizes).shards == 40


def test_looks_at_held_out_conversations_are_bounded_as_the_trainers_are(recipe):
    text = plan(recipe, measure=False).text
    bounded = recipe.model_copy(update={"sft": recipe.sft.model_copy(update={"evaluate_tokens": 7})})
    work = training_works(bounded, CONFIG, text)[1]
    assert work.heldout_tokens == 7 * -(-work.steps // recipe.sft.evaluate_every_steps)


def test_a_number_is_as_wide_as_the_trainer_would_have_it_here(recipe, monkeypatch):
    work = training_works(recipe, CONFIG, plan(recipe, measure=False).text)[0]
    wide, narrow = (replace(work, wishes=replace(work.wishes, dtype=d)) for d in ("float32", "bfloat16"))
    left = replace(work, wishes=replace(work.wishes, dtype="auto"))
    for fast in (True, False):
        monkeypatch.setattr("modicum.road.works.has_fast_bfloat16", lambda _, fast=fast: fast)
        assert (wide.number_bytes, narrow.number_bytes, left.number_bytes) == (4, 2, 2 if fast else 4)


def test_a_source_that_would_be_read_too_often_is_told_beforehand(tiny):
    found = plan(load_recipe(tiny(pretrain={"steps": 5000})), measure=False)
    assert any("max_epochs is 4" in note and "source text" in note for note in found.notes)


def test_equal_stages_share_one_trial_and_others_do_not(recipe, monkeypatch):
    asked = []

    def counted(config, *, rows, length, wishes, optimizer, flops):  # noqa: ARG001
        asked.append((rows, length))
        return trial(rows=rows, length=length)

    monkeypatch.setattr(room, "try_updates", counted)
    plan(recipe)
    assert asked == [(4, 128), (4, 256)]
    asked.clear()
    same = recipe.sft.model_copy(update={"sequence_length": 128, "optimizer": recipe.pretrain.optimizer})
    found = plan(recipe.model_copy(update={"sft": same}))
    assert asked == [(4, 128)]
    assert found.seconds == pytest.approx(sum(stage.seconds for stage in found.stages))
    assert found.to_dict()["seconds"]["whole run"] == found.seconds


def test_a_run_keeps_its_plan_from_before_its_first_update(recipe):
    road = Road(recipe)
    road.run.path.mkdir(parents=True)
    keep_plan(road)
    kept = json.loads((road.run.path / "plan.json").read_text())
    assert kept["tokens"] == 100 * 4 * 128
    (road.run.path / "plan.json").unlink()
    (road.run.checkpoints("pretrain") / "last").mkdir(parents=True)
    keep_plan(road)
    assert not (road.run.path / "plan.json").exists(), "what is already under way is not planned again"


@pytest.mark.parametrize(("load", "busy"), [(0.1, False), (50.0, True)])
def test_a_trial_beside_other_work_says_so(recipe, monkeypatch, load, busy):
    monkeypatch.setattr(room, "try_updates", lambda config, **shape: trial(rows=shape["rows"], length=shape["length"]))  # noqa: ARG005
    monkeypatch.setattr(room, "busy_cores", lambda: load)
    assert any("other work was running" in note for note in plan(recipe).notes) == busy
    assert not any("other work was running" in note for note in plan(recipe, measure=False).notes)
