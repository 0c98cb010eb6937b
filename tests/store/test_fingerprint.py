import os

import pytest

from modicum.store import Fingerprints, hash_file


def test_the_hash_of_a_folder_sees_names_and_contents(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a").write_text("1")
    first = Fingerprints(tmp_path / "known.json").of(folder)
    (folder / "a").rename(folder / "b")
    second = Fingerprints(tmp_path / "known.json").of(folder)
    (folder / "b").write_text("2")
    assert len({first, second, Fingerprints(tmp_path / "known.json").of(folder)}) == 3


def test_a_dangling_link_does_not_stop_the_hash(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a").write_text("1")
    before = Fingerprints(tmp_path / "known.json").of(folder)
    (folder / "link").symlink_to(tmp_path / "nowhere")
    assert Fingerprints(tmp_path / "known.json").of(folder) == before


def test_a_link_counts_as_the_file_that_it_leads_to(tmp_path):
    folder, blob = tmp_path / "snapshot", tmp_path / "blob"
    folder.mkdir()
    (folder / "tokenizer.json").symlink_to(blob)  # as a download cache lays it out
    (folder / "loop").symlink_to(folder)
    blob.write_text("1")
    before = Fingerprints(tmp_path / "known.json").of(folder)
    blob.write_text("22")
    changed = Fingerprints(tmp_path / "known.json").of(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").write_text("22")
    assert changed != before
    assert Fingerprints(tmp_path / "known.json").of(folder) == changed


def test_of_named_files_only_these_count(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in "abc":
        (folder / name).write_text(name)
    known = Fingerprints(tmp_path / "known.json")
    first = known.of_files(folder, ["a", "b"])
    (folder / "c").write_text("changed")
    assert known.of_files(folder, ["b", "a"]) == first
    assert known.of_files(folder, ["a", "c"]) != first
    (folder / "b").write_text("changed")
    assert known.of_files(folder, ["a", "b"]) != first


def test_an_unchanged_file_is_not_read_again_and_a_changed_one_is(tmp_path, monkeypatch):
    path = tmp_path / "text"
    path.write_text("one")
    known = Fingerprints(tmp_path / "known.json")
    first = known.of(path)
    known.save()
    reads = []
    monkeypatch.setattr("modicum.store.fingerprint.hash_file", lambda file: reads.append(file) or hash_file(file))
    assert Fingerprints(tmp_path / "known.json").of(path) == first
    assert reads == []
    path.write_text("two")
    os.utime(path, ns=(1, 1))
    assert Fingerprints(tmp_path / "known.json").of(path) != first
    assert reads == [path]


DAMAGED = ["{", "null", "[]", "3", '{"NAME": null}', '{"NAME": 3}', '{"NAME": [3, TIME]}', '{"NAME": [3, TIME, null]}']


@pytest.mark.parametrize("memory", [*DAMAGED, pytest.param("[" * 100_000, id="deep")])
def test_a_damaged_memory_only_costs_a_reading(tmp_path, memory):
    text = tmp_path / "text"
    text.write_text("one")
    memory = memory.replace("NAME", str(text)).replace("TIME", str(text.stat().st_mtime_ns))
    (tmp_path / "known.json").write_text(memory)
    assert Fingerprints(tmp_path / "known.json").of(tmp_path / "text") == hash_file(tmp_path / "text")
