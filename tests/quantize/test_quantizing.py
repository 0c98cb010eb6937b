"""From a checkpoint to one of rounded weights: what is written, what is measured, what is refused."""

import copy
import json
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modicum.checkpoint import load_checkpoint
from modicum.checkpoint.rounded import rounded_tensors
from modicum.evaluate.divergence import Limits, Quality
from modicum.evaluate.texts import judging_texts
from modicum.generate import Generator, SamplingParams
from modicum.model import Decoder
from modicum.model.quantized import matrix_names
from modicum.model.stepper import _known
from modicum.quantize import quantize_checkpoint, quantizing, tuning
from modicum.quantize import texts as fitting
from modicum.quantize.judging import Judge, input_moments, moment_bytes, rounded
from modicum.quantize.mixing import mix
from modicum.quantize.rounding import round_matrix
from modicum.quantize.texts import equal_rows, fitting_texts
from modicum.store import UserError


def test_eight_bits_are_a_quarter_of_the_size_and_say_the_same(checkpoint, text, heldout, tmp_path):
    report = quantize_checkpoint(checkpoint, to="int8", out=tmp_path / "int8", text=text, heldout=heldout)
    assert report.judged.quality.mean_kl <= 2e-3
    assert report.judged.quality.agreement >= 0.985
    assert report.cost.disk_bytes < 0.35 * report.full.disk_bytes
    assert report.cost.memory_bytes < 0.35 * report.full.memory_bytes
    assert set(report.bits.values()) == {8}
    written = json.loads((tmp_path / "int8" / "quantize.json").read_text())["judged"]
    assert written["quality"]["mean_kl"] == report.judged.quality.mean_kl
    assert written["source"] == str(heldout)
    assert report.fitted_to == str(text)
    assert json.loads((tmp_path / "int8" / "quantize.json").read_text())["fitted_to"] == str(text)
    loaded = load_checkpoint(tmp_path / "int8")
    assert loaded.was_trained, "as the checkpoint that it was made from"
    prompt = [[loaded.tokenizer.bos_id]]
    params = SamplingParams(temperature=0, max_new_tokens=20)
    full = Generator(load_checkpoint(checkpoint).model(), loaded.tokenizer, stop_ids=[]).generate(prompt, params)
    assert Generator(loaded.model(), loaded.tokenizer, stop_ids=[]).generate(prompt, params)[0].ids == full[0].ids


def test_the_figures_are_those_of_the_files(checkpoint, text, heldout, tmp_path):
    report = quantize_checkpoint(checkpoint, to="int4", out=tmp_path / "int4", text=text, heldout=heldout, max_kl=0.5)
    assert report.full.disk_bytes == (checkpoint / "model.safetensors").stat().st_size
    assert report.cost.disk_bytes == (tmp_path / "int4" / "model.safetensors").stat().st_size
    assert report.bits["model.embed_tokens"] == 8
    assert report.bits["model.layers.0.mlp.up_proj"] == 4
    assert set(report.costs) == set(report.bits)


def test_a_budget_gives_more_bits_to_what_costs_most_and_is_met(checkpoint, text, heldout, tmp_path):
    loose = quantize_checkpoint(checkpoint, to="int4", out=tmp_path / "loose", text=text, heldout=heldout, max_kl=5)
    budget = loose.judged.quality.mean_kl / 3
    tight = quantize_checkpoint(
        checkpoint, to="int4", out=tmp_path / "tight", text=text, heldout=heldout, max_kl=budget
    )
    assert loose.promoted == ()
    assert tight.judged.quality.mean_kl <= budget < loose.judged.quality.mean_kl
    assert 0 < len(tight.promoted) < 14
    assert {tight.bits[name] for name in tight.promoted} == {8}
    worth = {name: tight.costs[name] for name in tight.bits if tight.bits[name] == 4 or name in tight.promoted}
    assert max(worth, key=worth.get) in tight.promoted


ATTENTION = [f"model.layers.1.self_attn.{name}_proj" for name in "qkv"]
GATED = [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up")]


@pytest.mark.parametrize(
    ("bits", "more", "wanted"),
    [(8, 1, ATTENTION), (8, 4, [*ATTENTION, *GATED]), (4, 1, [ATTENTION[1]]), (4, 2, [ATTENTION[1], GATED[1]])],
)
def test_full_precision_is_given_to_all_matrices_of_one_input_and_more_bits_to_each_alone(
    bits, more, wanted, checkpoint
):
    model = load_checkpoint(checkpoint).model()
    names = [name for name in matrix_names(model) if bits == 8 or "embed" not in name]
    weights = {name: model.get_submodule(name).weight.data for name in names}
    costs = {name: {ATTENTION[1]: 1.0, GATED[1]: 0.5}.get(name, 0.0) for name in names}
    better = {name: None if bits == 8 else round_matrix(weight, 8) for name, weight in weights.items()}

    def judge(model):
        left = sum(getattr(model.get_submodule(name), "bits", 32) == bits for name in names)
        return Quality(positions=1, mean_kl=left, tail_kl=0, agreement=1, clear=1, clear_differing=0)

    matrices = {name: round_matrix(weight, bits) for name, weight in weights.items()}
    found = mix(judge, model, matrices, better, costs, Limits(len(names) - more, 1, 0), say=lambda _: None)
    assert sorted(found.promoted) == sorted(wanted)
    with rounded(model, found.matrices):
        assert _known(model)


def test_the_moments_of_one_input_are_kept_once(checkpoint):
    model, rows = load_checkpoint(checkpoint).model(), [torch.arange(30), torch.arange(20, 60)]
    names = [name for name in matrix_names(model) if "embed" not in name]
    inputs = {name: [] for name in names}
    for name, seen in inputs.items():
        model.get_submodule(name).register_forward_pre_hook(lambda _, given, seen=seen: seen.append(given[0][0]))
    found = input_moments(model, rows)
    for name in names:
        x = torch.cat(inputs[name])
        torch.testing.assert_close(found[name], x.T @ x / len(x), atol=1e-5, rtol=1e-4)
    assert found.keys() == inputs.keys()
    assert len({id(moments) for moments in found.values()}) == 4 * model.config.num_hidden_layers


def test_what_is_fitted_to_is_drawn_from_all_of_the_text_whatever_its_order(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(fitting, "_MOST", 10)
    loaded, found = load_checkpoint(checkpoint), []
    lines = [f"{number}, a rounded weight says nearly what it said before" for number in range(60)]
    for number, order in enumerate((lines, lines[::-1], lines * 2)):
        file = tmp_path / f"{number}.jsonl"
        file.write_text("\n".join(json.dumps({"text": line}) for line in order))
        found.append([ids.tolist() for ids in fitting_texts(file, loaded)])
    assert found[0] == found[1] == found[2]
    assert {ids[0] for ids in found[0]} == {loaded.tokenizer.bos_id}
    said = {loaded.tokenizer.decode(ids[1:]) for ids in found[0]}
    assert len(said & set(lines)) == 10
    assert not said <= set(lines[:30])


def test_what_its_moments_take_is_known_and_looked_for_beforehand(checkpoint, text, heldout, tmp_path, monkeypatch):
    loaded = load_checkpoint(checkpoint)
    model, config = loaded.model(), loaded.config
    moments = input_moments(model, [torch.arange(20)])
    kept = {moment.data_ptr(): moment.nbytes for moment in moments.values()}
    beside = 5 * 8 * max(len(moment) for moment in moments.values()) ** 2
    head = 0 if "lm_head" in moments else 4 * config.hidden_size**2
    assert sum(kept.values()) + head + beside == moment_bytes(config)
    monkeypatch.setattr("modicum.evaluate.beside.free_memory", lambda: 10**5)
    with pytest.raises(UserError, match="GB are free"):
        quantize_checkpoint(checkpoint, to="int8", out=tmp_path / "out", text=text, heldout=heldout)
    assert not (tmp_path / "out").exists()


def test_what_the_model_wrote_is_fitted_to_as_it_wrote_it(checkpoint, monkeypatch):
    """A control token stays one: its name in letters is what the model never says."""
    loaded = load_checkpoint(checkpoint)
    bos, said = loaded.tokenizer.bos_id, loaded.tokenizer.encode("A rounded weight")
    written = [[bos, *said, loaded.tokenizer.eot_id, *said], [bos, *said]]
    monkeypatch.setattr(fitting, "own_texts", lambda *_, **__: written)
    assert [ids.tolist() for ids in fitting_texts(None, loaded)] == written


def test_above_the_limits_nothing_is_written_and_the_figure_is_named(checkpoint, text, heldout, tmp_path):
    with pytest.raises(UserError, match=r"mean KL divergence .*, allowed 1e-09"):
        quantize_checkpoint(checkpoint, to="int4", out=tmp_path / "out", text=text, heldout=heldout, max_kl=1e-9)
    assert list(tmp_path.iterdir()) == []


def test_a_fault_of_writing_is_seen_in_the_file_and_nothing_is_kept(checkpoint, text, heldout, tmp_path, monkeypatch):
    def emptied(matrices, *, tied):
        return {name: tensor * 0 for name, tensor in rounded_tensors(matrices, tied=tied).items()}

    monkeypatch.setattr("modicum.checkpoint.save.rounded_tensors", emptied)
    with pytest.raises(UserError, match="not what was measured before it was written"):
        quantize_checkpoint(checkpoint, to="int8", out=tmp_path / "out", text=text, heldout=heldout)
    assert list(tmp_path.iterdir()) == []


def test_without_a_budget_the_limits_refuse(checkpoint, text, heldout, tmp_path, monkeypatch):
    monkeypatch.setitem(quantizing.LIMITS, "int4", quantizing.Limits(1e-9, 1, 0))
    with pytest.raises(UserError, match="--max-kl gives some matrices more bits"):
        quantize_checkpoint(checkpoint, to="int4", out=tmp_path / "out", text=text, heldout=heldout)
    assert list(tmp_path.iterdir()) == []


def test_its_own_texts_judge_where_none_is_given(checkpoint, tmp_path):
    report = quantize_checkpoint(checkpoint, to="int8", out=tmp_path / "out")
    assert report.judged.source == report.fitted_to == "the model's own texts"
    assert report.judged.quality.positions > 500


def test_of_a_folder_that_holds_both_what_judges_is_not_fitted_to(checkpoint, text, heldout, tmp_path):
    folder = tmp_path / "both"
    folder.mkdir()
    (folder / "text.jsonl").write_bytes(text.read_bytes())
    alone = quantize_checkpoint(checkpoint, to="int4", out=tmp_path / "alone", text=folder, heldout=heldout, max_kl=5)
    (folder / "also.jsonl").write_bytes(heldout.read_bytes())
    report = quantize_checkpoint(checkpoint, to="int4", out=tmp_path / "out", text=folder, heldout=heldout, max_kl=5)
    assert "of the texts to fit to are among those that judge" in report.notes[-1]
    weights = "model.safetensors"
    assert (tmp_path / "out" / weights).read_bytes() == (tmp_path / "alone" / weights).read_bytes()
    assert not any("among those that judge" in note for note in alone.notes)


@pytest.mark.parametrize("by", ["its name", "a link"])
def test_what_is_fitted_to_does_not_judge(by, checkpoint, text, tmp_path):
    (tmp_path / "link").symlink_to(text)
    same = tmp_path / "link" if by == "a link" else text
    with pytest.raises(UserError, match="is what --text fits to"):
        quantize_checkpoint(checkpoint, to="int8", out=tmp_path / "out", text=text, heldout=same)


@pytest.mark.parametrize("how", [{"max_kl": 5}, {"tune_steps": 2, "max_kl": 5}, {}])
def test_what_chooses_does_not_give_the_figures(how, checkpoint, text, heldout, tmp_path, monkeypatch):
    judges = []

    class Spied(quantizing.Judge):
        def __init__(self, full, texts, folder):
            judges.append({tuple(row.tolist()) for row in texts.rows})
            super().__init__(full, texts, folder)

    monkeypatch.setattr(quantizing, "Judge", Spied)
    report = quantize_checkpoint(checkpoint, to="int8", out=tmp_path / "out", text=text, heldout=heldout, **how)
    assert len(judges) == (2 if how else 1)
    assert report.judged.texts == len(judges[-1])
    assert not how or not judges[0] & judges[1]


def test_what_full_precision_says_lies_on_the_disk_and_leaves_nothing_there(checkpoint, heldout, tmp_path):
    loaded = load_checkpoint(checkpoint)
    model, texts = loaded.model(), judging_texts(loaded, heldout, texts=5, tokens=20)
    judge = Judge(model, texts, tmp_path)
    assert all(isinstance(said, np.memmap) for said in judge._said)
    with torch.no_grad():
        for row, said in zip(texts.rows, judge._said, strict=True):
            np.testing.assert_array_equal(said, model(torch.from_numpy(row)[None])[0].numpy())
    assert judge(model).mean_kl == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("steps", [0, 2])
def test_the_model_is_copied_to_be_tuned_and_for_nothing_else(steps, checkpoint, text, heldout, tmp_path, monkeypatch):
    duplicate, copied = copy.deepcopy, []

    def noting(value, *given):
        copied.append(type(value))
        return duplicate(value, *given)

    monkeypatch.setattr(copy, "deepcopy", noting)
    how = {"text": text, "heldout": heldout, "max_kl": 5, "tune_steps": steps}
    quantize_checkpoint(checkpoint, to="int4", out=tmp_path / "out", **how)
    assert copied.count(Decoder) == (1 if steps else 0)


def test_the_speed_is_that_of_the_second_answer(tokenizer):
    waits = iter((0.0, 0.2))
    generator = SimpleNamespace(context=21, generate=lambda *_: time.sleep(next(waits)))
    assert quantizing._speed(generator, tokenizer) == pytest.approx(20 / 0.2, rel=0.3)


def test_what_is_rounded_already_is_refused(checkpoint, text, heldout, tmp_path):
    quantize_checkpoint(checkpoint, to="int8", out=tmp_path / "once", text=text, heldout=heldout)
    with pytest.raises(UserError, match="rounded to 8 bits"):
        quantize_checkpoint(tmp_path / "once", to="int4", out=tmp_path / "twice", text=text, heldout=heldout)
    with pytest.raises(UserError, match="is not empty"):
        quantize_checkpoint(checkpoint, to="int8", out=tmp_path / "once", text=text, heldout=heldout)


def test_too_little_text_and_none_for_tuning_are_refused(checkpoint, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("A text.")
    with pytest.raises(UserError, match="too few"):
        quantize_checkpoint(checkpoint, to="int8", out=tmp_path / "out", heldout=short)
    with pytest.raises(UserError, match=r"--tune: the text has \d+ tokens, 64 are needed"):
        quantize_checkpoint(checkpoint, to="int8", out=tmp_path / "out", text=short, tune_steps=2)
    with pytest.raises(UserError, match="no such file"):
        quantize_checkpoint(checkpoint, to="int8", out=tmp_path / "out", text=tmp_path / "none.txt")
    with pytest.raises(UserError, match="needs --text"):
        quantize_checkpoint(checkpoint, to="int4", out=tmp_path / "out", tune_steps=5)


def test_tuning_brings_four_bits_nearer_to_full_precision(checkpoint, text, heldout, tmp_path):
    plain = quantize_checkpoint(checkpoint, to="int4", out=tmp_path / "plain", text=text, heldout=heldout, max_kl=5)
    tuned = quantize_checkpoint(
        checkpoint, to="int4", out=tmp_path / "tuned", text=text, heldout=heldout, max_kl=5, tune_steps=60
    )
    assert tuned.judged.quality.mean_kl < 0.6 * plain.judged.quality.mean_kl
    assert tuned.tuned_steps == 60
    assert tuned.bits == plain.bits


def test_tuning_that_does_harm_is_left_out_and_said(checkpoint, text, heldout, tmp_path, monkeypatch):
    plain = quantize_checkpoint(checkpoint, to="int4", out=tmp_path / "plain", text=text, heldout=heldout, max_kl=5)
    monkeypatch.setattr(tuning, "_SHARE", 1.0)
    tuned = quantize_checkpoint(
        checkpoint, to="int4", out=tmp_path / "tuned", text=text, heldout=heldout, max_kl=5, tune_steps=3
    )
    assert tuned.judged.quality == plain.judged.quality
    assert tuned.tuned_steps == 0
    assert any("no nearer" in note for note in tuned.notes)


@pytest.mark.parametrize("lengths", [(3, 9, 20, 41), (5,), (96, 7, 60)])
def test_texts_of_any_lengths_tune(lengths, checkpoint, tmp_path):
    file = tmp_path / "mixed.jsonl"
    words = ["a", "rounded", "weight", "says", "nearly", "what", "it", "said", "before", "and", "more"]
    texts = [
        " ".join(words[number % 11] for number in range(shift, shift + lengths[shift % len(lengths)]))
        for shift in range(24)
    ]
    file.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    said = []
    quantize_checkpoint(
        checkpoint, to="int4", out=tmp_path / "out", text=file, max_kl=5, tune_steps=2, progress=said.append
    )
    assert any(line.startswith("tuning, update 2 of 2") for line in said)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(0, 50), max_size=40), fewest=st.integers(1, 9))
def test_rows_that_are_tuned_on_are_of_one_length_and_hold_the_texts_in_their_order(lengths, fewest, tokenizer):
    texts = [np.array([tokenizer.bos_id, *tokenizer.encode("ab" * length)], dtype=np.uint16) for length in lengths]
    wanted = [id for text in texts if len(text) > 1 for id in text.tolist()]
    try:
        rows = equal_rows(texts, length=32, tokens=10**6, fewest=fewest)
    except UserError:
        assert len(wanted) < 8 * fewest
        return
    assert len(rows) >= fewest
    assert len({len(row) for row in rows}) == 1
    found = [int(id) for row in rows for id in row]
    assert found == wanted[: len(found)]
    assert len(wanted) - len(found) < len(rows[0])
