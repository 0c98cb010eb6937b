"""A synthetic checkpoint of each dialect, through the import, as transformers then loads it."""

import json

import foreign_models
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentencepiece import SentencePieceProcessor
from transformers import AutoTokenizer

from modicum.checkpoint import load_checkpoint
from modicum.checkpoint.save import write_model
from modicum.exchange import import_checkpoint
from modicum.store import UserError

DIALECTS = pytest.mark.parametrize("dialect", foreign_models.DIALECTS)


@DIALECTS
@pytest.mark.parametrize("changes", [{}, {"tied": False, "bias": True}])
def test_transformers_says_what_the_dialects_own_float64_says(
    dialect, changes, foreign, ids, said_by_transformers, tmp_path
):
    path, weights = foreign(dialect, **changes)
    report = import_checkpoint(path, dialect=dialect, out=tmp_path / "out")
    wanted = foreign_models.logits(dialect, weights, ids(33))
    assert abs(wanted).max() > 1  # so that 1e-4 means something
    np.testing.assert_allclose(said_by_transformers(tmp_path / "out", ids(33)), wanted, rtol=0, atol=1e-4)
    assert report.parameters == sum(weight.numel() for weight in weights.values())
    assert [one.tokens for one in report.compared] == [1, 2, 7, 40]
    assert max(one.difference / one.largest for one in report.compared) < 1e-4


@pytest.mark.parametrize("dialect", ["slm", "core"])
def test_what_is_written_is_an_ordinary_checkpoint_with_its_tokenizer(dialect, foreign, tokenizer, tmp_path):
    path, _ = foreign(dialect)
    import_checkpoint(path, dialect=dialect, out=tmp_path / "out")
    loaded = load_checkpoint(tmp_path / "out")  # compares every file with the manifest
    text = "What came from elsewhere,\n  says é 12."
    assert loaded.tokenizer.encode(text) == tokenizer.encode(text)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs(text, add_special_tokens=False).input_ids == tokenizer.encode(text)
    assert loaded.config.rotary_layout == "half"


def test_cyberslms_sentencepiece_model_becomes_a_tokenizer_with_its_ids(foreign, sentencepiece_model, tmp_path):
    path, _ = foreign("cyberslm")
    report = import_checkpoint(path, dialect="cyberslm", out=tmp_path / "out")
    wanted = SentencePieceProcessor(model_proto=sentencepiece_model)
    loaded, theirs = load_checkpoint(tmp_path / "out"), AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("What came from elsewhere", "  two,\ttabs\r\n and é 12 日本 \U0001f642 ", "### User:\nno </s> here"):
        assert loaded.tokenizer.encode(text) == wanted.encode(text)
        assert loaded.tokenizer.decode(wanted.encode(text)) == wanted.decode(wanted.encode(text))
        if "</s>" not in text:
            assert theirs(text, add_special_tokens=False).input_ids == wanted.encode(text)
            assert theirs(text).input_ids == [2, *wanted.encode(text)]
    assert report.tokenizer == path.parent / "tokenizer.model"
    assert (theirs.pad_token_id, theirs.unk_token_id, theirs.bos_token_id, theirs.eos_token_id) == (0, 1, 2, 3)
    written = [json.loads((tmp_path / "out" / f"{name}config.json").read_text()) for name in ("", "generation_")]
    assert [config["bos_token_id"] for config in written] == [2, 2]
    assert [config["pad_token_id"] for config in written] == [0, 0]
    assert loaded.stop_ids == [3]


def test_cyberslm_gets_its_chat_format(foreign, sentencepiece_model, tmp_path):
    path, _ = foreign("cyberslm")
    import_checkpoint(path, dialect="cyberslm", out=tmp_path / "out")
    talk = [{"role": "user", "content": "who leaks?"}, {"role": "assistant", "content": "the logs"}]
    rendered = load_checkpoint(tmp_path / "out").tokenizer.render(talk)
    assert rendered.text == "<s>### User:\nwho leaks?\n\n### Assistant:\nthe logs</s>"
    wanted = SentencePieceProcessor(model_proto=sentencepiece_model)
    assert rendered.ids == [2, *wanted.encode("### User:\nwho leaks?\n\n### Assistant:\nthe logs"), 3]
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.apply_chat_template(talk, return_dict=True)["input_ids"] == rendered.ids


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"eos_token_id": 7}, ["  eos_token_id 7 in the config, 3 in {}"]),
        ({"bos_token_id": 5}, ["  bos_token_id 5 in the config, 2 in {}"]),
        (
            {"bos_token_id": 3, "eos_token_id": 2},
            ["  bos_token_id 3 in the config, 2 in {}", "  eos_token_id 2 in the config, 3 in {}"],
        ),
        ({"bos_token_id": None, "eos_token_id": None, "pad_token_id": 9}, []),
    ],
)
def test_a_config_whose_texts_begin_or_end_with_another_token_is_refused(changes, said, foreign, tmp_path):
    path, _ = foreign("cyberslm", content=lambda w, values: {"model_state": w, "config": {**values, **changes}})
    if not said:
        import_checkpoint(path, dialect="cyberslm", out=tmp_path / "out")
        return
    with pytest.raises(UserError, match="its config and its tokenizer disagree") as error:
        import_checkpoint(path, dialect="cyberslm", out=tmp_path / "out")
    assert str(error.value).splitlines()[1:] == [line.format(path.parent / "tokenizer.model") for line in said]
    assert not (tmp_path / "out").exists()


def test_cyberslm_keeps_a_chat_format_that_lies_beside_it(foreign, tmp_path):
    path, _ = foreign("cyberslm")
    template = "{% for m in messages %}{{ m.content | trim }}{{ eos_token }}{% endfor %}"
    path.with_name("chat_template.jinja").write_text(template)
    import_checkpoint(path, dialect="cyberslm", out=tmp_path / "out")
    assert load_checkpoint(tmp_path / "out").tokenizer.chat_template == template


@pytest.mark.parametrize(("dialect", "kept"), [("cyberslm", 0.0), ("core", 0.25)])
def test_dropout_that_is_not_kept_is_reported(dialect, kept, foreign, tmp_path):
    path, _ = foreign(dialect, content=lambda w, values: {"model_state": w, "config": {**values, "dropout": 0.25}})
    report = import_checkpoint(path, dialect=dialect, out=tmp_path / "out")
    (note,) = report.notes
    assert note.startswith("dropout 0.25 of what attention and feed-forward give back is not kept")
    assert load_checkpoint(tmp_path / "out").config.attention_dropout == kept
    assert report.to_dict()["notes"] == report.notes


def test_a_model_without_dropout_has_nothing_to_report(foreign, tmp_path):
    path, _ = foreign("core")
    assert import_checkpoint(path, dialect="core", out=tmp_path / "out").notes == ()


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."])
def test_the_prefix_of_a_compiled_or_wrapped_module_is_taken_off_and_reported(prefix, foreign, tmp_path):
    def content(weights, values):
        return {"model_state": {f"{prefix}{name}": weight for name, weight in weights.items()}, "config": values}

    path, weights = foreign("core", content=content)
    report = import_checkpoint(path, dialect="core", out=tmp_path / "out")
    (note,) = report.notes
    assert note.startswith(f"every name began with {prefix},")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["model.embed_tokens.weight"], weights["embedding.weight"])
    assert len(written) == len(weights)


def test_a_prefix_that_not_every_name_has_is_a_fault_of_those_that_have_it(foreign, tmp_path):
    def content(weights, values):
        first = next(iter(weights))
        named = {f"_orig_mod.{name}" if name != first else name: weight for name, weight in weights.items()}
        return {"model_state": named, "config": values}

    path, _ = foreign("core", content=content)
    with pytest.raises(UserError, match=r"_orig_mod\.norm\.weight: left over"):
        import_checkpoint(path, dialect="core", out=tmp_path / "out")


@DIALECTS
def test_two_configs_that_disagree_are_refused_with_the_keys(dialect, foreign, tmp_path):
    path, _ = foreign(dialect)
    values = foreign_models.config(dialect, 384)
    first, *_, last = values
    other = {**values, first: 1, last: "another", "of its own": 3}
    path.with_name("config.json").write_text(json.dumps(other))
    with pytest.raises(UserError, match="two configs that disagree") as error:
        import_checkpoint(path, dialect=dialect, out=tmp_path / "out")
    assert str(error.value).splitlines()[1:] == [
        f"  {name}: {values[name]!r} in the file of the weights, {other[name]!r} in config.json"
        for name in sorted((first, last))
    ]
    path.with_name("config.json").write_text(json.dumps(values))
    import_checkpoint(path, dialect=dialect, out=tmp_path / "out")


@pytest.mark.parametrize("form", ["bare", "safetensors", "folder", "parameters", "more in the file"])
def test_every_form_of_a_checkpoint_is_read(form, foreign, tmp_path):
    def content(weights, values):
        if form == "parameters":
            weights = {name: torch.nn.Parameter(weight) for name, weight in weights.items()}
        if form == "bare":
            return weights
        more = {"optimizer": torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]).state_dict(), "step": 7}
        return {"model_state": weights, "config": values} | (more if form == "more in the file" else {})

    path, weights = foreign("core", content=content)
    if form in ("bare", "safetensors"):
        (path.parent / "config.json").write_text(json.dumps(foreign_models.config("core", 384)))
    if form == "safetensors":
        path.unlink()
        path = path.with_name("weights.safetensors")
        save_file(weights, path)
    report = import_checkpoint(path.parent if form == "folder" else path, dialect="core", out=tmp_path / "out")
    assert report.left_aside == (("optimizer", "step") if form == "more in the file" else ())
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["model.embed_tokens.weight"], weights["embedding.weight"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_keep_the_type_they_were_stored_in(dtype, foreign, tmp_path):
    path, weights = foreign("core", dtype=dtype)
    report = import_checkpoint(path, dialect="core", out=tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {weight.dtype for weight in written.values()} == {dtype}
    assert report.dtype == str(dtype).removeprefix("torch.")
    assert torch.equal(written["model.layers.1.mlp.up_proj.weight"], weights["layers.1.mlp.up_proj.weight"])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == report.dtype


def test_weights_of_several_types_become_float32(foreign, tmp_path):
    def content(weights, values):
        half = {name: weight.bfloat16() if "norm" not in name else weight for name, weight in weights.items()}
        return {"model_state": half, "config": values}

    path, weights = foreign("slm", content=content)
    import_checkpoint(path, dialect="slm", out=tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {weight.dtype for weight in written.values()} == {torch.float32}
    assert torch.equal(
        written["model.layers.0.mlp.up_proj.weight"], weights["layers.0.mlp.up_proj.weight"].bfloat16().float()
    )


def test_rows_beyond_the_tokenizers_ids_are_kept(foreign, tokenizer, tmp_path):
    path, weights = foreign("slm", vocab=tokenizer.vocab_size + 5)
    report = import_checkpoint(path, dialect="slm", out=tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["model.embed_tokens.weight"], weights["embed_tokens.weight"])
    assert (report.vocabulary, report.tokenizer_ids) == (tokenizer.vocab_size + 5, tokenizer.vocab_size)


def test_a_tied_head_may_be_there_when_it_is_the_embedding(foreign, tmp_path):
    def content(weights, values):
        return {"model_state": {**weights, "lm_head.weight": weights["embedding.weight"]}, "config": values}

    path, _ = foreign("core", content=content)
    import_checkpoint(path, dialect="core", out=tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")


def test_rows_in_the_wrong_order_are_refused_by_the_gate_with_figures(foreign, tmp_path, monkeypatch):
    path, _ = foreign("core")
    monkeypatch.setattr("modicum.exchange.importing.relaid", lambda weights, **_: dict(weights))
    with pytest.raises(UserError, match=r"model.pt: does not say what its source says") as error:
        import_checkpoint(path, dialect="core", out=tmp_path / "out")
    assert "a prompt of 7 tokens: logits differ by" in str(error.value)
    assert not (tmp_path / "out").exists()


def test_what_would_not_load_again_is_not_written(foreign, tmp_path, monkeypatch):
    path, _ = foreign("core")

    def write(folder, **parts):
        weights = {name: weight for name, weight in parts["weights"].items() if name != "model.norm.weight"}
        write_model(folder, **{**parts, "weights": weights})

    monkeypatch.setattr("modicum.exchange.importing.write_model", write)
    with pytest.raises(UserError, match=r"model\.norm\.weight: missing"):
        import_checkpoint(path, dialect="core", out=tmp_path / "out")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["core"]


def test_a_tokenizer_with_more_ids_than_the_model_has_rows_is_refused(foreign, tmp_path):
    path, _ = foreign("core", vocab=300)
    with pytest.raises(UserError, match=r"tokenizer.json: has 384 ids, and the model a vocabulary of 300"):
        import_checkpoint(path, dialect="core", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_a_tokenizer_nothing_is_written_and_one_can_be_named(foreign, tokenizer, tmp_path):
    path, _ = foreign("core")
    (path.parent / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"no tokenizer; put .* or name it with --tokenizer"):
        import_checkpoint(path, dialect="core", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    tokenizer.save(tmp_path / "apart")
    report = import_checkpoint(path, dialect="core", out=tmp_path / "out", tokenizer=tmp_path / "apart")
    assert report.tokenizer == tmp_path / "apart" / "tokenizer.json"


def test_an_empty_folder_may_be_written_into(foreign, tmp_path):
    path, _ = foreign("core")
    (tmp_path / "out").mkdir()
    import_checkpoint(path, dialect="core", out=tmp_path / "out")
    assert load_checkpoint(tmp_path / "out")


def test_a_folder_in_use_is_never_written_over(foreign, tmp_path):
    path, _ = foreign("core")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    with pytest.raises(UserError, match="out: is not empty"):
        import_checkpoint(path, dialect="core", out=tmp_path / "out")
    assert (tmp_path / "out" / "mine.txt").read_text() == "keep"
    with pytest.raises(UserError, match=r"mine\.txt: is there already"):
        import_checkpoint(path, dialect="core", out=tmp_path / "out" / "mine.txt")
