import json
import os
import shutil
import time
from types import SimpleNamespace

import pytest

from modicum.checkpoint import load_checkpoint
from modicum.doctor.examine import tokenizer_of
from modicum.evaluate.texts import judging_texts
from modicum.recipe import load_recipe
from modicum.road.context import Road
from modicum.road.measure import evaluate_inputs
from modicum.road.stages import STAGES, run
from modicum.road.summary import summary
from modicum.store import UserError, hash_file, hash_tree
from modicum.tokenizer import CYBERSLM_TEMPLATE

NAMES = [stage.name for stage in STAGES]


class Notes:
    """A listener that remembers."""

    def __init__(self):
        self.lines = []

    def say(self, text):
        self.lines.append(text)

    def progress(self, done, total, text):
        assert text
        assert 0 <= done <= total or total == 0

    @property
    def stages(self):
        """The stages that had something to do."""
        return [line[1 : line.index("]")] for line in self.lines if line.startswith("[")]


def walk(path, *overrides, **how):
    notes = Notes()
    return run(load_recipe(path, list(overrides)), listener=notes, **how), notes


def test_the_road_goes_from_text_to_a_report_and_then_has_nothing_to_do(tiny):
    path = tiny()
    road, notes = walk(path)
    assert notes.stages == NAMES
    results = json.loads((road.folder("evaluate") / "results.json").read_text())
    assert set(results["heldout"]) == {"untrained", "base", "chat"}
    assert len(results["samples"]) == 2
    told = summary(road)
    assert "held-out bits per byte: untrained" in told
    assert "chance 25.0%" in told
    assert str(road.folder("report")) in told
    road, again = walk(path)
    assert again.stages == []
    assert "everything is up to date" in again.lines[-1]


def test_only_what_depends_on_a_change_is_done_again(tiny):
    path = tiny(sft=None)
    walk(path)
    _, notes = walk(path, "evaluate.bootstrap_samples=30")
    assert notes.stages == ["evaluate", "report"]
    _, notes = walk(path, "pretrain.keep_last=1", "pretrain.log_every_steps=1", "pretrain.micro_batch_size=2")
    assert notes.stages == ["evaluate", "report"], "operating settings must not touch training"


def test_more_steps_extend_the_base_model(tiny):
    path = tiny(sft=None)
    walk(path, until="pretrain")
    road, notes = walk(path, "pretrain.steps=6", until="pretrain")
    assert notes.stages == ["pretrain"]
    assert (road.run.checkpoints("pretrain") / "last").resolve().name == "step-00000006"


def test_another_chat_template_tunes_anew_and_leaves_the_base_model(tiny, tmp_path):
    path = tiny(evaluate={"items": []})
    road, _ = walk(path, until="sft")
    before = {stage: hash_file(road.run.checkpoints(stage) / "last" / "manifest.json") for stage in ("pretrain", "sft")}
    (tmp_path / "own.jinja").write_text(CYBERSLM_TEMPLATE)
    looked_at = tokenizer_of(load_recipe(path, ["chat.template=own.jinja"]))
    assert looked_at.chat_template == CYBERSLM_TEMPLATE, "the doctor looks at what the next run will have"
    _, notes = walk(path, "chat.template=own.jinja", until="shards")
    assert notes.stages == ["tokenizer"], "no id of a text depends on the template"
    with pytest.raises(UserError, match="template: was"):
        walk(path, "chat.template=own.jinja", until="sft")
    walk(path, "chat.template=own.jinja", until="sft", start="sft")
    assert hash_file(road.run.checkpoints("pretrain") / "last" / "manifest.json") == before["pretrain"]
    tuned = road.run.checkpoints("sft") / "last"
    assert hash_file(tuned / "manifest.json") != before["sft"]
    assert load_checkpoint(tuned).tokenizer.chat_template == CYBERSLM_TEMPLATE


def test_tuning_goes_on_tomorrow_where_the_template_tells_the_date(tiny, tmp_path, monkeypatch):
    turn = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    (tmp_path / "dated.jinja").write_text(
        "{{ strftime_now('%d %b %Y') + '\n' }}{% for m in messages %}" + turn + "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    path, dated = tiny(evaluate={"items": []}), "chat.template=dated.jinja"
    walk(path, dated, "sft.epochs=1", until="sft")
    monkeypatch.setattr("modicum.tokenizer.chat.time", SimpleNamespace(time=lambda: time.time() + 9 * 86_400))
    road, notes = walk(path, dated, "sft.epochs=3", until="sft")
    assert any("going on after update" in line for line in notes.lines)
    assert "began.json" in {file.name for file in road.folder("sft").iterdir()}


def test_changed_text_is_prepared_anew_and_old_weights_are_not_mixed_with_it(tiny, tmp_path):
    path = tiny(sft=None)
    walk(path, until="pretrain")
    lines = (tmp_path / "text.jsonl").read_text().splitlines()
    (tmp_path / "text.jsonl").write_text("\n".join(lines[:-20]) + "\n")
    notes = Notes()
    with pytest.raises(UserError, match="shards"):
        run(load_recipe(path), listener=notes)
    assert notes.stages == ["corpus", "tokenizer", "shards", "pretrain"]
    _, notes = walk(path, start="pretrain", until="pretrain")
    assert notes.stages == ["pretrain"]


@pytest.mark.parametrize("until", ["corpus", "shards"])
def test_text_held_out_after_training_does_not_judge_what_was_trained_on_it(until, tiny):
    path = tiny(sft=None)
    road, _ = walk(path, until="pretrain")
    base = load_checkpoint(road.run.checkpoints("pretrain") / "last")
    assert judging_texts(base, texts=5, tokens=64).source == "held-out text of tiny"
    walk(path, "corpus.heldout_fraction=0.4", until=until)
    assert judging_texts(base, texts=5, tokens=64).source.startswith("the model's own texts, for it may have been")


def test_a_chat_model_is_judged_by_the_held_out_text_of_its_base_model(tiny):
    road, _ = walk(tiny(), until="sft")
    chat = load_checkpoint(road.run.checkpoints("sft") / "last")
    assert judging_texts(chat, texts=5, tokens=64).source == "held-out text of tiny"


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("pretrain.learning_rate=1e-4", "pretrain.learning_rate"),
        ("model.hidden_size=64", "model.hidden_size"),
        ("seed=5", "seed"),
    ],
)
def test_a_changed_identity_is_refused_by_name_and_setting_it_back_goes_on(tiny, override, named):
    path = tiny(sft=None)
    walk(path, until="shards")
    walk(path, until="pretrain")
    with pytest.raises(UserError) as error:
        walk(path, override, until="pretrain")
    assert named in str(error.value)
    road, _ = walk(path, until="pretrain")
    assert (road.run.checkpoints("pretrain") / "last").resolve().name == "step-00000004"


@pytest.mark.parametrize(("batch_size", "told"), [(64, True), (2, False)])
def test_conversations_that_are_seen_much_more_often_than_asked_for_are_told_of(tiny, batch_size, told):
    road, notes = walk(tiny(sft={"batch_size": batch_size, "epochs": 1.0}), until="sft")
    rows = road.run.checkpoints("sft") / "last" / "training" / "state.json"
    seen = json.loads(rows.read_text())["step"] * batch_size
    (warning,) = [line for line in notes.lines if "sft.epochs" in line] or [None]
    assert (warning is not None) == told
    if warning is not None:
        filled = int(warning.split("fill ")[1].split()[0])
        assert f"seen {seen / filled:.1f} times, not 1 " in warning
        assert "lower sft.batch_size" in warning


def test_until_stops_and_from_begins_again(tiny):
    path = tiny(sft=None)
    road, notes = walk(path, until="shards")
    assert notes.stages == ["corpus", "tokenizer", "shards"]
    assert not road.folder("pretrain").exists()
    _, notes = walk(path, start="tokenizer", until="shards")
    assert notes.stages == ["tokenizer", "shards"]


@pytest.mark.parametrize(
    "how", [{"until": "moon"}, {"start": "moon"}, {"until": "sft"}, {"start": "pretrain", "until": "corpus"}]
)
def test_stages_that_are_not_on_this_road_are_refused(tiny, how):
    with pytest.raises(UserError, match="--"):
        walk(tiny(sft=None), **how)


def test_a_stage_records_what_it_was_made_from_and_what_it_took(tiny):
    road, _ = walk(tiny(sft=None), until="corpus")
    manifest = road.run.stage("corpus").manifest()
    assert manifest.inputs["corpus.sources.text"]
    assert manifest.wall_seconds > 0
    assert manifest.peak_memory_mb > 50
    assert (road.run.path / "recipe.yaml").exists()


def test_every_stage_draws_other_numbers(tiny):
    road, _ = walk(tiny(sft=None), until="corpus")
    seeds = {road.seed(name) for name in [*NAMES, "model", "conversations"]}
    assert len(seeds) == len(NAMES) + 2


def test_a_link_that_a_kill_left_behind_is_moved_to_the_newest_checkpoint(tiny):
    path = tiny(sft=None)
    road, _ = walk(path, until="pretrain")
    last = road.run.checkpoints("pretrain") / "last"
    # as after a kill between the last checkpoint's rename and the move of the link
    last.unlink()
    last.symlink_to("step-00000002")
    (road.folder("pretrain") / "manifest.json").unlink()
    walk(path, until="pretrain")
    assert last.readlink().name == "step-00000004"


@pytest.mark.parametrize("damage", ["flipped", "missing", "index", "manifest"])
def test_the_mend_that_damaged_shards_are_told_with_brings_them_back_and_loses_no_checkpoint(tiny, damage):
    path = tiny(sft=None)
    road, _ = walk(path, until="pretrain")
    folder, checkpoint = road.folder("shards") / "train", road.run.checkpoints("pretrain") / "step-00000004"
    before = hash_tree(folder), hash_tree(checkpoint)
    names = {"index": "index.json", "manifest": "manifest.json"}
    file = folder / names.get(damage, "sources/text/00000.bin")
    whole = file.read_bytes()
    file.unlink() if damage == "missing" else file.write_bytes(bytes([whole[0] ^ 1, *whole[1:]]))
    with pytest.raises(UserError) as error:
        walk(path, "pretrain.steps=6", until="pretrain")
    assert str(error.value).endswith(f"delete {folder} and run `modicum prepare` again; the checkpoints stay")
    shutil.rmtree(folder)
    _, notes = walk(path, until="shards")
    assert notes.stages == ["shards"]
    walk(path, "pretrain.steps=6", until="pretrain")
    assert (hash_tree(folder), hash_tree(checkpoint)) == before
    assert (road.run.checkpoints("pretrain") / "last").resolve().name == "step-00000006"


def test_the_mend_that_a_damaged_corpus_is_told_with_brings_it_back_and_loses_no_checkpoint(tiny):
    path = tiny(sft=None)
    road, _ = walk(path, until="pretrain")
    corpus, shards = road.folder("corpus") / "text", road.folder("shards") / "train"
    before = hash_tree(corpus), hash_tree(shards)
    file = corpus / "documents" / "text.jsonl.zst"
    whole = file.read_bytes()
    file.write_bytes(bytes([*whole[:-9], whole[-9] ^ 1, *whole[-8:]]))
    shutil.rmtree(shards)
    with pytest.raises(UserError) as error:
        walk(path, until="pretrain")
    assert str(error.value).endswith(f"delete {corpus} and run `modicum prepare` again")
    shutil.rmtree(corpus)
    _, notes = walk(path, until="pretrain")
    assert notes.stages == ["corpus", "shards"]
    assert (hash_tree(corpus), hash_tree(shards)) == before


def test_how_often_a_source_is_read_is_no_affair_of_the_corpus(tiny):
    path = tiny(sft=None)
    _, notes = walk(path, until="shards")
    often = ["corpus.sources.0.weight=2", "corpus.sources.0.max_epochs=4.5"]
    _, notes = walk(path, *often, until="shards")
    assert notes.stages == []
    _, notes = walk(path, *often, until="pretrain")
    assert notes.stages == ["pretrain"]
    (warning,) = [line for line in notes.lines if "max_epochs" in line]
    assert "warning: source text: max_epochs is 4.5; above 4 passes" in warning


def test_files_of_a_folder_that_are_not_read_make_nothing_be_done_again(tiny, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    path = tiny(sft=None, corpus={"sources": [{"name": "text", "path": "texts"}]})
    (folder / "a.jsonl").write_bytes((tmp_path / "text.jsonl").read_bytes())
    (folder / "notes.pdf").write_text("x")
    _, notes = walk(path, until="corpus")
    assert f"warning: source text: {folder}: not read: 1 other kind" in notes.lines
    (folder / "notes.pdf").write_text("something else")
    (folder / "empty.txt").touch()
    (folder / "link.txt").symlink_to(tmp_path / "text.jsonl")
    _, notes = walk(path, until="corpus")
    assert notes.stages == []
    assert f"warning: source text: {folder}: not read: 1 empty, 1 link, 1 other kind" in notes.lines
    (folder / "empty.txt").write_text("A text that was empty before and has enough of words in it to be kept.")
    _, notes = walk(path, until="corpus")
    assert notes.stages == ["corpus"]


@pytest.mark.parametrize("gone", ["corpus/text", "tokenizer/files", "shards/heldout", "shards/train/manifest.json"])
def test_a_finished_stage_whose_results_are_gone_is_done_again(tiny, gone):
    path = tiny(sft=None)
    road, _ = walk(path, until="shards")
    target = road.run.path / gone
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    _, notes = walk(path, until="shards")
    assert gone.split("/")[0] in notes.stages
    assert (road.run.path / gone).exists()


def test_what_is_measured_depends_on_the_conversations(tiny, tmp_path):
    road, _ = walk(tiny(), until="sft")
    before = evaluate_inputs(road)
    with (tmp_path / "talk.jsonl").open("a") as file:
        file.write("\n")
    assert evaluate_inputs(Road(road.recipe)) != before


def test_what_is_measured_depends_on_the_length_that_documents_are_cut_to(tiny):
    road, _ = walk(tiny(sft=None), until="pretrain")
    pretrain = road.recipe.pretrain.model_copy(update={"sequence_length": road.recipe.pretrain.sequence_length // 2})
    shorter = Road(road.recipe.model_copy(update={"pretrain": pretrain}))
    assert evaluate_inputs(shorter) != evaluate_inputs(road)


def test_a_refused_recipe_does_not_take_the_place_of_the_runs_own(tiny):
    path = tiny(sft=None)
    road, _ = walk(path, until="pretrain")
    before = road.run.recipe.read_text()
    with pytest.raises(UserError):
        walk(path, "pretrain.learning_rate=1e-4", until="pretrain")
    assert road.run.recipe.read_text() == before
    walk(path, "pretrain.learning_rate=1e-4", until="shards")
    assert road.run.recipe.read_text() == before, "no checkpoint has it"
    manifest = road.run.stage("pretrain").manifest()
    assert manifest is not None, "what was refused changed nothing about the finished stage"
    with pytest.raises(UserError):
        walk(path, "pretrain.learning_rate=1e-4", until="pretrain")
    assert road.run.stage("pretrain").manifest() == manifest


def test_figures_of_an_earlier_model_are_not_told_as_this_ones(tiny):
    path = tiny()
    road, _ = walk(path)
    assert "chat model:" in summary(road)
    road, _ = walk(path, "pretrain.steps=6", until="pretrain")
    assert "bits per byte" not in summary(road)
    assert "what was measured are earlier models" in summary(road)
    path = tiny(sft=None)
    assert "chat model:" not in summary(walk(path, "pretrain.steps=6", until="pretrain")[0])
    road, _ = walk(path, "pretrain.steps=6")
    assert "held-out bits per byte: untrained" in summary(road)
    figures = json.loads((road.folder("report") / "report.json").read_text())
    assert (road.run.checkpoints("sft") / "last").exists()
    assert list(figures["training"]) == ["pretrain"]
    assert "sft" not in {stage["stage"] for stage in figures["stages"]} | figures["measured"]["seconds"].keys()


def test_a_base_model_with_nothing_held_out_is_finished_too(tiny):
    road, notes = walk(tiny(sft=None, corpus={"heldout_fraction": 0.0}))
    assert notes.stages == ["corpus", "tokenizer", "shards", "pretrain", "evaluate", "report"]
    assert "bits per byte" not in summary(road)


def test_what_cannot_be_measured_is_left_out_with_its_reason_and_costs_nothing_else(tiny, tmp_path):
    path = tiny(evaluate={"max_new_tokens": 200})
    long = "What does the keeper of the harbour write into the second book of the house, and who is to read it? "
    talks = [
        [{"role": "user", "content": f"Number {n}: {long * 3}"}, {"role": "assistant", "content": "He writes."}]
        for n in range(40)
    ]
    (tmp_path / "talk.jsonl").write_text("\n".join(json.dumps({"messages": talk}) for talk in talks) + "\n")
    question = "Whom did she see at the gate of the old town? " * 40
    item = {"id": "1", "question": question, "choices": ["Him", "Her"], "answer": 0, "kind": "recall"}
    (tmp_path / "questions.jsonl").write_text(json.dumps(item) + "\n")
    road, notes = walk(path)
    assert notes.stages == NAMES
    results = json.loads((road.folder("evaluate") / "results.json").read_text())
    assert set(results["heldout"]) == {"untrained", "base", "chat"}
    assert results["choices"] == {}
    assert (results["answers"]["chat"], results["samples"]) == (None, [])
    assert set(results["answers"]["loss"]) == {"base", "chat", "chat_shuffled"}
    missing = results["not_measured"]
    assert missing.keys() == {f"multiple choice, {name} model" for name in ("base", "chat")} | {
        "answers to held-out prompts"
    }
    assert "lower evaluate.max_new_tokens" in missing["answers to held-out prompts"]
    assert "evaluate.items" in missing["multiple choice, base model"]
    for told in (summary(road), (road.folder("report") / "index.html").read_text()):
        assert all(reason in told for reason in missing.values())


def test_a_file_whose_name_is_no_text_is_read_like_any_other(tiny, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    path = tiny(sft=None, corpus={"sources": [{"name": "text", "path": "texts"}]})
    (folder / "plain.jsonl").write_bytes((tmp_path / "text.jsonl").read_bytes())
    (folder / os.fsdecode(b"caf\xe9.txt")).write_text("A text whose file has a name that is not UTF-8. " * 5)
    road, _ = walk(path, until="corpus")
    assert (road.folder("corpus") / "text").exists()
