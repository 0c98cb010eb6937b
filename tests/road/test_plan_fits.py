"""What a plan says of a run that does not fit here, alone or on many ranks; and that it lets pass what does."""

import json
from dataclasses import replace

import pytest
from plan_trials import CONFIG, trial

from modicum.road import plan as room
from modicum.road.context import Road
from modicum.road.fits import refuse_memory
from modicum.road.memory import activation_bytes, expected_memory, rows_to_try
from modicum.road.plan import plan
from modicum.road.planning import keep_plan
from modicum.road.timing import training_plan
from modicum.road.works import training_works
from modicum.store import UserError
from modicum.train import Ranks


def test_a_run_that_cannot_fit_into_memory_is_refused_with_mends(recipe, monkeypatch):
    monkeypatch.setattr("modicum.road.fits.memory_limit", lambda: 10**8)
    with pytest.raises(UserError, match=r"pretrain needs about .* of memory, and this machine has 100 MB"):
        plan(recipe, measure=False)


def test_what_does_not_fit_here_is_still_planned_for_another_chip(recipe, monkeypatch):
    monkeypatch.setattr("modicum.road.fits.memory_limit", lambda: 10**8)
    monkeypatch.setattr(room, "free_disk", lambda _: 1000)
    monkeypatch.setattr(room, "try_updates", lambda *_, **__: pytest.fail("tried what cannot fit"))
    found = plan(recipe, chip="h100", gpus=4)
    assert found.elsewhere.seconds > 0
    told = [note for note in found.notes if note.startswith("not on this machine: ")]
    assert any("this machine has 100 MB" in note for note in told)
    assert any("keep_last" in note for note in told)


def test_the_mends_are_those_that_help(recipe, monkeypatch):
    monkeypatch.setattr("modicum.road.fits.memory_limit", lambda: 2 * 10**9)
    work = training_works(recipe, CONFIG, plan(recipe, measure=False).text)[0]
    with pytest.raises(UserError) as told:
        refuse_memory(expected_memory(CONFIG, work, trial(peak_bytes=3 * 10**9)), work)
    for mend in ("micro_batch_size below 4", "sequence_length below 128", "activation_checkpointing: full"):
        assert f"pretrain.{mend}" in str(told.value)
    single = replace(work, rows=1, wishes=replace(work.wishes, activation_checkpointing="full"))
    with pytest.raises(UserError) as told:
        refuse_memory(expected_memory(CONFIG, single, trial(rows=1, peak_bytes=3 * 10**9)), single)
    assert "micro_batch_size" not in str(told.value)
    assert "activation_checkpointing" not in str(told.value)


def test_a_run_that_cannot_fit_on_the_disk_is_refused_with_mends(recipe, monkeypatch):
    monkeypatch.setattr(room, "free_disk", lambda _: 1000)
    with pytest.raises(UserError, match="keep_last"):
        plan(recipe, measure=False)


def test_ranks_share_the_rows_of_an_update_and_sharded_ones_the_state(recipe):
    text = plan(recipe, measure=False).text
    alone = training_works(recipe, CONFIG, text)[0]
    cut = recipe.model_copy(update={"pretrain": recipe.pretrain.model_copy(update={"micro_batch_size": 4})})
    for settings, rows in ((recipe, 2), (cut, 2)):
        copied = training_works(settings, CONFIG, text, ranks=2)[0]
        assert (copied.rows, copied.tokens, copied.flops) == (rows, alone.tokens, alone.flops)
    sharded = replace(copied, sharded=True)
    tried = trial(rows=2, update_seconds=1.0, first_seconds=8.0)
    memories = [expected_memory(CONFIG, work, tried) for work in (copied, sharded)]
    for part in ("weights", "gradients", "optimizer"):
        assert getattr(memories[1], part) == getattr(memories[0], part) // 2
    assert memories[0].total == 900_000_000 + 100_000_000
    assert (memories[1].activations, memories[1].logits) == (memories[0].activations, memories[0].logits)
    assert memories[0].whole == 0
    tied = 4 * CONFIG.vocab_size * CONFIG.hidden_size
    assert memories[1].whole > 2 * tied, "the embedding is gathered, and so is its gradient"
    found = training_plan(CONFIG, copied, tried)
    assert found.seconds == pytest.approx(training_plan(CONFIG, alone, trial()).seconds - 100 * 1.0)
    assert found.tokens_per_second == 2 * training_plan(CONFIG, alone, trial()).tokens_per_second


def test_many_ranks_are_not_refused_for_what_one_process_would_need(recipe, monkeypatch):
    sections = {name: getattr(recipe, name).model_copy(update={"parallel": "fsdp"}) for name in ("pretrain", "sft")}
    shared = recipe.model_copy(update=sections)
    needed = {ranks: plan(shared, measure=False, ranks=ranks).memory.total for ranks in (1, 4)}
    copies = plan(recipe, measure=False, ranks=4).memory.total
    assert needed[4] < copies < needed[1]
    monkeypatch.setattr("modicum.road.fits.memory_limit", lambda: (needed[4] + copies) // 2)
    for ranks in (1, 2):
        with pytest.raises(UserError, match=r"(pretrain|sft) needs about"):
            plan(shared, measure=False, ranks=ranks)
    with pytest.raises(UserError, match=r"sft.parallel: fsdp, which shares those out"):
        plan(recipe, measure=False, ranks=4)
    road = Road(shared, ranks=Ranks(0, 4))
    road.run.path.mkdir(parents=True)
    keep_plan(road)
    assert json.loads((road.run.path / "plan.json").read_text())["memory"]["total"] == needed[4]


def test_the_ranks_of_one_processor_share_its_memory(recipe, monkeypatch):
    needed = plan(recipe, measure=False, ranks=2).memory.total
    monkeypatch.setattr("modicum.road.fits.memory_limit", lambda: needed * 3 // 2)
    plan(recipe, measure=False, ranks=2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"and each of the ranks has"):
        plan(recipe, measure=False, ranks=2)


def test_a_state_that_one_process_cannot_hold_whole_is_not_tried(recipe):
    work = replace(training_works(recipe, CONFIG, plan(recipe, measure=False).text)[0], ranks=4, rows=1)
    total = expected_memory(CONFIG, work, None)
    room = 2 * (total.total - total.activations)
    assert rows_to_try(CONFIG, replace(work, sharded=True), room) == 1
    assert rows_to_try(CONFIG, replace(work, sharded=True), room - 10) == 0
    assert rows_to_try(CONFIG, work, room - 10) == 1, "there the run itself needs as much"


def test_on_a_gpu_no_attention_weights_are_counted(recipe, monkeypatch):
    monkeypatch.setattr("modicum.road.works.has_fast_bfloat16", lambda _: True)
    work = training_works(recipe, CONFIG, plan(recipe, measure=False).text)[0]
    long = replace(work, length=2 * work.length)
    on_cpu = replace(work.wishes, device="cpu")
    before = activation_bytes(CONFIG, work)
    assert activation_bytes(CONFIG, long) > before
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert activation_bytes(CONFIG, long) == activation_bytes(CONFIG, work) < before
    assert activation_bytes(CONFIG, replace(work, wishes=on_cpu)) == before


def test_a_run_long_enough_for_a_trial_is_not_refused_by_an_estimate(recipe, monkeypatch):
    road = Road(recipe)
    road.run.path.mkdir(parents=True)
    needed = plan(recipe, measure=False).memory
    state = replace(needed, activations=0, logits=0).total
    monkeypatch.setattr("modicum.road.fits.memory_limit", lambda: (state + needed.total) // 2)
    monkeypatch.setattr("modicum.road.planning._WORTH_A_TRIAL_FLOPS", 0.0)
    small = trial(peak_bytes=290_000_000, program_bytes=280_000_000)
    monkeypatch.setattr(room, "try_updates", lambda config, **shape: replace(small, rows=shape["rows"]))  # noqa: ARG005
    keep_plan(road)
    assert json.loads((road.run.path / "plan.json").read_text())["memory"]["measured"]
    monkeypatch.setattr("modicum.road.planning._WORTH_A_TRIAL_FLOPS", 1e30)
    with pytest.raises(UserError, match="of memory, and this machine has"):
        keep_plan(road)
