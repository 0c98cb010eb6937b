import pytest

from modicum.store import UserError, read_json, reading


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[]", "expected a JSON object"),
        (b'{"a":' + b"[" * 200_000, "too deep"),
    ],
)
def test_what_is_no_object_is_refused_in_a_line(tmp_path, content, told):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(UserError, match=told):
        read_json(tmp_path / "x.json")


def test_a_file_larger_than_any_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "LARGEST", 10)
    (tmp_path / "x.json").write_text('{"a": "bcdefgh"}')
    with pytest.raises(UserError, match="larger than"):
        read_json(tmp_path / "x.json")


def test_a_folder_or_nothing_is_missing(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match="missing, or no regular file"):
            read_json(path)
