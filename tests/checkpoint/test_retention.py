import shutil
from pathlib import Path

import pytest

from modicum.checkpoint import best_of, load_checkpoint, mark_best, prune
from modicum.store import UserError


def steps(root):
    return sorted(int(path.name[5:]) for path in root.glob("step-*"))


def test_the_newest_few_every_nth_and_the_best_stay(save, tmp_path):
    folders = {step: save(step=step) for step in range(10, 80, 10)}
    mark_best(tmp_path, folders[20])
    prune(tmp_path, keep_last=2, keep_every_steps=40)
    assert steps(tmp_path) == [20, 40, 60, 70]
    assert best_of(tmp_path) == folders[20].resolve()


def test_one_checkpoint_is_never_pruned_away(save, tmp_path):
    save(step=10)
    assert prune(tmp_path, keep_last=1, keep_every_steps=None) == []


def test_the_best_link_moves_in_one_step_and_can_move_back(save, tmp_path):
    first, second = save(step=10), save(step=20)
    mark_best(tmp_path, first)
    mark_best(tmp_path, second)
    assert best_of(tmp_path) == second.resolve()
    mark_best(tmp_path, first)
    assert best_of(tmp_path) == first.resolve()


def test_there_is_no_best_before_one_is_marked(tmp_path):
    assert best_of(tmp_path) is None


@pytest.mark.parametrize("link", ["last", "best"])
def test_links_are_relative_so_that_a_run_can_be_moved(save, tmp_path, link):
    mark_best(tmp_path, save(step=10))
    assert (tmp_path / link).readlink().name == str((tmp_path / link).readlink())


def test_folders_that_copying_made_of_the_links_become_links_again(save, tmp_path):
    """`scp -r` follows links."""
    here, there = tmp_path / "here", tmp_path / "there"
    mark_best(here, save(step=10, root=here))
    shutil.copytree(here, there)
    assert not (there / "last").is_symlink()
    mark_best(there, save(step=20, root=there))
    assert {(there / link).readlink() for link in ("last", "best")} == {Path("step-00000020")}
    assert sorted(path.name for path in there.iterdir()) == ["best", "last", "step-00000010", "step-00000020"]
    assert load_checkpoint(there / "step-00000010").step == 10


@pytest.mark.parametrize("beside", ["nothing", "a damaged one"])
def test_a_folder_in_the_place_of_a_link_that_may_be_the_only_copy_stays(save, tmp_path, beside):
    root = tmp_path / "there"
    folder = save(step=10, root=tmp_path / "here")
    shutil.copytree(folder, root / "last")
    if beside == "a damaged one":
        shutil.copytree(folder, root / folder.name)
        (root / folder.name / "model.safetensors").write_bytes(b"")
    before = {path: path.read_bytes() for path in (root / "last").rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"last: a folder in the place of a link, .* move it away"):
        save(step=30, root=root)
    assert {path: path.read_bytes() for path in (root / "last").rglob("*") if path.is_file()} == before
