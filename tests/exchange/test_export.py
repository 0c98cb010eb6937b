import errno
import json

import foreign_models
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from modicum.checkpoint import load_checkpoint, save_checkpoint
from modicum.exchange import export_checkpoint, exporting, import_checkpoint
from modicum.model import Decoder, ModelConfig
from modicum.store import UserError, hash_file
from modicum.store.manifest import read_manifest

SIZES = {
    "vocab_size": 384, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 80,
    "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def checkpoint(tokenizer, tmp_path):
    """A function that saves a decoder; keyword arguments go into its config."""

    def checkpoint(*, chat=False, **changes):
        model = Decoder(ModelConfig(**{**SIZES, **changes}))
        return save_checkpoint(
            tmp_path / "ours", 1, config=model.config, weights=model.state_dict(), tokenizer=tokenizer, chat=chat,
            training=None,
        )  # fmt: skip

    return checkpoint


@pytest.mark.parametrize("changes", [{}, {"tied": False, "bias": True}, {"dtype": torch.bfloat16}])
def test_what_was_imported_leaves_as_it_came_bit_for_bit(changes, foreign, tmp_path):
    path, weights = foreign("cyberslm", **changes)
    import_checkpoint(path, dialect="cyberslm", out=tmp_path / "ours")
    report = export_checkpoint(tmp_path / "ours", out=tmp_path / "theirs")
    found = torch.load(tmp_path / "theirs" / "model.pt", weights_only=True)
    assert found["model_state"].keys() == weights.keys()
    assert all(torch.equal(found["model_state"][name], weight) for name, weight in weights.items())
    assert found["config"] == {**torch.load(path, weights_only=True)["config"], "pad_token_id": 0}
    assert json.loads((tmp_path / "theirs" / "config.json").read_text()) == found["config"]
    assert report.tensors == len(weights)
    assert [one.tokens for one in report.compared] == [1, 2, 7, 40]


def test_the_sentencepiece_model_goes_with_a_checkpoint_that_has_it_and_with_no_other(
    foreign, sentencepiece_model, checkpoint, tmp_path
):
    path, _ = foreign("cyberslm")
    import_checkpoint(path, dialect="cyberslm", out=tmp_path / "ours")
    assert read_manifest(tmp_path / "ours")["tokenizer.model"] == hash_file(path.parent / "tokenizer.model")
    report = export_checkpoint(tmp_path / "ours", out=tmp_path / "theirs")
    assert (tmp_path / "theirs" / "tokenizer.model").read_bytes() == sentencepiece_model
    assert report.notes == ()
    import_checkpoint(tmp_path / "theirs", dialect="cyberslm", out=tmp_path / "again")
    files = sorted(file.name for file in (tmp_path / "ours").iterdir())
    assert files == sorted(file.name for file in (tmp_path / "again").iterdir())
    assert all((tmp_path / "ours" / name).read_bytes() == (tmp_path / "again" / name).read_bytes() for name in files)

    other = checkpoint(chat=True)
    (other / "tokenizer.model").write_bytes(sentencepiece_model)  # of another model: no manifest names it
    report = export_checkpoint(other, out=tmp_path / "without")
    assert not (tmp_path / "without" / "tokenizer.model").exists()
    assert report.notes == (
        "no tokenizer.model: the checkpoint has none; its ids are those of tokenizer.json",
        "an answer ends at '<|im_end|>' here too; the config has one eos_token_id, so its reader must be told",
    )


def test_a_damaged_sentencepiece_model_does_not_go_out(foreign, tmp_path):
    path, _ = foreign("cyberslm")
    import_checkpoint(path, dialect="cyberslm", out=tmp_path / "ours")
    (tmp_path / "ours" / "tokenizer.model").write_bytes(b"another")
    with pytest.raises(UserError, match=r"tokenizer\.model: damaged"):
        export_checkpoint(tmp_path / "ours", out=tmp_path / "theirs")


def test_a_template_that_went_out_comes_back(checkpoint, tmp_path):
    folder = checkpoint()
    export_checkpoint(folder, out=tmp_path / "theirs")
    import_checkpoint(tmp_path / "theirs", dialect="cyberslm", out=tmp_path / "again")
    first, second = (load_checkpoint(place).tokenizer for place in (folder, tmp_path / "again"))
    assert second.chat_template == first.chat_template
    assert (second.hash, second.end_of_turn_id) == (first.hash, first.end_of_turn_id)


def test_what_was_exported_says_in_its_own_words_what_the_checkpoint_says(checkpoint, ids, tmp_path):
    folder = checkpoint(rms_norm_eps=foreign_models.EPS, rope_theta=foreign_models.THETA, num_hidden_layers=3)
    export_checkpoint(folder, out=tmp_path / "theirs")
    state = torch.load(tmp_path / "theirs" / "model.pt", weights_only=True)["model_state"]
    with torch.no_grad():
        wanted = load_checkpoint(folder).model()(torch.from_numpy(ids(21))[None])[0].numpy()
    np.testing.assert_allclose(foreign_models.logits("cyberslm", state, ids(21)), wanted, rtol=0, atol=1e-5)


def test_what_was_exported_comes_back_bit_for_bit(checkpoint, tmp_path):
    folder = checkpoint(tie_word_embeddings=False)
    export_checkpoint(folder, out=tmp_path / "theirs")
    import_checkpoint(tmp_path / "theirs", dialect="cyberslm", out=tmp_path / "again")
    first, second = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "again"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads 2: its 4 heads have each their own keys"),
        ({"head_dim": 16}, "head_dim 16"),
        ({"qk_norm": True}, "qk_norm"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling linear"),
        ({"attention_bias": True}, "attention_bias and mlp_bias"),
        ({"mlp_bias": True}, "attention_bias and mlp_bias"),
    ],
)
def test_what_the_dialect_has_no_word_for_is_refused_by_name(changes, word, checkpoint, tmp_path):
    with pytest.raises(UserError, match=f"cyberslm cannot express this model\n  {word}"):
        export_checkpoint(checkpoint(**changes), out=tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize("damage", ["rows", "number"])
def test_a_file_that_reads_back_differently_is_not_written(damage, checkpoint, tmp_path, monkeypatch):
    write = exporting.write_torch_file

    def damaged(path, content):
        state = content["model_state"]
        if damage == "rows":
            rows = state["layers.0.attn.q_proj.weight"]
            state["layers.0.attn.q_proj.weight"] = rows.roll(1, 0)
        else:
            state["final_norm.weight"] = state["final_norm.weight"] + 1e-3
        write(path, content)

    monkeypatch.setattr(exporting, "write_torch_file", damaged)
    name = "self_attn.q_proj.weight" if damage == "rows" else "model.norm.weight"
    with pytest.raises(UserError, match=f"read back, .*{name} differ from the checkpoint's"):
        export_checkpoint(checkpoint(), out=tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()


def test_rows_left_in_our_own_order_are_refused_by_the_gate(checkpoint, tmp_path, monkeypatch):
    # read back in the same wrong way they are bit-equal; only the logits tell
    monkeypatch.setattr("modicum.exchange.exporting.relaid", lambda weights, **_: dict(weights))
    with pytest.raises(UserError, match="theirs: does not say what its source says"):
        export_checkpoint(checkpoint(initializer_range=0.3), out=tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()


def test_a_full_disk_is_told_with_the_file_and_nothing_stays(checkpoint, tmp_path, monkeypatch):
    folder = checkpoint()

    def full(_, file):
        file.write(b"a part")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("modicum.exchange.torch_file.torch.save", full)
    with pytest.raises(OSError, match=r"No space left on device: .*model\.pt"):
        export_checkpoint(folder, out=tmp_path / "theirs")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["ours"]


def test_a_folder_in_use_is_not_exported_over(checkpoint, tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "mine.txt").write_text("keep")
    with pytest.raises(UserError, match="theirs: is not empty"):
        export_checkpoint(checkpoint(), out=tmp_path / "theirs")
    assert [file.name for file in (tmp_path / "theirs").iterdir()] == ["mine.txt"]
