"""safetensors, shards with an index, and folders, as they come from elsewhere."""

import json
import os
import struct

import foreign_models
import pytest
import torch
from safetensors.torch import save_file

from modicum.exchange import import_checkpoint
from modicum.exchange.stored import find_stored
from modicum.store import UserError


@pytest.fixture
def folder(tokenizer, tmp_path):
    """A core model's folder: model.safetensors, config.json, tokenizer."""
    folder = tmp_path / "theirs"
    tokenizer.save(folder)
    (folder / "config.json").write_text(json.dumps(foreign_models.config("core", 384)))
    save_file(foreign_models.state("core", 384), folder / "model.safetensors")
    return folder


@pytest.fixture
def refused(folder, tmp_path):
    """A function: the message that importing the folder ends with; nothing may be written."""

    def refused(path=folder):
        with pytest.raises(UserError) as error:
            import_checkpoint(path, dialect="core", out=tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return str(error.value)

    return refused


@pytest.fixture
def sharded(folder):
    """A function that spreads the folder's weights over two files; returns the index's weight_map."""

    def sharded(changes=None, index="model.safetensors.index.json"):
        weights = foreign_models.state("core", 384)
        (folder / "model.safetensors").unlink()
        halves = {name: f"part-{place % 2}.safetensors" for place, name in enumerate(weights)}
        for part in set(halves.values()):
            save_file({name: weights[name] for name in weights if halves[name] == part}, folder / part)
        (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": {**halves, **(changes or {})}}))
        return halves

    return sharded


def test_shards_are_read_as_their_index_says(folder, sharded, tmp_path):
    sharded()
    report = import_checkpoint(folder, dialect="core", out=tmp_path / "out")
    assert report.tensors == len(foreign_models.state("core", 384))


@pytest.mark.parametrize("place", ["../part-0.safetensors", "/etc/passwd", "a/b.safetensors", "..", ""])
def test_an_index_that_points_outside_its_folder_is_refused(place, sharded, refused, tmp_path):
    sharded({"norm.weight": place})
    save_file(foreign_models.state("core", 384), tmp_path / "part-0.safetensors")
    assert f"model.safetensors.index.json: names a file outside its folder: {place!r}" in refused()


def test_an_index_that_names_a_missing_file_is_refused(sharded, refused):
    sharded({"norm.weight": "part-7.safetensors"})
    assert "index.json: names part-7.safetensors, which" in refused()


def test_an_index_that_disagrees_with_its_files_is_refused(sharded, refused):
    halves = sharded({"embedding.weight": "part-1.safetensors", "more.weight": "part-0.safetensors"})
    assert halves["embedding.weight"] == "part-0.safetensors"
    assert refused().splitlines()[1:] == [
        "  embedding.weight: not in part-1.safetensors",
        "  more.weight: not in part-0.safetensors",
        "  embedding.weight: in part-0.safetensors, but the index says part-1.safetensors",
    ]


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', "[" * 10**5])
def test_an_index_that_is_none_is_refused(content, folder, sharded, refused):
    sharded()
    (folder / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json: " in refused()


@pytest.mark.parametrize("keep", [0, 7, 100, 0.5, -1])
def test_a_safetensors_file_that_was_cut_off_is_refused(keep, folder, refused):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    assert "model.safetensors: not a whole safetensors file" in refused()


@pytest.mark.parametrize("shape", [[2**62], [2**31, 2**31], [2**62, 2**62], [-1]])
def test_an_absurd_shape_in_a_safetensors_header_is_refused(shape, folder, refused):
    header = json.dumps({"embedding.weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, 16]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    assert "model.safetensors: not a whole safetensors file" in refused()


def test_a_safetensors_header_of_absurd_size_is_refused(folder, refused):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}")
    assert "model.safetensors: not a whole safetensors file" in refused()


@pytest.mark.parametrize("kind", [torch.float64, torch.int8, torch.float8_e4m3fn])
def test_types_that_are_no_weights_are_refused_by_name(kind, folder, refused):
    weights = foreign_models.state("core", 384)
    save_file({**weights, "norm.weight": weights["norm.weight"].to(kind)}, folder / "model.safetensors")
    assert "norm.weight: is no plain tensor of float32, float16 or bfloat16" in refused()


def test_several_files_of_weights_must_be_told_apart(folder, refused, tmp_path):
    (folder / "model.safetensors").rename(folder / "early.safetensors")
    save_file(foreign_models.state("core", 384), folder / "late.safetensors")
    assert "(early.safetensors, late.safetensors); name the file" in refused()
    import_checkpoint(folder / "late.safetensors", dialect="core", out=tmp_path / "out")


def test_a_folder_without_weights_and_a_path_to_nothing_are_refused(folder, refused):
    (folder / "model.safetensors").unlink()
    assert "theirs: has no file of weights" in refused()
    assert "nowhere: no such file or folder" in refused(folder / "nowhere")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_in_place_of_a_file_is_never_opened(name, folder, refused):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert name.split(".")[0] in refused() or "no file of weights" in refused()


def test_a_folder_of_links_into_a_cache_is_read(folder, tmp_path):
    for file in list(folder.iterdir()):
        file.rename(tmp_path / f"blob-{file.name}")
        file.symlink_to(tmp_path / f"blob-{file.name}")
    import_checkpoint(folder, dialect="core", out=tmp_path / "out")


@pytest.mark.parametrize("content", ["", "[1]", '{"n_embd": 48}', "\xff"])
def test_a_config_that_is_none_is_refused(content, folder, refused):
    (folder / "config.json").write_bytes(content.encode("latin-1"))
    assert "config.json: " in refused()


def test_a_config_larger_than_any_is_not_read(folder, refused, monkeypatch):
    monkeypatch.setattr("modicum.store.reading.LARGEST", 100)
    assert "config.json: larger than" in refused()
    assert folder.exists()


def test_looking_at_a_checkpoint_reads_no_numbers(folder):
    stored = find_stored(folder)
    assert stored.claims["norm.weight"].shape == (48,)
    assert stored.claims["norm.weight"].dtype is torch.float32
