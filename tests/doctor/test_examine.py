"""What is looked at for which target, and whose fault decides the exit status."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from modicum.checkpoint import save_checkpoint
from modicum.doctor import examine as room
from modicum.doctor.examine import examined, stand_in
from modicum.doctor.finding import Finding
from modicum.doctor.learning import NANO
from modicum.doctor.machine import allocator, bfloat16, compiler, disk_space, memory
from modicum.model import Decoder, ModelConfig
from modicum.store import UserError, write_manifest
from modicum.tokenizer import train_tokenizer

CPU = torch.device("cpu")
PROBES = ["causality", "causality with a cache", "cache against full", "packed against separate"]


@pytest.fixture(autouse=True)
def no_machine(monkeypatch):
    """The machine has tests of its own; it takes seconds to look at."""
    monkeypatch.setattr(room, "examine_machine", lambda _: [Finding("machine", "ok", "here")])


@pytest.fixture
def checkpoint(tmp_path):
    tokenizer, _ = train_tokenizer(
        ["a port is a number"] * 9, vocab_size=384, min_frequency=2, sample_bytes=999, seed=0
    )
    config = ModelConfig(
        vocab_size=384, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    weights = Decoder(config).state_dict()
    return save_checkpoint(tmp_path, 1, config=config, weights=weights, tokenizer=tokenizer, chat=False, training=None)


def names(examination):
    return [finding.name for finding in examination.findings]


def test_without_a_target_the_machine_and_a_tiny_model_are_looked_at():
    found = examined()
    assert names(found) == ["machine", *PROBES, "untrained loss", "overfit one batch"]
    assert found.exit_status == 0


def test_a_checkpoints_own_model_is_probed(checkpoint):
    found = examined(checkpoint)
    assert names(found)[-4:] == PROBES
    assert found.exit_status == 0


def test_a_damaged_checkpoint_is_the_users_to_mend_and_is_not_probed(checkpoint):
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    found = examined(checkpoint)
    assert "causality" not in names(found)
    assert found.exit_status == 2


def test_a_checkpoint_larger_than_memory_is_not_probed(checkpoint, monkeypatch):
    monkeypatch.setattr(room, "free_memory", lambda: 1000)
    found = examined(checkpoint)
    assert not set(PROBES) & set(names(found))
    assert (found.findings[-1].name, found.findings[-1].outcome) == ("model", "told")
    assert "not probed, because it is too large" in found.findings[-1].detail
    assert found.exit_status == 0


def test_wrong_arithmetic_is_ours(checkpoint, monkeypatch):
    monkeypatch.setattr(room, "probe_all", lambda _: [Finding("causality", "failed", "planted")])
    assert examined(checkpoint).exit_status == 1


def test_a_recipes_conversations_are_shown_before_anything_has_run(tiny):
    found = examined(tiny())
    assert "supervised tokens" in names(found)
    assert len(found.conversations) == 3
    assert found.exit_status == 0
    assert json.loads(json.dumps(found.to_dict()))["conversations"][0]["pieces"][1][1] is True


def test_a_conversation_without_an_answer_in_a_recipe_is_the_users_to_mend(tiny, tmp_path):
    recipe = tiny()
    (tmp_path / "talk.jsonl").write_text('{"messages": [{"role": "user", "content": "Hello?"}]}\n')
    found = examined(recipe)
    assert found.exit_status == 2
    failed = [finding for finding in found.findings if finding.outcome == "failed"]
    assert "talk.jsonl:1" in failed[0].detail


def test_the_newest_checkpoints_of_a_recipes_run_are_looked_at(tiny, checkpoint, tmp_path):
    recipe = tiny(sft=None)
    folder = tmp_path / "runs" / "tiny" / "pretrain" / "checkpoints" / "last"
    shutil.copytree(checkpoint, folder)
    assert "pretrain: end of text" in names(examined(recipe))
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": 1}))
    write_manifest(folder)
    found = examined(recipe)
    assert found.exit_status == 2


def test_a_target_that_is_neither_recipe_nor_checkpoint_is_refused(tmp_path):
    with pytest.raises(UserError, match="no such recipe"):
        examined(tmp_path / "absent.yaml")
    assert examined(tmp_path).exit_status == 2


def test_a_model_larger_than_memory_is_told_and_a_tiny_one_probed(monkeypatch):
    monkeypatch.setattr(room, "free_memory", lambda: 1000)
    findings = list(room.arithmetic(NANO))
    assert (findings[0].name, findings[0].outcome) == ("model", "told")
    assert [finding.name for finding in findings[1:5]] == PROBES


def test_a_template_of_ones_own_is_used_where_no_tokenizer_is_there_yet(tiny, tmp_path):
    tiny()
    template = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content | trim }}<|im_end|>{% endfor %}"
    tokenizer = stand_in([tmp_path / "talk.jsonl"], template)
    assert tokenizer.chat_template == template


def test_a_template_that_cannot_be_read_is_named(tiny, tmp_path):
    (tmp_path / "latin.jinja").write_bytes(b"\xe9")
    recipe = tiny()
    written = recipe.read_text()
    for path, words in ((tmp_path, "is a folder"), (tmp_path / "latin.jinja", "is not UTF-8 text")):
        recipe.write_text(f"{written}chat: {{template: {path}}}\n")
        with pytest.raises(UserError, match=f"chat.template: {path} {words}"):
            examined(recipe)


def test_a_machine_with_little_memory_or_disk_fails_and_the_user_can_mend_it(monkeypatch, tmp_path):
    monkeypatch.setattr("modicum.doctor.machine.free_memory", lambda: 10**9)
    monkeypatch.setattr("modicum.doctor.machine.free_disk", lambda _: 10**9)
    for finding in (memory(), disk_space(tmp_path)):
        assert (finding.outcome, finding.yours) == ("failed", True)


def test_a_machine_without_a_compiler_is_told_and_passes(monkeypatch):
    monkeypatch.setattr("modicum.doctor.machine.compiler_fault", lambda _: "no working compiler (g++ is missing)")
    finding = compiler(CPU)
    assert finding.outcome == "told"
    assert "g++ is missing" in finding.detail


def test_a_compiler_that_computes_something_else_fails(monkeypatch):
    monkeypatch.setattr("modicum.doctor.machine.compiler_fault", lambda _: None)
    monkeypatch.setattr(torch, "compile", lambda function, **_: lambda x: function(x) + 1e-3)
    assert compiler(CPU).outcome == "failed"


def test_what_the_processor_does_in_bf16_is_measured(monkeypatch):
    monkeypatch.setattr("modicum.doctor.machine.has_fast_bfloat16", lambda _: False)
    monkeypatch.setattr("modicum.doctor.machine._SIDE", 64)
    finding = bfloat16(CPU)
    assert finding.detail.startswith("no bf16 in hardware: training uses fp32")
    assert "GFLOP/s" in finding.detail


def test_an_allocator_that_the_user_has_set_is_left_alone(monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert allocator().outcome == "told"
    assert Path("/proc").exists() is False or "your own" in allocator().detail
