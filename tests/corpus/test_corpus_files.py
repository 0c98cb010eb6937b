import gzip
import io
import os
import tracemalloc
from pathlib import Path

import pytest
import zstandard

from modicum.corpus import files
from modicum.corpus.files import open_stream, plain_suffix, read_json_lines, read_whole
from modicum.store import UserError


def pack(path, data: bytes):
    """Write `data` as the file's suffix says."""
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(data))
    elif path.suffix == ".zst":
        path.write_bytes(zstandard.ZstdCompressor().compress(data))
    else:
        path.write_bytes(data)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_lines_keep_their_numbers_over_blank_ones(tmp_path, name):
    path = pack(tmp_path / name, b'{"a": 1}\n\n  \n{"a": 2}')
    assert list(read_json_lines(path)) == [(1, {"a": 1}), (4, {"a": 2})]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst"])
def test_a_large_file_is_unpacked_whole(tmp_path, name):
    text = "".join(f"line {i}\n" for i in range(200_000))
    assert read_whole(pack(tmp_path / name, text.encode())) == text


def test_several_packed_parts_in_a_row_are_one_file(tmp_path):
    parts = [b'{"a": 1}\n', b'{"a": 2}\n']
    (tmp_path / "a.jsonl.gz").write_bytes(b"".join(gzip.compress(part) for part in parts))
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(zstandard.compress(part) for part in parts))
    for name in ("a.jsonl.gz", "a.jsonl.zst"):
        assert [record for _, record in read_json_lines(tmp_path / name)] == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.zst"])
def test_a_packed_file_cut_anywhere_is_never_taken_for_whole(tmp_path, name):
    whole = pack(tmp_path / name, os.urandom(3000)).read_bytes()
    for size in range(1, len(whole), 97):
        (tmp_path / name).write_bytes(whole[:size])
        with pytest.raises(UserError, match=name), open_stream(tmp_path / name) as stream:
            stream.read()


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.zst"])
def test_a_file_that_is_not_packed_as_its_name_says_is_named(tmp_path, name):
    (tmp_path / name).write_bytes(b"plain text, not packed at all")
    with pytest.raises(UserError, match=f"{name}: damaged"):
        read_whole(tmp_path / name)


@pytest.mark.parametrize("name", ["bomb.txt.gz", "bomb.txt.zst", "bomb.jsonl.gz", "bomb.jsonl.zst"])
def test_a_bomb_is_refused_at_the_limit_and_never_unpacked_whole(tmp_path, monkeypatch, name):
    monkeypatch.setattr(files, "RECORD_LIMIT", 2**20)
    pack(tmp_path / name, b"a" * 2**27)
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=rf"{name}.*1 MiB"):
            read_whole(tmp_path / name) if ".txt" in name else list(read_json_lines(tmp_path / name))
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()


def test_one_step_into_a_zstd_bomb_unpacks_to_a_bounded_piece():
    packed = zstandard.ZstdCompressor(level=1).compress(bytes(2**28))
    stream = files._ZstdStream(io.BytesIO(packed))
    stream.readinto(bytearray(1))
    assert 0 < len(stream._ready) <= 2**25


def test_bytes_that_are_not_utf8_are_named_with_their_offset(tmp_path):
    (tmp_path / "a.txt").write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(UserError, match=r"a\.txt: byte 3 is not UTF-8.*iconv"):
        read_whole(tmp_path / "a.txt")
    pack(tmp_path / "a.jsonl.gz", b'{"text": "fine"}\n{"text": "caf\xe9"}\n')
    with pytest.raises(UserError, match=r"a\.jsonl\.gz: byte 30 is not UTF-8"):
        list(read_json_lines(tmp_path / "a.jsonl.gz"))


def test_utf16_is_refused_as_not_utf8(tmp_path):
    (tmp_path / "a.txt").write_bytes("hello".encode("utf-16"))
    with pytest.raises(UserError, match="byte 0 is not UTF-8"):
        read_whole(tmp_path / "a.txt")


def test_a_byte_order_mark_before_the_first_line_is_no_fault(tmp_path):
    path = pack(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"a": 1}\n')
    assert list(read_json_lines(path)) == [(1, {"a": 1})]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"a": 1', r"a\.jsonl:2: not valid JSON: .*column"),
        (b"{'a': 1}", r"a\.jsonl:2: not valid JSON"),
        (b"[1, 2]", r"a\.jsonl:2: expected an object.*found a list"),
        (b'"text"', r"a\.jsonl:2: expected an object.*found a string"),
        (rb'{"a": "\ud83d"}', r"a\.jsonl:2: half of a surrogate pair"),
        (rb'{"a": "\udc00 x"}', r"a\.jsonl:2: half of a surrogate pair"),
    ],
)
def test_a_faulty_line_is_named_with_file_and_number(tmp_path, line, message):
    path = pack(tmp_path / "a.jsonl", b'{"a": 0}\n' + line + b"\n")
    with pytest.raises(UserError, match=message):
        list(read_json_lines(path))


def test_a_missing_file_and_a_folder_are_told_apart(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        read_whole(tmp_path / "none.txt")
    with pytest.raises(UserError, match="a folder"):
        read_whole(tmp_path)


def test_the_suffix_that_counts_is_the_one_below_the_packing():
    names = ["a.TXT", "a.jsonl.gz", "a.md.zst", "a.gz", "a", "a.b.parquet"]
    assert [plain_suffix(Path(name)) for name in names] == [".txt", ".jsonl", ".md", "", "", ".parquet"]
