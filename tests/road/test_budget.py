"""What a plan says would have to change: each change, when made, keeps within the budget."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from modicum.model import ModelConfig, training_flops_per_token
from modicum.recipe import ModelSettings
from modicum.road.budget import memory_changes, read_bytes, smaller_presets, time_changes
from modicum.road.chips import CHIPS, elsewhere
from modicum.road.memory import Memory, expected_memory
from modicum.road.works import TrainingWork
from modicum.store import UserError
from modicum.train import Wishes


def config_of(preset, vocab_size=4096):
    return ModelConfig.from_settings(ModelSettings.model_validate({"preset": preset}), vocab_size)


WORK = TrainingWork(
    stage="pretrain",
    steps=1000,
    batch_size=32,
    rows=32,
    length=512,
    flops_per_token=1,
    heldout_tokens=0,
    saves=1,
    wishes=Wishes(),
)


def test_sizes_are_read_with_their_units():
    assert read_bytes("4GB") == 4 * 10**9
    assert read_bytes(" 512 MiB ") == 512 * 2**20
    assert read_bytes("4e9") == 4 * 10**9
    for wrong in ("4 parsecs", "", "GB", "1.2.3GB", "1e999GB", "nanGB", "-1GB"):
        with pytest.raises(UserError, match="expected a size such as 4GB"):
            read_bytes(wrong)


def test_a_run_within_its_memory_needs_no_change():
    assert memory_changes(10**12, config_of("micro"), [WORK], {}, {}) == []


def test_a_smaller_micro_batch_that_is_named_fits_and_the_next_larger_does_not():
    config = config_of("micro")
    needed = expected_memory(config, WORK, None)
    budget = needed.total - needed.activations // 2 + 10_000_000
    (change,) = memory_changes(budget, config, [WORK], {}, smaller_presets(config))
    assert "pretrain.micro_batch_size: 16 would take" in change
    # activations grow with rows; the estimate with the named rows keeps within, with twice as many it does not
    assert expected_memory(config, replace(WORK, rows=16), None).total <= budget
    assert expected_memory(config, WORK, None).total > budget


def test_where_one_row_is_too_much_checkpointing_is_named():
    config = config_of("mini")
    one = replace(WORK, rows=1, length=2048)
    needed = expected_memory(config, one, None)
    for share, before, kind, longer in (
        (0.5, "none", "selective", "tenth"),
        (0.75, "none", "full", "third"),
        (0.75, "selective", "full", "third"),
    ):
        budget = needed.total - round(needed.activations * share)
        asked = replace(one, wishes=replace(one.wishes, activation_checkpointing=before))
        (change,) = memory_changes(budget, config, [asked], {}, {})
        assert f"activation_checkpointing: {kind} with micro_batch_size: 1" in change
        assert f"a {longer} longer" in change
        saving = replace(one, wishes=replace(one.wishes, activation_checkpointing=kind))
        assert expected_memory(config, saving, None).total <= budget


def test_where_the_weights_alone_are_too_much_a_smaller_preset_is_named_that_fits():
    config = config_of("base")
    budget = 2 * 10**9
    (change,) = memory_changes(budget, config, [WORK], {}, smaller_presets(config))
    name = change.split("model.preset: ")[1].split()[0]
    assert name in ("small", "cyberslm", "mini")
    assert f"{name} fits with micro_batch_size: 1" in change
    assert expected_memory(config_of(name), replace(WORK, rows=1), None).total <= budget


def test_where_no_preset_is_small_enough_that_is_said():
    nano = config_of("nano")
    least = expected_memory(nano, replace(WORK, rows=1), None)
    (change,) = memory_changes(least.total - 10**6, nano, [WORK], {}, smaller_presets(nano))
    assert "with micro_batch_size: 1; only a smaller model than any to name here" in change
    (change,) = memory_changes(10**6, nano, [WORK], {}, smaller_presets(nano))
    assert "Python and PyTorch alone take" in change


def test_a_stage_that_makes_no_update_needs_no_memory():
    config = config_of("base")
    assert memory_changes(2 * 10**9, config, [replace(WORK, steps=0)], {}, {})  # nothing else is asked about
    works = [replace(WORK, steps=0), replace(WORK, stage="sft", rows=1, length=16)]
    budget = expected_memory(config, works[1], None).total
    assert memory_changes(budget, config, works, {}, {}) == []


def test_fewer_updates_are_those_that_fit_beside_the_other_stages():
    seconds = {"corpus": 100.0, "pretrain": 1000.0, "sft": 100.0}
    assert time_changes(1200.0, config_of("mini"), [WORK], seconds, {}) == []
    change = time_changes(700.0, config_of("mini"), [WORK], seconds, {})[0]
    assert "pretrain.steps: 500 of 1,000 would fit, 8,192,000 tokens" in change


def test_a_smaller_preset_is_named_where_its_arithmetic_fits():
    config = config_of("mini")
    change = time_changes(600.0, config, [WORK], {"pretrain": 1000.0}, smaller_presets(config))[-1]
    name = change.split("model.preset: ")[1].split()[0]
    shares = {
        preset: training_flops_per_token(shape, WORK.length) / training_flops_per_token(config, WORK.length)
        for preset, shape in smaller_presets(config).items()
    }
    assert name == max((preset for preset in shares if shares[preset] <= 0.6), key=lambda preset: shares[preset])


def test_a_run_without_pretraining_is_no_division_by_zero():
    (change,) = time_changes(1.0, config_of("nano"), [WORK], {"pretrain": 0.0, "sft": 9.0}, {})
    assert "the stages beside pretraining" in change


def test_a_budget_that_the_other_stages_alone_overrun_says_so():
    seconds = {"corpus": 100.0, "pretrain": 10.0, "sft": 100.0}
    (change,) = time_changes(150.0, config_of("nano"), [WORK], seconds, {})
    assert "the stages beside pretraining alone take" in change


def test_without_a_measurement_nothing_is_said_of_hours():
    assert "not known" in time_changes(10.0, config_of("nano"), [WORK], {"pretrain": None}, {})[0]


def test_a_stage_of_unknown_time_is_not_promised_to_keep_within_the_hours():
    seconds = {"corpus": None, "shards": None, "pretrain": 60.0}
    (change,) = time_changes(3600.0, config_of("nano"), [WORK], seconds, {})
    assert "nothing is known here of the time of corpus, shards" in change
    for change in time_changes(30.0, config_of("nano"), [WORK], seconds, {}):
        assert "without corpus, shards, whose time is not known here, more than" in change


def memory_of(state, working):
    return Memory("pretrain", 0, state, 0, 0, 0, working, measured=False)


def test_other_chips_are_computed_from_their_peak_and_shared_state_shrinks():
    found = elsewhere(
        "H100",
        8,
        flops=989e12 * 8 * 0.4 * 3600,
        memory=memory_of(160 * 10**9, 80 * 10**9),
        whole=10**9,
        rows=8,
        batch_size=8,
    )
    assert found.seconds == pytest.approx(3600)
    assert found.replicated_bytes == 170 * 10**9
    assert found.sharded_bytes == 31 * 10**9
    assert "FSDP2" in found.fits
    assert "DDP" in elsewhere("l4", 1, flops=1.0, memory=memory_of(10**9, 10**9), whole=0, rows=4, batch_size=4).fits
    assert (
        "does not fit" in elsewhere("l4", 1, flops=1.0, memory=memory_of(10**12, 0), whole=0, rows=4, batch_size=4).fits
    )


def test_a_chip_has_a_micro_batch_or_its_share_of_the_batch_where_that_is_less():
    for rows, batch, share in ((1, 8, 1), (8, 64, 8), (8, 32, 4), (8, 4, 1)):
        found = elsewhere(
            "h100", 8, flops=1.0, memory=memory_of(8 * 10**9, 10**9), whole=0, rows=rows, batch_size=batch
        )
        assert found.sharded_bytes == 10**9 + 10**9 * share // rows


def test_a_chip_that_is_not_known_names_those_that_are():
    with pytest.raises(UserError, match="known are a100, h100"):
        elsewhere("abacus", 1, flops=1.0, memory=memory_of(1, 1), whole=0, rows=1, batch_size=1)
    assert all(chip.flops > 1e14 for chip in CHIPS.values())


def test_the_verb_prints_what_would_change_and_the_time_elsewhere(tiny):
    command = [sys.executable, "-m", "modicum", "plan", str(tiny()), "--no-measure"]

    def told(*options, status=0):
        done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        return done.stdout + done.stderr

    text = told("--memory", "100MB", "--chip", "h100", "--gpus", "4")
    assert "change: pretrain needs" in text
    assert "4 x H100 SXM" in text
    assert "computed from its published peak" in text
    assert "within the budget as it is" in told("--memory", "900GB")
    printed = json.loads(told("--hours", "2", "--chip", "l4", "--json"))
    assert "not known" in printed["changes"][0]
    assert printed["elsewhere"]["chip"]["name"] == "L4"
    assert "known are" in told("--chip", "abacus", status=2)
    assert "needs --chip" in told("--gpus", "4", status=2)
    assert "such as 4GB" in told("--memory", "much", status=2)
