import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from modicum.store import (
    UserError,
    atomic_directory,
    refuse_taken,
    remove_leftovers,
    write_bytes,
    write_json,
    write_text,
)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_appears_whole_under_its_name(tmp_path):
    with atomic_directory(tmp_path / "a" / "final") as work:
        (work / "x").write_text("1")
        assert not (tmp_path / "a" / "final").exists()
    assert names(tmp_path / "a") == ["final"]
    assert (tmp_path / "a" / "final" / "x").read_text() == "1"


def test_a_failure_inside_leaves_the_old_folder_and_nothing_else(tmp_path):
    final = tmp_path / "final"
    final.mkdir()
    (final / "x").write_text("old")
    with pytest.raises(RuntimeError), atomic_directory(final) as work:
        (work / "x").write_text("new")
        raise RuntimeError
    assert names(tmp_path) == ["final"]
    assert (final / "x").read_text() == "old"


def test_a_folder_is_replaced_whole(tmp_path):
    final = tmp_path / "final"
    final.mkdir()
    (final / "gone").write_text("old")
    with atomic_directory(final) as work:
        (work / "x").write_text("new")
    assert names(tmp_path) == ["final"]
    assert names(final) == ["x"]


def test_a_write_that_fails_keeps_the_old_bytes(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_text(path, "old")

    def full(_descriptor):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_bytes(path, b"new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_json_that_json_cannot_say_is_refused(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "x.json", {"loss": float("nan")})
    assert names(tmp_path) == []


def test_a_kill_between_the_two_renames_loses_neither_folder(tmp_path):
    aside = tmp_path / ".aside-final"
    aside.mkdir()
    (aside / "x").write_text("old")
    (tmp_path / ".tmp-final").mkdir()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["final"]
    assert (tmp_path / "final" / "x").read_text() == "old"


def test_a_link_left_behind_is_cleared_and_what_it_leads_to_stays(tmp_path):
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "x").write_text("1")
    for name in ("last", ".tmp-last", ".aside-last"):
        (tmp_path / name).symlink_to("step-1")
    (tmp_path / ".tmp-best").symlink_to("step-2")
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["last", "step-1"]
    assert (tmp_path / "last" / "x").read_text() == "1"


@pytest.mark.parametrize("call", ["fsync", "rename", "rmtree"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_kill_at_any_system_call_leaves_old_or_new_and_never_a_part(tmp_path, call, count):
    final = tmp_path / "final"
    final.mkdir()
    (final / "a").write_text("old")
    (final / "b").write_text("old")
    script = textwrap.dedent(f"""
        import os, pathlib, shutil, signal
        seen = 0
        def deadly(function):
            def wrapped(*args, **kwargs):
                global seen
                seen += 1
                if seen == {count}:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)
            return wrapped
        os.fsync = deadly(os.fsync) if {call!r} == "fsync" else os.fsync
        if {call!r} == "rename":
            pathlib.Path.rename = deadly(pathlib.Path.rename)
        if {call!r} == "rmtree":
            shutil.rmtree = deadly(shutil.rmtree)
        from modicum.store import atomic_directory
        with atomic_directory(pathlib.Path({str(final)!r})) as work:
            (work / "a").write_text("new")
            (work / "b").write_text("new")
    """)
    process = subprocess.run([sys.executable, "-c", script], check=False)
    assert process.returncode in (0, -signal.SIGKILL)
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["final"]
    assert {(final / name).read_text() for name in "ab"} in ({"old"}, {"new"})


def test_the_folder_one_stands_in_can_be_written(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with atomic_directory(Path(".")) as folder:
        write_text(folder / "a", "x")
    assert (tmp_path / "here" / "a").read_text() == "x"


@pytest.mark.parametrize("leftover", [".tmp-old-model", ".tmp-model2", ".aside-old-model", ".tmp-m"])
def test_what_another_left_behind_gets_no_finished_name_and_stays(tmp_path, leftover):
    (tmp_path / leftover).mkdir()
    (tmp_path / leftover / "half").write_text("x")
    with pytest.raises(RuntimeError), atomic_directory(tmp_path / "model"):
        raise RuntimeError
    assert names(tmp_path) == [leftover]


@pytest.mark.parametrize("name", ["m[1]", "m*", "m?", "[!a]"])
def test_a_name_is_no_pattern(tmp_path, name):
    (tmp_path / f".tmp-{name}").mkdir()
    (tmp_path / ".tmp-m1").mkdir()
    with atomic_directory(tmp_path / name) as folder:
        (folder / "x").write_text("new")
    assert names(tmp_path) == sorted([".tmp-m1", name])


def test_an_empty_folder_is_free_unless_a_disk_is_mounted_there(tmp_path, monkeypatch):
    disk = tmp_path / "disk"
    disk.mkdir()
    refuse_taken(disk)
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == disk)
    with pytest.raises(UserError, match=r"disk: a disk is mounted there; name a folder in it .* such as .*/disk/model"):
        refuse_taken(disk)
    refuse_taken(disk / "model")
