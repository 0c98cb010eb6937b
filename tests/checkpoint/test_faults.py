import errno
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from modicum.checkpoint import load_checkpoint, newest
from modicum.store import UserError, remove_leftovers, verify_manifest, write_manifest


def names(folder):
    return sorted(path.name for path in folder.iterdir())


FILES = [
    "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    "chat_template.jinja", "training/optimizer.safetensors", "training/state.json",
]  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit_is_refused_by_file(save, name):
    folder = save()
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(UserError, match=f"{name}: damaged"):
        load_checkpoint(folder)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("size", [0, 1, 40])
def test_a_truncated_file_is_refused_by_file_also_without_the_hashes(save, name, size):
    folder = save()
    with (folder / name).open("r+b") as file:
        file.truncate(size)
    with pytest.raises(UserError, match=name):
        load_checkpoint(folder)
    if name.endswith((".safetensors", "config.json", "state.json")) and name != "tokenizer_config.json":
        with pytest.raises(UserError, match=name):
            _ = load_checkpoint(folder, verify=False).training


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_refused_by_file(save, name):
    folder = save()
    (folder / name).unlink()
    with pytest.raises(UserError, match=name):
        load_checkpoint(folder)


def test_what_is_no_checkpoint_is_said_to_be_none(tmp_path):
    with pytest.raises(UserError, match="no such checkpoint"):
        load_checkpoint(tmp_path / "nowhere")
    with pytest.raises(UserError, match="not a checkpoint"):
        load_checkpoint(tmp_path)


def test_another_programs_model_is_told_from_a_checkpoint_and_the_way_in_is_named(save):
    folder = save()
    (folder / "manifest.json").unlink()
    with pytest.raises(UserError, match=rf"^{folder}: has no manifest.json.*`modicum import {folder} --dialect hf"):
        load_checkpoint(folder)


def test_every_missing_extra_and_misshapen_tensor_is_listed(save, small):
    folder = save(model=small())
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": 3, "intermediate_size": 48, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    write_manifest(folder)
    with pytest.raises(UserError) as error:
        load_checkpoint(folder)
    text = str(error.value)
    assert "model.layers.2.mlp.up_proj.weight: missing" in text
    assert "lm_head.weight: missing" in text
    assert "model.layers.0.mlp.up_proj.weight: has shape [64, 32], config.json asks for [48, 32]" in text
    config |= {"num_hidden_layers": 1, "intermediate_size": 64, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    write_manifest(folder)
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.up_proj\.weight: not part of this model"):
        load_checkpoint(folder)


HEADERS = {
    "a header larger than the file": (2**40).to_bytes(8, "little") + b"{}",
    "a header that is no JSON": (8).to_bytes(8, "little") + b"notjson!",
    "an offset beyond the end": b'{"x":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
    "an absurd shape": b'{"x":{"dtype":"F32","shape":[4611686018427387904,8],"data_offsets":[0,0]}}',
    "a pickle": b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
}


@pytest.mark.parametrize("kind", HEADERS)
def test_hostile_weights_are_refused_by_file(save, kind):
    folder = save()
    data = HEADERS[kind]
    if data.startswith(b"{"):
        data = len(data).to_bytes(8, "little") + data
    (folder / "model.safetensors").write_bytes(data)
    write_manifest(folder)
    with pytest.raises(UserError, match=r"model\.safetensors"):
        load_checkpoint(folder)


def test_a_link_out_of_the_checkpoint_is_refused_by_file(save, tmp_path):
    folder = save()
    (folder / "model.safetensors").rename(tmp_path / "elsewhere")
    (folder / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    for verify in (True, False):
        with pytest.raises(UserError, match=r"model\.safetensors: a link out of the checkpoint"):
            load_checkpoint(folder, verify=verify)


def test_a_checkpoint_reached_through_a_link_is_loaded(save, tmp_path):
    save(step=10)
    assert load_checkpoint(tmp_path / "last").step == 10


def test_the_newest_whole_checkpoint_is_found_behind_a_damaged_one(save, tmp_path):
    good, bad = save(step=10), save(step=20)
    (bad / "model.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match=r"step-00000020/model\.safetensors"):
        assert newest(tmp_path) == good


def test_what_only_has_the_name_of_a_checkpoint_is_passed_over(save):
    folder = save()
    (folder.parent / "step-99999999.tar").write_bytes(b"")
    (folder.parent / "step-copy").mkdir()
    assert newest(folder.parent) == folder


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "manifest.json"])
def test_endless_brackets_are_refused_by_file(save, name):
    folder = save()
    (folder / name).write_text('{"a":' + "[" * 200_000)
    with pytest.raises(UserError, match=name):
        load_checkpoint(folder, verify=name == "manifest.json")


def test_no_checkpoint_at_all_is_none(tmp_path):
    assert newest(tmp_path) is None


def test_a_disk_that_fills_up_during_a_save_costs_only_that_save(save, tmp_path, monkeypatch):
    good = save(step=10)
    before = (good / "manifest.json").read_bytes()
    real, calls = os.fsync, 0
    for fails_at in range(1, 40):
        calls = 0

        def full(descriptor, limit=fails_at):
            nonlocal calls
            calls += 1
            if calls == limit:
                raise OSError(errno.ENOSPC, "No space left on device")
            real(descriptor)

        monkeypatch.setattr(os, "fsync", full)
        failed = False
        try:
            save(step=20)
        except OSError as error:
            failed = error.errno == errno.ENOSPC
        finally:
            monkeypatch.setattr(os, "fsync", real)
        if not failed:
            break  # more calls than a save makes: every one of them has failed once
        verify_manifest(good)
        assert (good / "manifest.json").read_bytes() == before
        assert (tmp_path / "last").resolve().name in ("step-00000010", "step-00000020")
        verify_manifest(tmp_path / "last")
    assert fails_at > 10
    assert load_checkpoint(tmp_path / "last").step == 20


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounting a small file system needs root")
def test_a_really_full_disk_leaves_the_checkpoint_before(save, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", disk], check=False).returncode:
        pytest.skip("this container does not let root mount")
    try:
        good = save(step=1, root=disk)
        with pytest.raises((OSError, UserError), match=r"(?i)space"):
            for step in range(2, 30):
                save(step=step, root=disk)
        verify_manifest(good)
        assert not [name for name in names(disk) if name.startswith(".tmp-step")]
        verify_manifest(disk / "last")
    finally:
        subprocess.run(["umount", disk], check=True)


# Saves step 20 again and again, each time in a copy of `before`, killed one flush or rename later, until one is whole.
KILLS = """
import itertools, os, pathlib, shutil, signal, sys, torch, traceback
from modicum.checkpoint import TrainingState, load_checkpoint, save_checkpoint
root = pathlib.Path(sys.argv[1])
loaded = load_checkpoint(root / "before" / "last")
weights, training = loaded.weights, TrainingState({"moment": torch.zeros(1)}, {"step": 20})
left = 0
def deadly(function):
    def wrapped(*args, **kwargs):
        global left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return wrapped
for call in itertools.count(1):
    folder = root / f"{call:03}"
    shutil.copytree(root / "before", folder, symlinks=True)
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status != -signal.SIGKILL:
            sys.exit(status)
        continue
    try:
        left = call
        os.fsync, os.replace, pathlib.Path.rename = map(deadly, (os.fsync, os.replace, pathlib.Path.rename))
        save_checkpoint(
            folder, 20, config=loaded.config, weights=weights, tokenizer=loaded.tokenizer, chat=False, training=training
        )
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
"""


def test_a_kill_at_any_flush_or_rename_leaves_a_loadable_newest_checkpoint(save, tmp_path):
    save(step=10, root=tmp_path / "before")
    process = subprocess.run([sys.executable, "-c", KILLS, tmp_path], check=False, stderr=subprocess.PIPE, text=True)
    assert process.returncode == 0, process.stderr
    *killed, whole = sorted(path for path in tmp_path.iterdir() if path.name != "before")
    assert names(whole) == ["last", "step-00000010", "step-00000020"]
    found = []
    for folder in killed:
        verify_manifest(folder / "last")
        found.append((load_checkpoint(newest(folder)).step, load_checkpoint(folder / "last").step))
        remove_leftovers(folder)
        assert names(folder) == ["last", *(path.name for path in sorted(folder.glob("step-*")))]
        save(step=30, root=folder)
        assert names(folder)[-1] == "step-00000030"
        assert load_checkpoint(folder / "last").step == 30
    # killed before the folder had its name, before the link was moved, and after it
    assert list(dict.fromkeys(found)) == [(10, 10), (20, 10), (20, 20)]


def test_a_moved_copy_of_a_checkpoint_loads(save, tmp_path):
    shutil.copytree(save(), tmp_path / "elsewhere")
    assert torch.equal(load_checkpoint(tmp_path / "elsewhere").weights["model.norm.weight"], torch.ones(32))
