import pytest

from modicum.checkpoint import best_of, mark_best, prune


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
