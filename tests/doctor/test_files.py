"""A sound checkpoint passes, and each planted fault fails the check that is there for it."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from modicum.checkpoint import TrainingState, load_checkpoint, save_checkpoint
from modicum.doctor.files import check_files, end_ids, round_trip, vocabulary
from modicum.doctor.finding import exit_status
from modicum.model import Decoder, ModelConfig
from modicum.store import write_manifest
from modicum.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from modicum.tokenizer.roles import Roles


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    tokenizer, _ = train_tokenizer(
        ["a port is a number"] * 9, vocab_size=384, min_frequency=2, sample_bytes=999, seed=0
    )
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    root = tmp_path_factory.mktemp("checkpoints")
    training = TrainingState({"moment": torch.zeros(3)}, {"step": 7})
    weights = Decoder(config).state_dict()
    return save_checkpoint(root, 7, config=config, weights=weights, tokenizer=tokenizer, chat=True, training=training)


@pytest.fixture
def checkpoint(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "step-00000007")


def failed(path):
    return [finding.name for finding in check_files(path) if finding.outcome == "failed"]


def edit_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_sound_checkpoint_passes(checkpoint):
    findings = check_files(checkpoint)
    assert [finding.outcome for finding in findings] == ["ok"] * 6
    assert "a chat model: stops at <|im_end|> and <|endoftext|>" in findings[4].detail


def test_one_flipped_bit_fails_and_names_its_file(checkpoint):
    path = checkpoint / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    findings = [finding for finding in check_files(checkpoint) if finding.outcome == "failed"]
    assert findings[0].name == "file hashes"
    assert "model.safetensors: damaged" in findings[0].detail
    assert exit_status(findings) == 2


def test_files_that_no_hash_covers_are_told(checkpoint):
    hashed = json.loads((checkpoint / "manifest.json").read_text())["files"]
    (checkpoint / "notes.txt").write_text("mine")
    finding = check_files(checkpoint)[0]
    assert (finding.name, finding.outcome) == ("file hashes", "told")
    assert finding.detail.startswith(f"{len(hashed)} files, ")
    assert finding.detail.endswith("all as they were written; no hash is known of 1 more: notes.txt")


def test_a_truncated_file_fails(checkpoint):
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert failed(checkpoint) == ["file hashes", "tensors and tokenizer"]


@pytest.mark.parametrize("stops", [1, [1, 0], [5], 3, None, []])
def test_a_wrong_end_id_fails_even_under_a_fresh_manifest(checkpoint, stops):
    for name in ("config.json", "generation_config.json"):
        edit_json(checkpoint / name, eos_token_id=stops)
    write_manifest(checkpoint)
    tokenizer = load_tokenizer(checkpoint)
    assert end_ids(checkpoint, tokenizer).outcome == "failed"


def test_files_that_disagree_about_the_end_fail(checkpoint):
    edit_json(checkpoint / "config.json", eos_token_id=0)
    write_manifest(checkpoint)
    assert failed(checkpoint) == ["end of text"]


def test_padding_that_is_the_end_of_text_fails(checkpoint):
    edit_json(checkpoint / "config.json", pad_token_id=0)
    write_manifest(checkpoint)
    assert failed(checkpoint) == ["end of text"]


def test_weights_that_are_not_finite_fail_and_are_named(checkpoint):
    path = checkpoint / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, path, metadata={"format": "pt"})
    write_manifest(checkpoint)
    (finding,) = [finding for finding in check_files(checkpoint) if finding.outcome == "failed"]
    assert "model.norm.weight" in finding.detail


def test_an_optimizer_that_is_not_finite_fails(checkpoint):
    save_file({"moment": torch.tensor([1.0, torch.inf])}, checkpoint / "training" / "optimizer.safetensors")
    write_manifest(checkpoint)
    assert failed(checkpoint) == ["training state"]


def test_a_checkpoint_without_training_state_is_told_and_passes(checkpoint):
    shutil.rmtree(checkpoint / "training")
    write_manifest(checkpoint)
    findings = check_files(checkpoint)
    assert (findings[-1].name, findings[-1].outcome) == ("training state", "told")
    assert exit_status(findings) == 0


def test_more_embedding_rows_than_ids_are_told_and_pass(checkpoint):
    weights = load_file(checkpoint / "model.safetensors")
    table = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = torch.cat([table, table[:64]])
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    edit_json(checkpoint / "config.json", vocab_size=len(table) + 64)
    write_manifest(checkpoint)
    finding = vocabulary(load_checkpoint(checkpoint))
    assert finding.outcome == "told"
    assert finding.detail.endswith("no id reaches the other 64")
    assert exit_status([finding]) == 0


def test_a_tokenizer_that_alters_text_or_lets_it_control_fails(checkpoint, monkeypatch):
    tokenizer = load_tokenizer(checkpoint)
    monkeypatch.setattr(tokenizer, "decode", lambda _: "another text")
    assert round_trip(tokenizer).outcome == "failed"
    monkeypatch.setattr(tokenizer, "encode", lambda _: [tokenizer.end_of_turn_id])
    assert "control ids [3]" in round_trip(tokenizer).detail


def test_a_tokenizer_from_elsewhere_may_pad_with_a_token_that_ends_an_answer(sound, tmp_path):
    own = load_checkpoint(sound)
    roles = Roles(eos="<|im_end|>", pad="<|endoftext|>")
    tokenizer = Tokenizer(own.tokenizer.definition, own.tokenizer.chat_template, roles)
    made = {"config": own.config, "weights": own.weights, "tokenizer": tokenizer, "chat": True, "training": None}
    path = save_checkpoint(tmp_path, 1, **made, stop_ids=[3, 0])
    finding = end_ids(path, load_checkpoint(path).tokenizer)
    assert finding.outcome == "ok"
    assert finding.detail.endswith("padding is one of these")
    edit_json(path / "config.json", pad_token_id=1)
    assert end_ids(path, tokenizer).outcome == "failed"
