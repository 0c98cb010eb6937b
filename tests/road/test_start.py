"""Runs that begin with a checkpoint, with our own tokenizer or one from elsewhere: shape, weights, tokenizer, ends."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from modicum.checkpoint import load_checkpoint, save_checkpoint
from modicum.corpus import read_documents
from modicum.doctor.examine import examined
from modicum.evaluate import bits_per_byte
from modicum.generate import ChatSession, Generator, SamplingParams
from modicum.model import Decoder, ModelConfig
from modicum.recipe import load_recipe
from modicum.road.context import Silent
from modicum.road.plan import plan
from modicum.road.prepare import HELDOUT, corpus_folder, open_tokenizer
from modicum.road.stages import run
from modicum.store import UserError, hash_file
from modicum.tokenizer import CYBERSLM_TEMPLATE, sentencepiece_tokenizer, train_tokenizer
from modicum.tokenizer.load import template_in
from sentencepiece_models import train

CORPUS = Path(__file__).parents[2] / "data" / "small" / "corpus.jsonl.gz"


def texts():
    with gzip.open(CORPUS, "rt", encoding="utf-8") as lines:
        return [json.loads(next(lines))["text"][:1500] for _ in range(100)]


def tokenizer_of(kind, folder):
    if kind == "own":
        return train_tokenizer(texts(), vocab_size=448, min_frequency=2, sample_bytes=10**6, seed=0)[0]
    path = folder / "tokenizer.model"
    path.write_bytes(train(texts(), vocab_size=450))
    return sentencepiece_tokenizer(path, template=CYBERSLM_TEMPLATE)


def saved(root, tokenizer, seed=3, chat=False):
    """A checkpoint of a small model with random weights; one row more than there are ids, when those are not ours."""
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size + (tokenizer.vocab_size % 64 != 0),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=256,
    )
    model = Decoder(config)
    model.init_weights(seed)
    weights = model.state_dict()
    return save_checkpoint(root, 7, config=config, weights=weights, tokenizer=tokenizer, chat=chat, training=None)


@pytest.fixture(scope="module", params=["own", "sentencepiece"])
def start(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("start")
    return saved(root, tokenizer_of(request.param, root))


@pytest.fixture
def recipe(tiny):
    """A function that writes the tiny recipe so that it begins with a checkpoint."""

    def recipe(start, model=None, **parts):
        path = tiny(**parts)
        values = yaml.safe_load(path.read_text())
        del values["tokenizer"]
        values["model"] = {"checkpoint": str(start), **(model or {})}
        path.write_text(yaml.safe_dump(values))
        return path

    return recipe


def walk(path, *overrides, **how):
    return run(load_recipe(path, list(overrides)), listener=Silent(), **how)


def test_the_whole_road_goes_on_from_a_checkpoint(start, recipe):
    path = recipe(start, pretrain={"steps": 2})
    road = walk(path)
    begun, base, chat = (
        load_checkpoint(p) for p in (start, *(road.run.checkpoints(s) / "last" for s in ("pretrain", "sft")))
    )
    assert begun.tokenizer.hash == open_tokenizer(road).hash == base.tokenizer.hash == chat.tokenizer.hash
    assert base.config == chat.config == begun.config
    moved = max((base.weights[name] - weight).abs().max() for name, weight in begun.weights.items())
    assert 0 < moved < 0.01, "two updates move the weights that it began with, and no more"

    results = json.loads((road.folder("evaluate") / "results.json").read_text())
    assert list(results["heldout"]) == ["start", "base", "chat"]
    documents = read_documents(corpus_folder(road), HELDOUT)
    expected = bits_per_byte(
        begun.model(), begun.tokenizer, documents, context=128, max_tokens=2000, seed=road.seed("evaluate")
    )
    assert results["heldout"]["start"]["total"]["bits"] == pytest.approx(expected.total.bits)
    page = (road.folder("report") / "index.html").read_text()
    assert "untrained" not in page

    for folder in (base.path, chat.path):
        for name in ("config.json", "generation_config.json"):
            written = json.loads((folder / name).read_text())
            assert written["bos_token_id"] == begun.tokenizer.bos_id
            assert written["pad_token_id"] == begun.tokenizer.pad_id

    turn, eot = begun.tokenizer.end_of_turn_id, begun.tokenizer.eot_id
    assert set(base.stop_ids) == {eot}
    assert set(chat.stop_ids) == {turn, eot}
    session = ChatSession(
        Generator(chat.model(), chat.tokenizer, stop_ids=chat.stop_ids), SamplingParams(max_new_tokens=5)
    )
    session.ask("What is a port?")
    assert [f.name for f in examined(chat.path).findings if f.outcome == "failed"] == []
    assert walk(path).run.recipe.read_text() == road.run.recipe.read_text()


def test_a_plan_and_the_doctor_look_at_the_checkpoints_own_model(start, recipe):
    path = recipe(start)
    begun = load_checkpoint(start)
    found = plan(load_recipe(path), measure=False)
    assert found.parameters.total == begun.config.parameter_count()
    assert found.model["checkpoint"] == str(start)
    assert found.text.vocab_size == begun.tokenizer.vocab_size
    assert "preset" not in found.model
    looked = examined(path)
    assert [f.name for f in looked.findings if f.outcome == "failed"] == []
    assert looked.conversations


def test_without_updates_the_base_model_is_the_checkpoint_bit_for_bit(start, recipe):
    path = recipe(start, pretrain={"steps": 0})
    assert plan(load_recipe(path), measure=False).stages[3].tokens == 0
    road = walk(path)
    base = load_checkpoint(road.run.checkpoints("pretrain") / "last")
    assert base.path.resolve().name == "step-00000000"
    begun = load_checkpoint(start)
    assert base.weights.keys() == begun.weights.keys()
    assert all(torch.equal(base.weights[name], weight) for name, weight in begun.weights.items())
    assert (base.config, base.stop_ids) == (begun.config, begun.stop_ids)
    assert base.tokenizer.hash == begun.tokenizer.hash
    results = json.loads((road.folder("evaluate") / "results.json").read_text())
    assert list(results["heldout"]) == ["base", "chat"]
    assert "was not pretrained further" in (road.folder("report") / "index.html").read_text()
    assert walk(path).run.stage("sft").manifest() == road.run.stage("sft").manifest()

    (road.run.path / "plan.json").unlink()
    walk(path, "pretrain.steps=2", until="pretrain")
    assert json.loads((road.run.path / "plan.json").read_text())["stages"][3]["steps"] == 2
    steps = sorted(p.name for p in road.run.checkpoints("pretrain").glob("step-*"))
    assert steps == ["step-00000002"]
    with pytest.raises(UserError, match="updates were made, and the run is now to have none"):
        walk(path, until="pretrain")


def test_without_updates_a_model_that_was_trained_here_stays_one(start, recipe):
    trained, last = walk(recipe(start, pretrain={"steps": 1}, sft=None, name="first"), until="pretrain"), "last"
    base = trained.run.checkpoints("pretrain") / last
    taken = walk(recipe(base, pretrain={"steps": 0}, sft=None, name="second"), until="pretrain")
    found = load_checkpoint(taken.run.checkpoints("pretrain") / last)
    assert (found.was_trained, found.opening) == (True, load_checkpoint(base).opening)
    assert not load_checkpoint(start).was_trained


def test_without_updates_the_base_model_has_a_template_only_if_its_start_has_one(recipe, tmp_path):
    folder = saved(tmp_path / "bare", tokenizer_of("own", tmp_path).with_template(None))
    road = walk(recipe(folder, pretrain={"steps": 0}, sft=None), until="pretrain")
    assert template_in(road.run.checkpoints("pretrain") / "last") is None
    assert open_tokenizer(road).chat_template, "ChatML, for a tuning to come"


def test_the_weights_are_trained_in_float32_and_taken_over_as_they_lie(recipe, tmp_path):
    tokenizer = tokenizer_of("own", tmp_path)
    folder = saved(tmp_path / "half", tokenizer)
    begun = load_checkpoint(folder)
    half = {name: weight.to(torch.bfloat16) for name, weight in begun.weights.items()}
    folder = save_checkpoint(
        tmp_path / "half",
        8,
        config=begun.config,
        weights=half,
        tokenizer=tokenizer,
        chat=True,
        training=None,
        stop_ids=[5, 3, 0],
    )
    taken = load_checkpoint(
        walk(recipe(folder, pretrain={"steps": 0}, sft=None, name="zero"), until="pretrain").run.checkpoints("pretrain")
        / "last"
    )
    assert {weight.dtype for weight in taken.weights.values()} == {torch.bfloat16}
    assert taken.stop_ids == load_checkpoint(folder).stop_ids == [5, 3, 0]
    path = recipe(folder, model={"attention_dropout": 0.25}, pretrain={"steps": 1}, sft=None, name="one")
    trained = load_checkpoint(walk(path, until="pretrain").run.checkpoints("pretrain") / "last")
    assert {weight.dtype for weight in trained.weights.values()} == {torch.float32}
    assert trained.config.attention_dropout == 0.25


def test_another_checkpoint_is_another_run(start, recipe, tmp_path):
    path = recipe(start, sft=None, pretrain={"steps": 1})
    road = walk(path, until="pretrain")
    inputs = road.run.stage("tokenizer").manifest().inputs
    assert inputs["model.checkpoint"] == hash_file(start / "manifest.json")
    other = saved(tmp_path / "other", load_checkpoint(start).tokenizer, seed=4)
    with pytest.raises(UserError, match="model"):
        walk(path, f"model.checkpoint={other}", until="pretrain")
    copy = tmp_path / "copy"
    shutil.copytree(start, copy)
    walk(path, f"model.checkpoint={copy}", until="pretrain")  # the same files elsewhere are the same start


def test_what_cannot_be_begun_with_is_refused_before_anything_is_done(start, recipe, tmp_path):
    path = recipe(start, pretrain={"sequence_length": 300})
    with pytest.raises(
        UserError, match=r"pretrain.sequence_length: 300 tokens are longer than the checkpoint's .* 256"
    ):
        walk(path)
    copy = tmp_path / "copy"
    shutil.copytree(start, copy)
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    with pytest.raises(UserError, match=r"model.checkpoint: .*model.safetensors: damaged"):
        walk(recipe(copy))
    (copy / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"no manifest.json, .*`modicum import .* --dialect hf --out DIR`"):
        walk(recipe(copy))
    with pytest.raises(UserError, match=r"model.checkpoint: .*not a checkpoint"):
        walk(recipe(tmp_path))
    assert not (tmp_path / "runs").exists()


def test_conversations_need_a_template_from_somewhere(recipe, tmp_path):
    path = tmp_path / "bare.model"
    path.write_bytes(train(texts(), vocab_size=450))
    folder = saved(tmp_path / "bare", sentencepiece_tokenizer(path))
    with pytest.raises(UserError, match=r"chat.template: missing, and the checkpoint has no chat template"):
        walk(recipe(folder))
    (tmp_path / "own.jinja").write_text(CYBERSLM_TEMPLATE)
    road = walk(recipe(folder, pretrain={"steps": 0}), "chat.template=own.jinja", until="sft")
    assert load_checkpoint(road.run.checkpoints("sft") / "last").tokenizer.chat_template == CYBERSLM_TEMPLATE
