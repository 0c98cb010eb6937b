"""Whose texts judge, in which order of preference, and that they are always the same ones."""

import json

import numpy as np
import pytest
import zstandard

from modicum.checkpoint import load_checkpoint, save_checkpoint
from modicum.evaluate.beside import judged
from modicum.evaluate.texts import Texts, judging_texts, run_of
from modicum.store import Stage, UserError, hash_file, hash_json

LINES = [f"Fact {number}: a port is a number, and a number names a service of this machine." for number in range(60)]


@pytest.fixture
def saved(tokenizer, model):
    """A function: a checkpoint in this folder."""

    def saved(folder):
        weights = model.state_dict()
        return load_checkpoint(
            save_checkpoint(
                folder, 1, config=model.config, weights=weights, tokenizer=tokenizer, chat=False, training=None
            )
        )

    return saved


@pytest.fixture
def run(saved, tmp_path):
    """A run's folder with held-out text, and its checkpoint."""
    checkpoint = saved(tmp_path / "mine" / "pretrain" / "checkpoints")
    (tmp_path / "mine" / "recipe.yaml").write_text("name: mine\n")
    heldout = tmp_path / "mine" / "corpus" / "text" / "heldout"
    heldout.mkdir(parents=True)
    documents = [
        {"id": str(number), "text": line, "source": "s", "domain": "d", "licence": None}
        for number, line in enumerate(LINES)
    ]
    packed = zstandard.compress("\n".join(map(json.dumps, documents)).encode())
    (heldout / "s.jsonl.zst").write_bytes(packed)
    _finish(tmp_path / "mine")
    return checkpoint


def _finish(run):
    """Manifests that say of each stage what it was made from."""
    for place in ("corpus/text", "shards/train", "shards/heldout", "pretrain/checkpoints/last"):
        (run / place).mkdir(parents=True, exist_ok=True)
        (run / place / "manifest.json").write_text(json.dumps({"files": place}))
    hashes = {split: hash_file(run / "shards" / split / "manifest.json") for split in ("train", "heldout")}
    for stage, inputs in {
        "shards": {"corpus": hash_file(run / "corpus" / "text" / "manifest.json")},
        "pretrain": {"shards": hash_json(hashes)},
        "sft": {"base": hash_file(run / "pretrain" / "checkpoints" / "last" / "manifest.json")},
    }.items():
        with Stage(run / stage).record(inputs, code_version="1", seed=0, device=lambda: "cpu"):
            pass


def texts_of(tokenizer, found):
    return {tokenizer.decode(row[1:].tolist()) for row in found.rows}


def test_the_held_out_text_of_its_run_judges_a_checkpoint(run, tokenizer):
    found = judging_texts(run, texts=8, tokens=64)
    assert found.source == "held-out text of mine"
    assert len(found.rows) == 8
    assert all(any(line.startswith(text) for line in LINES) for text in texts_of(tokenizer, found))
    assert {int(row[0]) for row in found.rows} == {tokenizer.bos_id}


@pytest.mark.parametrize("stage", ["pretrain", "sft"])
@pytest.mark.parametrize(
    "place",
    [
        "corpus/text/manifest.json", "shards/train/manifest.json", "shards/heldout/manifest.json",
        "pretrain/checkpoints/last/manifest.json", "shards/manifest.json", "pretrain/manifest.json",
        "sft/manifest.json",
    ],
)  # fmt: skip
@pytest.mark.parametrize("gone", [True, False])
def test_text_that_may_have_been_trained_on_is_not_called_held_out(stage, place, gone, run, saved, tmp_path):
    checkpoint = run if stage == "pretrain" else saved(tmp_path / "mine" / "sft" / "checkpoints")
    assert judging_texts(checkpoint, texts=5, tokens=20).source == "held-out text of mine"
    if gone:
        (tmp_path / "mine" / place).unlink()
    else:
        (tmp_path / "mine" / place).write_text("{}")
    found = judging_texts(checkpoint, texts=5, tokens=20)
    after_the_base = place.startswith(("pretrain/checkpoints", "sft"))
    if stage == "pretrain" and after_the_base:
        assert found.source == "held-out text of mine"
    else:
        assert found.source.startswith("the model's own texts, for it may have been trained on the held-out text that")
        assert {len(row) for row in found.rows} == {20}


def test_what_the_user_names_goes_before_it(run, tokenizer, tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("Something else altogether, and long enough to be judged by. " * 80)
    found = judging_texts(run, file, texts=3, tokens=40)
    assert found.source == str(file)
    assert [len(row) for row in found.rows] == [40] * 3
    assert all("else" in text for text in texts_of(tokenizer, found))


def test_without_a_run_or_held_out_text_the_model_writes_them(run, saved, tmp_path):
    alone = saved(tmp_path / "alone")
    found = judging_texts(alone, texts=5, tokens=20)
    assert found.source == "the model's own texts"
    assert [len(row) for row in found.rows] == [20] * 5
    assert len({tuple(row) for row in found.rows}) == 5
    (tmp_path / "mine" / "corpus" / "text" / "heldout" / "s.jsonl.zst").unlink()
    assert judging_texts(run, texts=5, tokens=20).source == "the model's own texts"


def test_they_are_the_same_whatever_order_they_stand_in_and_none_counts_twice(run, tmp_path):
    orders = [LINES, LINES[::-1], LINES * 50]
    found = []
    for number, lines in enumerate(orders):
        file = tmp_path / f"{number}.jsonl"
        file.write_text("\n".join(json.dumps({"text": line}) for line in lines))
        found.append(judging_texts(run, file, texts=10, tokens=30).rows)
    assert len({tuple(row) for row in found[0]}) == 10
    for rows in found[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(rows, found[0], strict=True))


def test_rows_end_where_the_context_does(run):
    assert {len(row) for row in judging_texts(run, texts=5, tokens=10_000).rows} <= set(range(2, 65))


def test_a_path_with_too_little_text_is_refused_and_one_that_is_not_there(run, tmp_path):
    (tmp_path / "short.txt").write_text("Too short.")
    with pytest.raises(UserError, match=r"--heldout .*short\.txt: \d+ tokens are too few to judge by"):
        judging_texts(run, tmp_path / "short.txt", texts=5, tokens=20)
    with pytest.raises(UserError, match=r"--heldout .*none\.txt: no such file"):
        judging_texts(run, tmp_path / "none.txt", texts=5, tokens=20)
    with pytest.raises(UserError, match="too few"):  # as few as were asked for, and no more is known by them
        judging_texts(run, tmp_path / "short.txt", texts=1, tokens=20)


def test_a_run_is_known_by_its_recipe_two_folders_above(run, saved, tmp_path):
    assert run_of(run.path) == tmp_path / "mine"
    assert run_of(saved(tmp_path / "pretrain" / "checkpoints").path) is None
    assert run_of(saved(tmp_path / "mine" / "other" / "checkpoints").path) is None


def test_bits_per_byte_are_those_of_equal_chances_and_of_certainty(tokenizer):
    said = "what a port is"
    row = np.array([tokenizer.bos_id, *tokenizer.encode(said)])
    even = np.full((len(row), tokenizer.vocab_size), 7.0)
    certain = even.copy()
    certain[np.arange(len(row) - 1), row[1:]] = 1000.0
    found = judged(Texts((row,), "mine"), tokenizer, [even], [certain])
    wanted = (len(row) - 1) * np.log2(tokenizer.vocab_size) / len(said)
    assert found.full_bits_per_byte == pytest.approx(wanted)
    assert found.bits_per_byte == pytest.approx(0)
    assert (found.texts, found.source, found.quality.positions) == (1, "mine", len(row))


def test_control_tokens_of_a_text_that_a_model_wrote_are_no_bytes_of_it(tokenizer):
    """It goes on after the end of a text, which is predicted, and is nobody's text."""
    said = "what a port is"
    ids = tokenizer.encode(said)
    row = np.array([tokenizer.bos_id, *ids, tokenizer.eot_id, *ids, tokenizer.end_of_turn_id])
    even = np.full((len(row), tokenizer.vocab_size), 7.0)
    found = judged(Texts((row,), "mine"), tokenizer, [even], [even])
    assert found.bits_per_byte == pytest.approx((len(row) - 1) * np.log2(tokenizer.vocab_size) / (2 * len(said)))
