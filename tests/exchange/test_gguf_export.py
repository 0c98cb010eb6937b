import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import gguf
import gguf_models
import numpy as np
import pytest
import torch

from modicum.checkpoint import load_checkpoint
from modicum.cli.parity_table import export_lines
from modicum.evaluate import beside
from modicum.exchange import (
    LIMITS,
    Limits,
    Scope,
    export_gguf,
    export_hf,
    export_onnx,
    gguf_exporting,
    gguf_runtime,
    onnx_exporting,
    onnx_runtime,
)
from modicum.exchange.gguf_runtime import ask
from modicum.exchange.gguf_weights import file_tensors
from modicum.store import UserError

pytestmark = pytest.mark.usefixtures("brief_gate")
FAST = ("grouped, untied", "QK-norm", "yarn of its own sharpness", "llama3")


@pytest.mark.parametrize(
    "shape", [shape if shape in FAST else pytest.param(shape, marks=pytest.mark.slow) for shape in gguf_models.SHAPES]
)
def test_llama_cpp_says_of_every_shape_what_the_checkpoint_says(shape, tokenizer, tmp_path):
    folder = gguf_models.save(tokenizer, tmp_path, **gguf_models.SHAPES[shape])
    report = export_gguf(folder, out=tmp_path / "out")
    assert [one.tokens for one in report.proof.compared] == [1, 2, 7, 40, 64]
    assert all(one.difference <= 1e-3 < one.largest for one in report.proof.compared)
    assert report.proof.judged.quality.positions == 6 * 12
    assert report.proof.judged.quality.clear_differing == 0
    assert report.proof.continuations == 6
    assert report.proof.parted == ()
    assert report.notes == ()
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["model-f32.gguf", "parity.json"]
    written = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert written["proof"]["compared"][3]["tokens"] == 40
    assert written["cost"] == written["full"]
    assert written["cost"]["disk_bytes"] == (tmp_path / "out" / "model-f32.gguf").stat().st_size


@pytest.mark.parametrize("shape", ["grouped, untied", pytest.param("QK-norm", marks=pytest.mark.slow)])
def test_the_file_alone_says_what_transformers_says(shape, tokenizer, ids, said_by_transformers, tmp_path):
    folder = gguf_models.save(tokenizer, tmp_path, **gguf_models.SHAPES[shape])
    export_gguf(folder, out=tmp_path / "out")
    found = ask(tmp_path / "out" / "model-f32.gguf", prompts=[ids(33)]).logits[0]
    np.testing.assert_allclose(found, said_by_transformers(folder, ids(33)), rtol=0, atol=1e-3)


def test_the_keys_are_the_models(tokenizer, tmp_path):
    folder = gguf_models.save(tokenizer, tmp_path, vocab_size=448, num_key_value_heads=2, rope_theta=5000.0)
    export_gguf(folder, out=tmp_path / "out")
    fields = gguf.GGUFReader(tmp_path / "out" / "model-f32.gguf").fields
    said = {key: field.contents() for key, field in fields.items()}
    wanted = {
        "general.architecture": "llama", "llama.context_length": 64, "llama.embedding_length": 64,
        "llama.block_count": 2, "llama.feed_forward_length": 96, "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2, "llama.rope.freq_base": 5000.0, "llama.rope.dimension_count": 16,
        "llama.vocab_size": 448, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.eos_token_id": tokenizer.eot_id, "tokenizer.ggml.padding_token_id": tokenizer.pad_id,
        "tokenizer.ggml.eot_token_id": tokenizer.end_of_turn_id, "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": tokenizer.chat_template,
    }  # fmt: skip
    assert {key: said[key] for key in wanted} == wanted
    tokens, kinds = said["tokenizer.ggml.tokens"], said["tokenizer.ggml.token_type"]
    assert len(tokens) == len(kinds) == len(set(tokens)) == 448
    assert tokens[:2] == ["<|endoftext|>", "<|pad|>"]
    assert kinds[:2] == [3, 3]  # control
    assert kinds[tokenizer.encode("e")[0]] == 1  # text
    assert set(kinds[384:]) == {5}  # unused


@pytest.mark.parametrize(("quant", "kind"), [("f16", "F16"), ("bf16", "BF16"), ("q8_0", "Q8_0"), ("q4_0", "Q4_0")])
def test_matrices_take_the_type_and_norms_stay_float32(quant, kind, tokenizer, tmp_path):
    folder = gguf_models.save(tokenizer, tmp_path, tie_word_embeddings=False)
    report = export_gguf(folder, quant=quant, out=tmp_path / "out", limits=Limits(10, 10, 0))
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "out" / f"model-{quant}.gguf").tensors}
    apart = {"token_embd.weight", "output.weight"} if quant == "q4_0" else set()
    for name, tensor in found.items():
        wanted = "F32" if "norm" in name else "Q8_0" if name in apart else kind
        assert tensor.tensor_type.name == wanted, name
    assert {name for name, _, _ in report.fallbacks} == apart
    ours = load_checkpoint(folder).weights["model.layers.1.mlp.down_proj.weight"]
    written = found["blk.1.ffn_down.weight"]
    again = torch.from_numpy(gguf.dequantize(written.data, written.tensor_type))
    share = {"f16": 2**-11, "bf16": 2**-8, "q8_0": 1 / 254, "q4_0": 1 / 8}[quant]
    assert float((again - ours).abs().max()) <= 1.2 * share * float(ours.abs().max())


@pytest.mark.parametrize("quant", ["q4_k", pytest.param("q5_k", marks=pytest.mark.slow), "q6_k"])
def test_k_quants_are_those_of_ggml_as_the_gguf_package_reads_them(quant, tokenizer, tmp_path):
    sizes = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 288, "tie_word_embeddings": False}
    folder = gguf_models.save(tokenizer, tmp_path, num_hidden_layers=1, **sizes)
    report = export_gguf(folder, quant=quant, out=tmp_path / "out", limits=Limits(10, 10, 0))
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "out" / f"model-{quant}.gguf").tensors}
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
    }
    weights = load_checkpoint(folder).weights
    for name, ours in names.items():
        tensor = found[name]
        kind = "Q6_K" if name == "token_embd.weight" else quant.upper()
        assert tensor.tensor_type.name == kind
        off = np.abs(gguf.dequantize(tensor.data, tensor.tensor_type) - weights[ours].numpy()).max()
        assert off <= {"Q4_K": 1 / 8, "Q5_K": 1 / 16, "Q6_K": 1 / 24}[kind] * float(weights[ours].abs().max())
    others = dict.fromkeys(["blk.0.ffn_down.weight"], ("q8_0", "rows of 288 numbers, not a multiple of 256"))
    if quant != "q6_k":
        reason = "the embedding and the head stay at six bits"
        others |= dict.fromkeys(["token_embd.weight", "output.weight"], ("q6_k", reason))
    assert {name: (kind, reason) for name, kind, reason in report.fallbacks} == others


def test_rounded_weights_are_measured_on_the_prompts_too_and_no_difference_is_allowed(tokenizer, tmp_path):
    folder = gguf_models.save(tokenizer, tmp_path)
    proof = export_gguf(folder, quant="q8_0", out=tmp_path / "out", limits=Limits(0.1, 1.0, 0.8)).proof
    assert proof.prompts.positions == 1 + 2 + 7 + 40 + 64
    assert {one.allowed for one in proof.compared} == {None}
    assert json.loads((tmp_path / "out" / "parity.json").read_text())["proof"]["prompts"]["agreement"] >= 0.8


def test_what_a_file_costs_in_llama_cpp_stands_beside_float32(tokenizer, tmp_path):
    folder = gguf_models.save(tokenizer, tmp_path, vocab_size=384)
    report = export_gguf(folder, quant="q8_0", out=tmp_path / "out", limits=Limits(10, 10, 0))
    assert report.cost.disk_bytes == (tmp_path / "out" / "model-q8_0.gguf").stat().st_size < report.full.disk_bytes
    for cost in (report.cost, report.full):
        assert min(cost.load_seconds, cost.tokens_per_second) > 0
        assert cost.memory_bytes > 1e6
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["model-q8_0.gguf", "parity.json"]


def test_the_speed_is_that_of_the_second_answer(tokenizer, tmp_path, monkeypatch):
    times = {"load_seconds": 1.0, "memory_bytes": 1, "peak_bytes": 1}
    monkeypatch.setattr(
        gguf_exporting, "timed", lambda *_, repeats, **__: {**times, "decode": [0.5, 9.0, 9.0][:repeats]}
    )
    report = export_gguf(gguf_models.save(tokenizer, tmp_path), out=tmp_path / "out")
    assert report.cost.tokens_per_second == 63 / 0.5


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), UserError("llama.cpp crashed on it")])
@pytest.mark.parametrize(
    ("module", "writer", "export", "quant"),
    [(gguf_exporting, "write_gguf", export_gguf, "q8_0"), (onnx_exporting, "write_graph", export_onnx, "int8")],
)
def test_a_proven_file_is_kept_where_float32_beside_it_does_not_fit(
    module, writer, export, quant, fault, tokenizer, tmp_path, monkeypatch
):
    write = getattr(module, writer)

    def full(file, *given, **named):
        if "full" in str(file.relative_to(tmp_path)):
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(b"half")
            raise fault
        return write(file, *given, **named)

    monkeypatch.setattr(module, writer, full)
    report = export(gguf_models.save(tokenizer, tmp_path), quant=quant, out=tmp_path / "out", limits=Limits(10, 10, 0))
    assert report.full is None
    assert str(fault) in report.notes[0]
    assert json.loads((tmp_path / "out" / "parity.json").read_text())["full"] is None
    assert not list((tmp_path / "out").glob("full*"))
    assert any(str(fault) in line for line in export_lines(tmp_path, report))


@pytest.mark.parametrize(("export", "quant"), [(export_gguf, "q8_0"), (export_onnx, "int8")])
def test_what_float32_costs_is_not_measured_where_memory_is_short(export, quant, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(beside, "free_memory", lambda: 1000)
    report = export(gguf_models.save(tokenizer, tmp_path), quant=quant, out=tmp_path / "out", limits=Limits(10, 10, 0))
    assert report.full is None
    assert re.search(r"not measured: it takes about 0\.\d\d GB of memory, and 0\.00 GB are free", report.notes[0])


WIDE_ROWS = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("export", "runtime", "quant"), [(export_gguf, gguf_runtime, "q4_k"), (export_onnx, onnx_runtime, "fp32")]
)
def test_large_files_pass_through_the_folder_that_is_being_written(
    export, runtime, quant, tokenizer, tmp_path, monkeypatch
):
    run, large = runtime.run_child, set()

    def noting(program, given, **named):
        ended = run(program, given, **named)
        large.update(Path(given[-1]).glob("*.npy"))
        return ended

    monkeypatch.setattr(runtime, "run_child", noting)
    folder = gguf_models.save(tokenizer, tmp_path, **WIDE_ROWS)
    export(folder, quant=quant, out=tmp_path / "out", limits=Limits(10, 10, 0))
    assert {"logits-0.npy", *(["0.npy", "0.out.npy"] if quant == "q4_k" else [])} <= {file.name for file in large}
    assert all(file.is_relative_to(tmp_path / ".tmp-out") for file in large)
    assert not list((tmp_path / "out").glob("modicum-*"))


@pytest.mark.parametrize(("quant", "file"), [("f32", r"model-f32\.gguf"), ("q4_k", r"\d+\.npy")])
def test_a_disk_that_is_full_is_told_with_the_file(quant, file, full_at, tokenizer, tmp_path):
    folder = gguf_models.save(tokenizer, tmp_path, **WIDE_ROWS)
    with full_at(100_000), pytest.raises(UserError, match=rf"{file}: could not be written .*; make room on the disk"):
        export_gguf(folder, quant=quant, out=tmp_path / "out", limits=Limits(10, 10, 0))
    assert not (tmp_path / "out").exists()


def test_limits_grow_with_what_is_thrown_away():
    kinds = ["f32", "f16", "bf16", "q8_0", "q6_k", "q5_k", "q4_k", "q4_0"]
    assert [*LIMITS] == kinds
    assert [LIMITS[kind].mean_kl for kind in kinds] == sorted(LIMITS[kind].mean_kl for kind in kinds)
    assert (LIMITS["q8_0"].mean_kl, LIMITS["q8_0"].agreement) == (0.002, 0.985)
    assert [kind for kind in kinds if LIMITS[kind].logit is not None] == ["f32"]


@pytest.mark.parametrize(("target", "export"), [("gguf", export_gguf), ("onnx", export_onnx), ("hf", export_hf)])
def test_every_target_is_judged_by_the_text_that_is_named(target, export, tokenizer, tmp_path):
    text = tmp_path / "held-out.txt"
    text.write_text("A model that comes from elsewhere says what it said there. " * 200)
    scope = Scope(texts=4, tokens=20, strings=50, continuations=2, steps=4, heldout=text)
    report = export(gguf_models.save(tokenizer, tmp_path), out=tmp_path / "out", scope=scope)
    found = report.judged if target == "hf" else report.proof.judged
    assert (found.texts, found.source, found.quality.positions) == (4, str(text), 80)
    assert found.bits_per_byte == pytest.approx(found.full_bits_per_byte, rel=1e-4)
    assert (report.strings if target == "hf" else report.proof.strings) == 50
    assert json.loads((tmp_path / "out" / "parity.json").read_text())


def test_rows_that_no_block_divides_take_another_type_and_are_named(tokenizer, tmp_path):
    folder = gguf_models.save(tokenizer, tmp_path, intermediate_size=50)
    report = export_gguf(folder, quant="q8_0", out=tmp_path / "out", limits=Limits(10, 10, 0))
    reason = "rows of 50 numbers, not a multiple of 32"
    assert report.fallbacks == tuple((f"blk.{layer}.ffn_down.weight", "f16", reason) for layer in range(2))


def test_a_number_beyond_half_precision_stays_float32(tokenizer, tmp_path):
    folder = gguf_models.save(tokenizer, tmp_path)
    weights = load_checkpoint(folder).weights
    weights["model.layers.0.mlp.up_proj.weight"][3, 5] = 1e5
    tensors = file_tensors(weights, gguf_models.config(), "f16")
    kinds = {tensor.name: (tensor.kind, tensor.fallback) for tensor in tensors}
    assert kinds["blk.0.ffn_up.weight"] == ("f32", "holds 1e+05, more than half precision reaches")
    assert kinds["blk.1.ffn_up.weight"] == ("f16", None)


def test_what_quantizing_costs_is_measured_and_a_limit_refuses(tokenizer, tmp_path):
    folder = gguf_models.save(tokenizer, tmp_path)
    with pytest.raises(
        UserError, match=r"model-q4_0\.gguf: llama\.cpp does not .*\n  mean KL divergence [\d.]+, allow"
    ):
        export_gguf(folder, quant="q4_0", out=tmp_path / "out", limits=Limits(1e-6, 10, 0))
    with pytest.raises(
        UserError, match=r"\n  top-1 agreement [\d.]+%, asked for 100\.00%\n  what is allowed: --max-kl"
    ):
        export_gguf(folder, quant="q4_0", out=tmp_path / "out", limits=Limits(10, 10, 1))
    assert not (tmp_path / "out").exists()


def test_a_float32_file_is_held_to_a_difference_that_its_refusal_names(tokenizer, tmp_path):
    folder = gguf_models.save(tokenizer, tmp_path)
    with pytest.raises(UserError, match=r"logits differ by [\d.e-]+, allowed are 1e-09 \(--max-difference\)"):
        export_gguf(folder, out=tmp_path / "out", limits=replace(LIMITS["f32"], logit=1e-9))
    assert not (tmp_path / "out").exists()


def test_a_wide_limit_leaves_positions_to_judge_by(tokenizer, tmp_path):
    folder = gguf_models.save(tokenizer, tmp_path)
    judged = export_gguf(folder, out=tmp_path / "out", limits=replace(LIMITS["f32"], logit=1.0)).proof.judged
    assert judged.quality.margin == 0.01
    assert judged.quality.clear > 0.98 * judged.quality.positions


@pytest.mark.parametrize("export", [export_gguf, export_onnx])
def test_a_model_that_prefers_nothing_is_not_proven_by_its_first_choices(export, tokenizer, tmp_path):
    folder = gguf_models.save(tokenizer, tmp_path, initializer_range=1e-6)
    with pytest.raises(UserError, match=r"no first choice is ahead by more than 0\.0\d+ at \d+ of \d+ positions"):
        export(folder, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_in_bfloat16_is_exact_in_float32_and_in_bfloat16(tokenizer, tmp_path):
    folder = gguf_models.save(tokenizer, tmp_path, dtype=torch.bfloat16)
    weights = load_checkpoint(folder).weights
    ours = weights["model.embed_tokens.weight"]
    for quant in ("f32", "bf16"):
        found = next(file_tensors({**weights}, gguf_models.config(), quant))
        assert found.name == "token_embd.weight"
        kind = gguf.GGMLQuantizationType[quant.upper()]
        again = gguf.dequantize(found.data.view(np.float32 if quant == "f32" else np.uint8), kind)
        np.testing.assert_array_equal(again, ours.float().numpy())


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"qk_norm": True, "attention_bias": True}, "attention_bias with qk_norm"),
        ({"qk_norm": True, "rope_scaling": gguf_models.LLAMA3}, "rope_scaling llama3 with qk_norm"),
        ({"rope_scaling": {**gguf_models.YARN, "truncate": False}}, "rope_scaling yarn with truncate false"),
    ],
)
def test_what_llama_cpp_has_no_word_for_is_refused_by_name(changes, word, tokenizer, tmp_path):
    folder = gguf_models.save(tokenizer, tmp_path, **changes)
    with pytest.raises(UserError, match=f"step-00000001: GGUF cannot express this model\n  {word}"):
        export_gguf(folder, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_base_model_and_no_template_go_out_too(tokenizer, tmp_path):
    folder = gguf_models.save(tokenizer, tmp_path, chat=False, max_position_embeddings=3)
    report = export_gguf(folder, out=tmp_path / "out")
    note = f"an answer ends at <|im_end|> (id {tokenizer.end_of_turn_id}) in llama.cpp, and goes on in the checkpoint"
    assert report.notes == (note,)
    assert [one.tokens for one in report.proof.compared] == [1, 2, 3]
    assert report.proof.continuations == 0  # no room for one


def test_the_same_checkpoint_gives_the_same_bytes(tokenizer, tmp_path):
    folder = gguf_models.save(tokenizer, tmp_path)
    shutil.copytree(folder, tmp_path / "elsewhere")
    for source, out in ((folder, "first"), (tmp_path / "elsewhere", "second")):
        export_gguf(source, quant="q8_0", out=tmp_path / out, limits=Limits(10, 10, 0))
    first, second = (tmp_path / out / "model-q8_0.gguf" for out in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.slow
def test_the_gate_as_it_is(tokenizer, tmp_path, monkeypatch):
    monkeypatch.undo()  # of brief_gate
    report = export_gguf(gguf_models.save(tokenizer, tmp_path, max_position_embeddings=300), out=tmp_path / "out")
    proof = report.proof
    assert (proof.strings, proof.unicode, proof.judged.texts) == (10_000, "3.2.0", 50)
    assert (proof.judged.quality.positions, proof.continuations, proof.steps) == (3200, 8, 64)
    assert [one.tokens for one in proof.compared] == [1, 2, 7, 40, 300]
    assert all(one.allowed == 1e-3 for one in proof.compared)
