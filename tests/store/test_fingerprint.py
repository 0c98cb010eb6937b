import os

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


def test_a_damaged_memory_only_costs_a_reading(tmp_path):
    (tmp_path / "known.json").write_text("{")
    (tmp_path / "text").write_text("one")
    assert Fingerprints(tmp_path / "known.json").of(tmp_path / "text") == hash_file(tmp_path / "text")
