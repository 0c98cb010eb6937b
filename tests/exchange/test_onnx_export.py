import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gguf_models
import numpy as np
import onnx
import onnxruntime
import onnxruntime_genai as genai
import pytest
import torch
from tokenizers import Tokenizer as PlainTokenizer

from modicum.checkpoint import load_checkpoint
from modicum.exchange import ONNX_LIMITS, Limits, export_onnx, onnx_child, onnx_exporting
from modicum.exchange.onnx_weights import rounded
from modicum.store import UserError

pytestmark = pytest.mark.usefixtures("brief_gate")
FAST = ("grouped, untied", "QK-norm", "biases")
WIDE = Limits(10, 10, 0)


def session(folder, file="onnx/model.onnx"):
    return onnxruntime.InferenceSession(folder / file, providers=["CPUExecutionProvider"])


def said(running, ids, *, cache=None, mask=None):
    """Logits (B, T, V) and the new cache, by the names that transformers.js gives."""
    past = [one for one in running.get_inputs() if one.name.startswith("past_key_values.")]
    cache = cache or [np.zeros((len(ids), one.shape[1], 0, one.shape[3]), np.float32) for one in past]
    mask = np.ones((len(ids), cache[0].shape[2] + ids.shape[1]), np.int64) if mask is None else mask
    places = np.maximum(mask.cumsum(1) - 1, 0)[:, -ids.shape[1] :]
    logits, *cache = running.run(
        None,
        {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": places,
            **{one.name: part for one, part in zip(past, cache, strict=True)},
        },
    )
    return logits, cache


@pytest.mark.parametrize(
    "shape", [shape if shape in FAST else pytest.param(shape, marks=pytest.mark.slow) for shape in gguf_models.SHAPES]
)
def test_onnxruntime_says_of_every_shape_what_transformers_says_of_the_checkpoint(
    shape, tokenizer, ids, said_by_transformers, tmp_path
):
    folder = gguf_models.save(tokenizer, tmp_path, **gguf_models.SHAPES[shape])
    report = export_onnx(folder, out=tmp_path / "out")
    assert {one.allowed for one in report.proof.compared} == {1e-4}
    assert all(one.difference <= 1e-4 < one.largest for one in report.proof.compared)
    assert {(one.tokens, one.how) for one in report.proof.compared} >= {
        *((tokens, "alone") for tokens in (1, 2, 7, 40, 64)),
        *((tokens, "in a batch padded on the left") for tokens in (1, 2, 7, 40, 64)),
        (64, "with a cache"),
        (7, "in a batch padded on the right"),
    }
    assert not [one for one in report.proof.parted if not one.near]
    running, prompt = session(tmp_path / "out"), ids(33)
    wanted = said_by_transformers(folder, prompt)
    np.testing.assert_allclose(said(running, prompt[None])[0][0], wanted, rtol=0, atol=1e-4)
    first, cache = said(running, prompt[None, :5])
    second, cache = said(running, prompt[None, 5:6], cache=cache)
    third, _ = said(running, prompt[None, 6:], cache=cache)
    np.testing.assert_allclose(np.concatenate((first, second, third), 1)[0], wanted, rtol=0, atol=1e-4)


def test_the_folder_is_what_transformers_js_and_genai_look_for(tokenizer, tmp_path):
    folder = gguf_models.save(tokenizer, tmp_path, num_key_value_heads=2)
    export_onnx(folder, out=tmp_path / "out")
    found = sorted(str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*") if file.is_file())
    assert found == [
        "chat_template.jinja", "config.json", "genai_config.json", "generation_config.json", "onnx/model.onnx",
        "parity.json", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    running = session(tmp_path / "out")
    parts = [f"{layer}.{part}" for layer in range(2) for part in ("key", "value")]
    assert [one.name for one in running.get_inputs()] == [
        "input_ids", "attention_mask", "position_ids", *(f"past_key_values.{part}" for part in parts)
    ]  # fmt: skip
    assert [one.name for one in running.get_outputs()] == ["logits", *(f"present.{part}" for part in parts)]
    assert running.get_inputs()[3].shape == ["batch", 2, "past", 16]
    assert running.get_outputs()[1].shape == ["batch", 2, "total", 16]
    assert running.get_outputs()[0].shape == ["batch", "sequence", 384]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["transformers.js_config"]["dtype"] == "fp32"
    words = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert words["chat_template"] == tokenizer.chat_template
    theirs = PlainTokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert theirs.encode("what it said there").ids == tokenizer.encode("what it said there")


def test_standard_operators_alone_are_in_the_graph_and_one_table_where_the_head_is_tied(tokenizer, tmp_path):
    export_onnx(gguf_models.save(tokenizer, tmp_path), out=tmp_path / "out")
    model = onnx.load(tmp_path / "out" / "onnx" / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert [(one.domain, one.version) for one in model.opset_import] == [("", 18)]
    assert [one.name for one in model.graph.initializer if 384 in one.dims] == ["model.embed_tokens.weight"]


def test_weights_beside_a_large_graph_lie_in_its_folder(tokenizer, ids, tmp_path):
    folder = gguf_models.save(tokenizer, tmp_path)
    export_onnx(folder, out=tmp_path / "one")
    export_onnx(folder, out=tmp_path / "two", data_bytes=1000)
    assert {file.name for file in (tmp_path / "two" / "onnx").iterdir()} == {"model.onnx", "model.onnx_data"}
    (tmp_path / "two").rename(tmp_path / "moved")
    one, two = (said(session(tmp_path / place), ids(9)[None])[0] for place in ("one", "moved"))
    np.testing.assert_array_equal(one, two)
    settings = json.loads((tmp_path / "moved" / "config.json").read_text())["transformers.js_config"]
    assert settings["use_external_data_format"] == {"model.onnx": 1}


def test_what_lies_where_one_stands_does_not_matter(tokenizer, tmp_path, monkeypatch):
    folder = gguf_models.save(tokenizer, tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "model.onnx_data").write_bytes(b"of another model")
    monkeypatch.chdir(tmp_path / "here")
    export_onnx(folder, out=tmp_path / "out", data_bytes=1000)
    assert (tmp_path / "out" / "onnx" / "model.onnx_data").stat().st_size > 10**5
    assert (tmp_path / "here" / "model.onnx_data").read_bytes() == b"of another model"


GROWTH = """
from pathlib import Path
from modicum.exchange.onnx_graph import decoder_graph
from modicum.exchange.onnx_nodes import onnx_library
from modicum.exchange.onnx_weights import onnx_tensors
from modicum.model import Decoder, ModelConfig

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))

onnx_library()
sizes = {"hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 1024}
config = ModelConfig(vocab_size=384, max_position_embeddings=64, **sizes)
weights = Decoder(config).state_dict()
before = peak()
graph = decoder_graph(config, onnx_tensors(weights, "fp32"), "fp32")
print((peak() - before) / sum(weight.nbytes for weight in weights.values()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="the system does not tell a peak of memory")
def test_a_graph_holds_its_weights_once():
    told = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True)
    assert 0.5 < float(told.stdout) < 1.7


@pytest.mark.parametrize("tied", [True, False])
def test_eight_bits_are_a_quarter_of_the_size_and_measured(tied, tokenizer, tmp_path):
    sizes = {"tie_word_embeddings": tied, "hidden_size": 80, "num_key_value_heads": 2, "head_dim": 20}  # 2.5 blocks
    folder = gguf_models.save(tokenizer, tmp_path, **sizes)
    report = export_onnx(folder, quant="int8", out=tmp_path / "out", limits=WIDE)
    assert report.file == "onnx/model_int8.onnx"
    assert report.cost.disk_bytes < 0.5 * report.full.disk_bytes
    assert min(report.cost.tokens_per_second, report.full.tokens_per_second, report.cost.load_seconds) > 0
    assert 0 < report.proof.prompts.mean_kl < 0.05
    assert report.proof.judged.bits_per_byte == pytest.approx(report.proof.judged.full_bits_per_byte, rel=0.05)
    assert {one.allowed for one in report.proof.compared if one.how == "alone"} == {None}
    assert not (tmp_path / "out" / "full").exists()
    domains = [one.domain for one in onnx.load(tmp_path / "out" / report.file).opset_import]
    assert domains == ["", "com.microsoft"]


def test_the_speed_is_that_of_the_last_answer(tmp_path, monkeypatch):
    nothing = SimpleNamespace(get_inputs=list, get_outputs=list)
    runtime = SimpleNamespace(SessionOptions=SimpleNamespace, InferenceSession=lambda *_, **__: nothing)
    monkeypatch.setattr(onnx_child, "onnxruntime", runtime)
    monkeypatch.setattr(onnx_child, "_go_on", lambda _, text, steps: time.sleep(text[0]) or [0] * steps)
    request = {"model": "none", "threads": 1, "runs": [], "begun": [[0.5], [0.1]], "steps": 20}
    (tmp_path / "request.json").write_text(json.dumps(request))
    onnx_child.main(tmp_path)
    found = json.loads((tmp_path / "facts.json").read_text())["tokens_per_second"]
    assert found == pytest.approx(20 / 0.1, rel=0.3)


def test_half_precision_has_its_keys_and_values_in_it_too(tokenizer, tmp_path):
    folder = gguf_models.save(tokenizer, tmp_path, initializer_range=0.1)
    report = export_onnx(folder, quant="fp16", out=tmp_path / "out", limits=WIDE)
    kinds = {one.name: one.type for one in session(tmp_path / "out", report.file).get_outputs()}
    assert kinds["present.1.key"] == "tensor(float16)"
    assert kinds["logits"] == "tensor(float)"
    assert 0 < report.proof.prompts.mean_kl < 1e-3


def test_numbers_are_at_most_half_a_step_off_their_block():
    draw = np.random.default_rng(0)
    weight = draw.normal(size=(5, 70)).astype(np.float32) * draw.uniform(0.01, 10, (5, 1)).astype(np.float32)
    weight[1] = 0
    values, scales = rounded(weight)
    assert values.shape == (5, 3, 32)
    assert scales.shape == (5, 3)
    again = ((values.astype(np.float64) - 128) * scales[..., None]).reshape(5, 96)
    steps = np.repeat(np.abs(np.pad(weight, ((0, 0), (0, 26))).reshape(5, 3, 32)).max(-1) / 127, 32, axis=1)
    assert (np.abs(again[:, :70] - weight) <= 0.5001 * steps[:, :70]).all()
    assert (again[:, 70:] == 0).all()
    assert (values[1] == 128).all()


@pytest.mark.parametrize("changes", [{"num_key_value_heads": 2}, {"qk_norm": True}], ids=["llama", "qwen3"])
def test_genai_goes_on_as_the_decoder_does_without_a_cache(changes, tokenizer, tmp_path):
    folder = gguf_models.save(tokenizer, tmp_path, **changes)
    export_onnx(folder, out=tmp_path / "out")
    checkpoint = load_checkpoint(folder)
    model, ids = checkpoint.model(), tokenizer.encode("A model that comes")
    running = genai.Model(str(tmp_path / "out"))
    params = genai.GeneratorParams(running)
    params.set_search_options(max_length=len(ids) + 20)
    going = genai.Generator(running, params)
    going.append_tokens(np.array(ids, dtype=np.int32))
    while not going.is_done():
        going.generate_next_token()
    with torch.no_grad():
        for _ in range(20):
            if ids[-1] not in checkpoint.stop_ids:
                ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert [int(token) for token in going.get_sequence(0)] == ids


def test_what_quantizing_costs_is_measured_and_a_limit_refuses(tokenizer, tmp_path):
    folder = gguf_models.save(tokenizer, tmp_path)
    with pytest.raises(UserError, match=r"model_int8\.onnx: onnxruntime does not .*\n  mean KL .*, allowed 1e-09"):
        export_onnx(folder, quant="int8", out=tmp_path / "out", limits=Limits(1e-9, 10, 0))
    assert not (tmp_path / "out").exists()


def test_a_number_beyond_half_precision_is_refused(tokenizer, tmp_path, monkeypatch):
    loaded = load_checkpoint(gguf_models.save(tokenizer, tmp_path))
    loaded.weights["model.layers.0.mlp.up_proj.weight"][3, 5] = 1e5
    monkeypatch.setattr(onnx_exporting, "load_checkpoint", lambda _: loaded)
    with pytest.raises(UserError, match=r"up_proj\.weight: holds 1e\+05, more than half precision reaches"):
        export_onnx(tmp_path, quant="fp16", out=tmp_path / "out")


def test_a_missing_library_is_told_with_its_pip_line(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(UserError, match=r"pip install 'modicum\[onnx\]'"):
        export_onnx(gguf_models.save(tokenizer, tmp_path), out=tmp_path / "out")


def test_a_checkpoint_in_bfloat16_and_a_short_context_go_out_too(tokenizer, tmp_path):
    sizes = {"dtype": torch.bfloat16, "chat": False, "max_position_embeddings": 3}
    report = export_onnx(gguf_models.save(tokenizer, tmp_path, **sizes), out=tmp_path / "out")
    assert report.proof.continuations == 0  # no room for one


def test_the_largest_difference_of_a_logit_is_a_setting(tokenizer, tmp_path):
    folder = gguf_models.save(tokenizer, tmp_path)
    with pytest.raises(UserError, match=r"a prompt of 40 tokens alone: .* allowed 1e-09 \(--max-difference\)"):
        export_onnx(folder, out=tmp_path / "out", limits=replace(ONNX_LIMITS["fp32"], logit=1e-9))
    report = export_onnx(folder, out=tmp_path / "out", limits=replace(ONNX_LIMITS["fp32"], logit=1e-2))
    assert report.proof.judged.quality.margin == 0.01


@pytest.mark.slow
def test_the_gate_of_onnx_as_it_is(tokenizer, tmp_path, monkeypatch):
    monkeypatch.undo()  # of brief_gate
    folder = gguf_models.save(tokenizer, tmp_path, max_position_embeddings=300)
    proof = export_onnx(folder, out=tmp_path / "out").proof
    assert (proof.strings, proof.judged.texts, proof.judged.quality.positions) == (10_000, 50, 3200)
    assert (proof.continuations, proof.steps) == (8, 64)
    assert [one.tokens for one in proof.compared if one.how == "alone"] == [1, 2, 7, 40, 300]
