"""modicum import and export, as they are typed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from modicum.checkpoint import load_checkpoint, save_checkpoint
from modicum.cli import export
from modicum.cli.app import app
from modicum.model import Decoder, ModelConfig
from modicum.tokenizer import train_tokenizer

assert export  # registers the verb


def modicum(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "modicum", *map(str, arguments)], capture_output=True, text=True, check=False
    )


@pytest.fixture
def checkpoint(tmp_path):
    tokenizer = train_tokenizer(["to and fro"] * 40, vocab_size=320, min_frequency=2, sample_bytes=10**6, seed=0)[0]
    config = ModelConfig(
        vocab_size=320, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64,
    )  # fmt: skip
    weights = Decoder(config).state_dict()
    return save_checkpoint(tmp_path, 1, config=config, weights=weights, tokenizer=tokenizer, chat=False, training=None)


def test_a_model_goes_out_and_comes_in_again(checkpoint, tmp_path):
    out = modicum("export", checkpoint, "--to", "cyberslm", "--out", tmp_path / "theirs")
    assert out.returncode == 0, out.stderr
    assert "prompt     difference   allowed  largest logit" in out.stdout
    assert "no tokenizer.model: the checkpoint has none" in out.stdout
    assert f"written: {tmp_path / 'theirs'}" in out.stdout
    file = tmp_path / "theirs" / "model.pt"
    content = torch.load(file, weights_only=True)
    state = {f"_orig_mod.{name}": weight for name, weight in content["model_state"].items()}
    torch.save({**content, "model_state": state}, file)
    back = modicum("import", tmp_path / "theirs" / "model.pt", "--dialect", "cyberslm", "--out", tmp_path / "ours")
    assert back.returncode == 0, back.stderr
    assert "CyberSLM from" in back.stdout
    assert "40 tokens" in back.stdout
    assert "every name began with _orig_mod." in back.stdout
    first, second = load_checkpoint(checkpoint).weights, load_checkpoint(tmp_path / "ours").weights
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_report_is_json_where_a_machine_reads_it(checkpoint, tmp_path):
    answer = modicum("import", checkpoint, "--dialect", "hf", "--out", tmp_path / "ours", "--json")
    report = json.loads(answer.stdout)
    assert report["architecture"] == report["written_as"] == "LlamaForCausalLM"
    assert report["tokenizer"] == str(checkpoint / "tokenizer.json")
    assert [one["tokens"] for one in report["compared"]] == [1, 2, 7, 40]
    assert all(one["difference"] <= one["allowed"] for one in report["compared"])
    answer = modicum("export", tmp_path / "ours", "--to", "cyberslm", "--out", tmp_path / "theirs", "--json")
    assert json.loads(answer.stdout)["tensors"] == report["tensors"]


def test_what_is_wrong_with_the_source_is_told_with_status_2(tmp_path):
    state = {"norm.weight": torch.ones(3)}
    torch.save({"model_state": state, "config": {"n_embd": 32}}, tmp_path / "model.pt")
    answer = modicum("import", tmp_path / "model.pt", "--dialect", "core", "--out", tmp_path / "ours")
    assert answer.returncode == 2
    assert f"error: {tmp_path / 'model.pt'}: config:" in answer.stderr
    assert not (tmp_path / "ours").exists()
    answer = modicum("export", tmp_path / "nowhere", "--to", "cyberslm", "--out", tmp_path / "theirs")
    assert answer.returncode == 2
    assert "no such checkpoint" in answer.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("import", "x.pt", "--out", "y"),
        ("import", "x.pt", "--dialect", "klingon", "--out", "y"),
        ("export", "x", "--to", "gguf", "--out", "y"),
    ],
)
def test_an_unknown_dialect_is_the_users_to_mend(arguments):
    assert modicum(*arguments).returncode == 2


def test_a_model_goes_out_for_llama_cpp_and_comes_in_again(checkpoint, tmp_path):
    out = modicum("export", checkpoint, "--to", "gguf", "--out", tmp_path / "gguf")
    assert out.returncode == 0, out.stderr
    for line in (
        "64 tokens",
        "10,000 strings (Unicode 3.2.0) with the same ids",
        "KL divergence",
        "top-1 agreement 100.00%",
    ):
        assert line in out.stdout, line
    file = tmp_path / "gguf" / "model-f32.gguf"
    assert f"written: {file}" in out.stdout
    back = modicum("import", file, "--dialect", "gguf", "--out", tmp_path / "ours")
    assert back.returncode == 0, back.stderr
    assert "llama (GGUF) from" in back.stdout
    first, second = load_checkpoint(checkpoint).weights, load_checkpoint(tmp_path / "ours").weights
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_limit_on_the_divergence_refuses_with_status_2(checkpoint, tmp_path):
    given = ("export", checkpoint, "--to", "gguf", "--quant", "q8_0", "--max-kl", "1e-12", "--out", tmp_path / "gguf")
    answer = modicum(*given)
    assert answer.returncode == 2
    assert "mean KL divergence" in answer.stderr
    assert "allowed 1e-12" in answer.stderr
    assert not (tmp_path / "gguf").exists()


def test_a_number_type_is_a_gguf_files_alone(checkpoint, tmp_path):
    answer = modicum("export", checkpoint, "--to", "cyberslm", "--quant", "q8_0", "--out", tmp_path / "theirs")
    assert answer.returncode == 2
    assert "--quant q8_0: only GGUF and ONNX files have number types" in answer.stderr


def test_a_model_goes_out_for_transformers(checkpoint, tmp_path):
    limits = ("--dtype", "bf16", "--max-kl", "1", "--max-shard-size", "20KB")
    out = modicum("export", checkpoint, "--to", "hf", *limits, "--out", tmp_path / "theirs")
    assert out.returncode == 0, out.stderr
    assert "for transformers (LlamaForCausalLM): " in out.stdout
    assert "(allowed 1)" in out.stdout
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    answer = modicum("export", checkpoint, "--to", "gguf", "--dtype", "bf16", "--out", tmp_path / "more")
    assert answer.returncode == 2
    assert "only a Hugging Face model has them" in answer.stderr


def test_a_model_goes_out_for_onnxruntime(checkpoint, tmp_path):
    out = modicum("export", checkpoint, "--to", "onnx", "--out", tmp_path / "theirs")
    assert out.returncode == 0, out.stderr
    for line in (
        "for onnxruntime:",
        "64 tokens with a cache",
        "in a batch padded on the left",
        "10,000 strings (Unicode 3.2.0) with the same ids",
        "top-1 agreement",
        "greedy continuations of 60 tokens the same to the end",
        "to load",
        "bits per byte",
        f"written: {tmp_path / 'theirs' / 'onnx' / 'model.onnx'}",
    ):
        assert line in out.stdout, line
    answer = modicum("export", checkpoint, "--to", "onnx", "--quant", "q8_0", "--out", tmp_path / "more")
    assert answer.returncode == 2
    assert "--to onnx: fp32, fp16, int8" in answer.stderr


# A shell that starts tests in the background has them ignore SIGINT, which their children inherit.
SLEEPING = """
import signal
import sys
from modicum.cli import export
from modicum.cli.app import main
from modicum.exchange import {child}

signal.signal(signal.SIGINT, signal.default_int_handler)
{child}.__file__ = sys.argv.pop(1)
sys.argv[0] = "modicum"
main()
"""


@pytest.mark.parametrize(
    ("target", "child", "number"),
    [
        ("gguf", "gguf_child", signal.SIGTERM),
        ("onnx", "onnx_child", signal.SIGTERM),
        ("gguf", "gguf_child", signal.SIGINT),
    ],
)
def test_an_export_that_is_stopped_leaves_nothing(number, target, child, checkpoint, tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    (tmp_path / "child.py").write_text(
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
    )
    words = ["export", checkpoint, "--to", target, "--out", tmp_path / "out", "--texts", "2", "--strings", "20"]
    command = [sys.executable, "-c", SLEEPING.format(child=child), tmp_path / "child.py", *words]
    running = subprocess.Popen(
        list(map(str, command)), stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(temporary)}
    )
    _wait_until(lambda: (tmp_path / "pid").is_file() and (tmp_path / "pid").read_text())
    assert (tmp_path / ".tmp-out").exists()
    running.send_signal(number)
    _, said = running.communicate(timeout=30)
    assert running.returncode == 128 + number, said
    assert "stopped: " in said
    assert not (tmp_path / ".tmp-out").exists()
    assert list(temporary.glob("modicum-*")) == []
    _wait_until(lambda: not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists())


def _wait_until(holds):
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_settings_that_a_target_does_not_have_are_refused(checkpoint, tmp_path):
    for words, told in (
        (("--to", "gguf", "--quant", "q8_0", "--max-difference", "1e-3"), "only a GGUF file of f32 and an ONNX one of"),
        (("--to", "hf", "--max-difference", "1e-3"), "--max-difference: only"),
        (("--to", "onnx", "--max-difference", "-1"), "expected a part of a logit"),
        (("--to", "cyberslm", "--texts", "3"), "compared bit for bit"),
        (("--to", "cyberslm", "--max-kl", "3"), "compared bit for bit"),
        (("--to", "gguf", "--quant", "q8_0", "--min-agreement", "98"), "expected a share from 0 to 1"),
        (("--to", "onnx", "--heldout", tmp_path / "none.txt"), "none.txt: no such file"),
    ):
        answer = CliRunner().invoke(app, ["export", *map(str, (checkpoint, *words, "--out", tmp_path / "out"))])
        assert answer.exit_code == 2, answer.output
        assert told in answer.output
        assert not (tmp_path / "out").exists()
