import json

import gguf_models
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from modicum.checkpoint import load_checkpoint
from modicum.exchange import Limits, export_hf, hf_exporting, size_of
from modicum.exchange.layouts import relaid
from modicum.store import Stage, UserError, hash_file, hash_json, write_manifest

pytestmark = pytest.mark.usefixtures("brief_gate")
FLAVOURS = {
    "LlamaForCausalLM": {"num_key_value_heads": 2, "tie_word_embeddings": False, "attention_bias": True},
    "Qwen3ForCausalLM": {"qk_norm": True, "head_dim": 24, "num_key_value_heads": 2},
}
WIDE = Limits(10, 10, 0)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_transformers_says_of_the_shards_what_it_says_of_the_checkpoint(
    flavour, tokenizer, ids, said_by_transformers, tmp_path
):
    folder = gguf_models.save(tokenizer, tmp_path, **FLAVOURS[flavour])
    report = export_hf(folder, shard_bytes=60_000, out=tmp_path / "out")
    assert report.architecture == AutoConfig.from_pretrained(tmp_path / "out").architectures[0] == flavour
    assert len(report.files) > 2
    assert report.files == tuple(sorted(file.name for file in (tmp_path / "out").glob("*.safetensors")))
    found, wanted = said_by_transformers(tmp_path / "out", ids(33)), said_by_transformers(folder, ids(33))
    np.testing.assert_array_equal(found, wanted)
    assert all(one.difference <= one.allowed for one in report.compared)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs("what it said there").input_ids == tokenizer.encode("what it said there")
    assert theirs.chat_template == tokenizer.chat_template


def test_shards_are_at_most_so_large_and_together_what_the_index_says(tokenizer, tmp_path):
    folder = gguf_models.save(tokenizer, tmp_path)
    export_hf(folder, dtype="bf16", shard_bytes=60_000, out=tmp_path / "out", limits=WIDE)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    weights = load_checkpoint(folder).weights
    found = {}
    for file in sorted((tmp_path / "out").glob("*.safetensors")):
        part = load_file(file)
        assert {index["weight_map"][name] for name in part} == {file.name}
        assert sum(tensor.nbytes for tensor in part.values()) <= 60_000
        found |= part
    assert found.keys() == weights.keys() == index["weight_map"].keys()
    assert all(torch.equal(found[name], weights[name].bfloat16()) for name in weights)
    assert index["metadata"]["total_size"] == sum(weight.nbytes for weight in weights.values()) // 2


@pytest.mark.parametrize(("dtype", "kind"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_config_names_the_type_that_the_weights_have_and_it_is_judged_in(
    dtype, kind, tokenizer, tmp_path, monkeypatch
):
    asked, speaker = [], hf_exporting.decoder_speaker

    def watched(weights, config, dtype=torch.float32):
        asked.append(dtype)
        return speaker(weights, config, dtype)

    monkeypatch.setattr(hf_exporting, "decoder_speaker", watched)
    folder = gguf_models.save(tokenizer, tmp_path)
    report = export_hf(folder, dtype=dtype, out=tmp_path / "out", limits=WIDE)
    assert asked == [torch.float32, torch.float32, kind]
    assert report.files == ("model.safetensors",)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == kind
    assert report.bytes < 0.6 * report.checkpoint_bytes
    assert 0 < report.judged.quality.mean_kl < 0.01
    written = json.loads((tmp_path / "out" / "parity.json").read_text())["judged"]
    assert written["quality"]["mean_kl"] == report.judged.quality.mean_kl
    assert written["bits_per_byte"] == pytest.approx(written["full_bits_per_byte"], rel=0.01)


def test_a_training_step_of_transformers_learns_from_it(tokenizer, tmp_path):
    folder = gguf_models.save(tokenizer, tmp_path, qk_norm=True, initializer_range=0.02)
    export_hf(folder, out=tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    row = theirs("A model that comes from elsewhere says what it said there.").input_ids
    rows = [{"input_ids": row, "labels": row}] * 8
    settings = TrainingArguments(
        tmp_path / "trained", max_steps=4, learning_rate=0.02, per_device_train_batch_size=2, report_to="none",
        logging_steps=1, save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=settings, train_dataset=rows, processing_class=theirs)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert abs(losses[0] - np.log(384)) < 0.5  # an untrained model's, and so labels are shifted once
    assert losses[-1] < 0.8 * losses[0]


@pytest.fixture
def run(tokenizer, tmp_path):
    """A run's folder with a chat model that was evaluated, and its checkpoint."""
    folder = gguf_models.save(tokenizer, tmp_path / "mine" / "sft" / "checkpoints")
    write_manifest(folder)
    run = tmp_path / "mine"
    (run / "recipe.yaml").write_text("name: mine\n")
    for name, content in {
        "evaluate/manifest.json": {"inputs": {"chat": hash_file(folder / "manifest.json")}},
        "evaluate/results.json": {
            "heldout": {
                "chat": {
                    "total": {"bits_per_byte": 1.5, "low": 1.25, "high": 1.75},
                    "domains": {
                        "tales": {"bits_per_byte": 2.5, "low": 2.0, "high": 3.0},
                        "one letter": {"bits_per_byte": 3.5, "low": None, "high": None},
                    },
                }
            },
            "choices": {"chat": {"n": 40, "accuracy": 0.5, "low": 0.375, "high": 0.625, "chance": 0.25}},
            "answers": {"chat": {"stop_rate": 0.75, "max_new_tokens": 64}},
        },
        "corpus/text/report.json": {
            "sources": [{"name": "books", "licences": {"CC0-1.0": {"documents": 1200, "bytes": 3_500_000}}}]
        },
    }.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(json.dumps(content))
    base = run / "pretrain" / "checkpoints" / "step-00000005"
    for place in (run / "corpus" / "text", run / "shards" / "train", run / "shards" / "heldout", base):
        place.mkdir(parents=True, exist_ok=True)
        (place / "manifest.json").write_text(json.dumps({"files": str(place)}))
    (base.parent / "last").symlink_to(base.name)
    shards = {split: hash_file(run / "shards" / split / "manifest.json") for split in ("train", "heldout")}
    finish(run / "shards", corpus=hash_file(run / "corpus" / "text" / "manifest.json"))
    finish(run / "pretrain", shards=hash_json(shards))
    finish(run / "sft", base=hash_file(base / "manifest.json"))
    return run, folder


def finish(stage, **inputs):
    with Stage(stage).record(inputs, code_version="1", seed=0, device=lambda: "cpu"):
        pass


def texts_of_card(folder, out):
    export_hf(folder, out=out)
    return (out / "README.md").read_text().partition("## Texts it was trained on\n")[2]


@pytest.mark.parametrize("why", ["another corpus by now", "no update was made", "the tuning is not finished"])
def test_a_card_names_no_licences_of_texts_that_were_perhaps_not_learned(why, run, tmp_path):
    path, folder = run
    checkpoints = path / "pretrain" / "checkpoints"
    if why == "another corpus by now":
        (path / "corpus" / "text" / "manifest.json").write_text("{}")
    elif why == "no update was made":
        (checkpoints / "step-00000005").rename(checkpoints / "step-00000000")
        (checkpoints / "last").unlink()
        (checkpoints / "last").symlink_to("step-00000000")
    else:
        (path / "sft" / "manifest.json").unlink()
    told = texts_of_card(folder, tmp_path / "out")
    assert "books" not in told
    assert "name their licences before it is given to others" in told


def test_a_card_says_what_comes_on_top_of_the_corpus(run, tokenizer, tmp_path):
    path, folder = run
    told = texts_of_card(folder, tmp_path / "chat")
    assert "tuned on conversations" in told
    assert "began as another model" not in told
    finish(path / "tokenizer", **{"model.checkpoint": "its hash"})
    base = gguf_models.save(tokenizer, path / "pretrain" / "checkpoints")
    finish(path / "sft", base=hash_file(base / "manifest.json"))
    told = texts_of_card(base, tmp_path / "base")
    assert "| books | CC0-1.0 |" in told
    assert "tuned on conversations" not in told
    assert "began as another model" in told


def test_the_card_has_the_evaluation_and_the_licences_of_the_run(run, tmp_path):
    report = export_hf(run[1], out=tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert report.evaluated
    assert card.startswith("---\nlibrary_name: transformers\n")
    for line in (
        "# mine (chat)",
        "| held-out text, bits per byte (lower is better) | 1.500 (1.250 to 1.750) |",
        "| - tales | 2.500 (2.000 to 3.000) |",
        "| - one letter | 3.500 |",
        "| multiple choice, 40 questions (chance 25.0%) | 50.0% (37.5% to 62.5%) |",
        "| answers that end within 64 tokens | 75.0% |",
        "| books | CC0-1.0 | 1,200 | 3.50 MB |",
        f"| parameters | {report.parameters:,} |",
    ):
        assert line in card.splitlines()
    assert "Measured at full precision" not in card
    export_hf(run[1], dtype="bf16", out=tmp_path / "rounded", limits=WIDE)
    assert "Measured at full precision" in (tmp_path / "rounded" / "README.md").read_text()


def test_a_card_tells_nothing_of_a_checkpoint_that_was_not_the_one_evaluated(run, tmp_path):
    folder = run[0]
    (folder / "evaluate" / "manifest.json").write_text('{"inputs": {"chat": "another"}}')
    assert not export_hf(run[1], out=tmp_path / "out").evaluated
    assert "No evaluation of this checkpoint lies with it." in (tmp_path / "out" / "README.md").read_text()


def test_a_checkpoint_without_a_run_asks_for_the_licences(tokenizer, tmp_path):
    export_hf(gguf_models.save(tokenizer, tmp_path), out=tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "name their licences before it is given to others" in card
    assert "A language model handed on by modicum." in card, "no training lies with it"


def _swapped(name):
    return name.replace("layers.0.", "layers.x.").replace("layers.1.", "layers.0.").replace("layers.x.", "layers.1.")


def _interleaved(weights):
    return relaid(weights, head_dim=16, source="half", target="interleaved")


EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda weights: {_swapped(name): weight for name, weight in weights.items()},
         "model.layers.0.mlp.up_proj.weight: holds the numbers of model.layers.1.mlp.up_proj.weight"),
        (_interleaved, "model.layers.1.self_attn.q_proj.weight: its rows are in the interleaved rotary layout"),
        (lambda weights: {**weights, "lm_head.weight": weights[EMBEDDING].clone()}, "lm_head.weight: left over"),
        (lambda weights: {**weights, EMBEDDING: weights[EMBEDDING][:-1]},
         "model.embed_tokens.weight: has shape [383, 64], should have [384, 64]"),
        (lambda weights: {**weights, "model.norm.weight": weights["model.norm.weight"].half()},
         "model.norm.weight: is torch.float16, should be torch.float32"),
        (lambda weights: {**weights, "model.norm.weight": weights["model.norm.weight"] + 1e-7},
         "model.norm.weight: differs from the checkpoint's"),
    ],
    ids=["layers", "rotary", "head", "vocabulary", "type", "a bit"],
)  # fmt: skip
def test_weights_that_are_not_the_checkpoints_are_refused_by_name(change, told, tokenizer, tmp_path, monkeypatch):
    write = hf_exporting.in_shards

    def damaged(file, most):
        save_file({name: weight.contiguous() for name, weight in change(load_file(file)).items()}, file)
        return write(file, most)

    monkeypatch.setattr(hf_exporting, "in_shards", damaged)
    folder = gguf_models.save(tokenizer, tmp_path)
    with pytest.raises(UserError) as refusal:
        export_hf(folder, out=tmp_path / "out")
    assert told in str(refusal.value)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.parametrize(
    ("file", "change", "told"),
    [
        ("generation_config.json", lambda text: text.replace("3,", "5,"), r"eos_token_id is \[5, 0\], .* \[3, 0\]"),
        ("config.json", lambda text: text.replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 1e-06'), "another model"),
        ("chat_template.jinja", lambda text: text + " ", "chat_template.jinja: is not the checkpoint's"),
    ],
)
def test_words_that_are_not_the_checkpoints_are_refused_by_name(file, change, told, tokenizer, tmp_path, monkeypatch):
    write = hf_exporting.write_model

    def damaged(folder, **given):
        write(folder, **given)
        text = (folder / file).read_text()
        assert change(text) != text
        (folder / file).write_text(change(text))

    monkeypatch.setattr(hf_exporting, "write_model", damaged)
    with pytest.raises(UserError, match=told):
        export_hf(gguf_models.save(tokenizer, tmp_path), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_rounding_costs_is_measured_and_a_limit_refuses(tokenizer, tmp_path):
    with pytest.raises(UserError, match=r"its number type costs too much.*\n  mean KL divergence .*, allowed 1e-09"):
        export_hf(gguf_models.save(tokenizer, tmp_path), dtype="bf16", out=tmp_path / "out", limits=Limits(1e-9, 10, 0))


def test_of_weights_that_were_not_rounded_no_rounding_is_told(tokenizer, tmp_path):
    with pytest.raises(UserError, match="does not say what the checkpoint says, and it was not written") as told:
        export_hf(gguf_models.save(tokenizer, tmp_path), out=tmp_path / "out", limits=Limits(-1, 10, 0))
    assert "rounding" not in str(told.value)
    assert "--" not in str(told.value)


def test_a_number_beyond_half_precision_is_refused_with_its_tensor(tokenizer, tmp_path, monkeypatch):
    folder = gguf_models.save(tokenizer, tmp_path)
    loaded = load_checkpoint(folder)
    loaded.weights["model.layers.0.mlp.up_proj.weight"][3, 5] = 1e5
    monkeypatch.setattr(hf_exporting, "load_checkpoint", lambda _: loaded)
    with pytest.raises(UserError, match=r"model\.layers\.0\.mlp\.up_proj\.weight: numbers beyond float16"):
        export_hf(folder, dtype="fp16", out=tmp_path / "out")


def test_sizes_are_read_as_they_are_written():
    assert [size_of(text) for text in ("5GB", "200 mb", "2MiB")] == [5 * 10**9, 2 * 10**8, 2**21]
    for text in ("5", "GB", "0GB", "-1GB", "1.5GB"):
        with pytest.raises(UserError, match="expected a number and a unit"):
            size_of(text)
