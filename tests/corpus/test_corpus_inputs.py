import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.corpus.inputs import assign_parts, find_files
from modicum.recipe import SourceSettings
from modicum.store import UserError


def source(path):
    return SourceSettings(name="a", path=path)


def test_a_folder_with_everything_odd_in_it_gives_its_texts_and_counts_the_rest(tmp_path, monkeypatch):
    root, outside = tmp_path / "in", tmp_path / "outside"
    (root / "deep").mkdir(parents=True)
    outside.mkdir()
    for name in ("b.txt", "deep/a.md", "c.jsonl.gz", "d.txt.zst", "e.parquet"):
        (root / name).write_text("x")
    (outside / "secret.txt").write_text("x")
    (root / "empty.txt").touch()
    (root / "picture.png").write_text("x")
    (root / "f.parquet.gz").write_text("x")
    (root / ".hidden.txt").write_text("x")
    (root / "dangling.txt").symlink_to(root / "nowhere.txt")
    (root / "escape.txt").symlink_to(outside / "secret.txt")
    (root / "escape").symlink_to(outside)
    (root / "circle").symlink_to(root)
    os.mkfifo(root / "pipe.txt")
    monkeypatch.chdir(root)  # a socket's name has at most 108 bytes
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket.txt")
        files = find_files(source(root))
    assert files.names == ["b.txt", "c.jsonl.gz", "d.txt.zst", "deep/a.md", "e.parquet"]
    assert files.skipped == {"empty": 1, "hidden": 1, "link": 4, "other kind": 2, "special file": 2}


def test_files_come_in_the_order_of_their_names_whatever_the_file_system_says(tmp_path, monkeypatch):
    for name in ("b.txt", "a.txt", "c.txt"):
        (tmp_path / name).write_text("x")
    real = os.scandir
    for reverse in (False, True):
        monkeypatch.setattr(
            os, "scandir", lambda folder, r=reverse: sorted(real(folder), key=lambda e: e.name, reverse=r)
        )
        assert find_files(source(tmp_path)).names == ["a.txt", "b.txt", "c.txt"]


def test_a_single_file_is_a_source(tmp_path):
    (tmp_path / "a.md").write_text("x")
    files = find_files(source(tmp_path / "a.md"))
    assert (files.root, files.names) == (tmp_path, ["a.md"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p.mkdir(), r"no \.jsonl, \.md, \.parquet or \.txt file in it$"),
        (lambda p: (p.mkdir(), (p / "a.txt").touch()), r"no .* file in it \(skipped: 1 empty\)"),
        (lambda p: p.touch(), r"an empty file"),
    ],
)
def test_a_source_without_text_is_named_with_what_is_there(tmp_path, make, message):
    make(tmp_path / "in.txt")
    with pytest.raises(UserError, match=rf"source a: .*in\.txt: {message}"):
        find_files(source(tmp_path / "in.txt"))


def test_a_source_that_went_away_is_named(tmp_path):
    settings = source(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(UserError, match=r"source a: .*no file or folder of this name"):
        find_files(settings)


def test_a_single_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "a.pdf").write_text("x")
    with pytest.raises(UserError, match=r"a\.pdf: expected .*\.parquet"):
        find_files(source(tmp_path / "a.pdf"))


@given(st.lists(st.integers(0, 10**9)), st.integers(1, 50))
def test_parts_are_runs_of_consecutive_files(sizes, parts):
    chosen = assign_parts(sizes, parts)
    assert len(chosen) == len(sizes)
    assert chosen == sorted(chosen)
    assert all(0 <= part < parts for part in chosen)


def test_parts_are_about_equally_large():
    chosen = assign_parts([10] * 100, 4)
    assert [chosen.count(part) for part in range(4)] == [25, 25, 25, 25]
