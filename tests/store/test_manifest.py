import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.store import UserError, hash_json, verify_manifest, write_manifest


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a").write_bytes(b"alpha")
    (tmp_path / "sub" / "b").write_bytes(b"beta")
    write_manifest(tmp_path)
    return tmp_path


def test_an_untouched_folder_passes(folder):
    verify_manifest(folder)


def test_one_flipped_bit_is_named(folder):
    (folder / "sub" / "b").write_bytes(b"bet`")
    with pytest.raises(UserError, match=r"sub/b: damaged"):
        verify_manifest(folder)


def test_truncated_and_missing_files_are_named_together(folder):
    (folder / "a").write_bytes(b"alph")
    (folder / "sub" / "b").unlink()
    with pytest.raises(UserError) as error:
        verify_manifest(folder)
    assert "a: damaged" in str(error.value)
    assert "b: missing" in str(error.value)


def test_a_folder_without_its_manifest_is_not_complete(folder):
    (folder / "manifest.json").unlink()
    with pytest.raises(UserError, match="not complete"):
        verify_manifest(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": 3}', "\x00"])
def test_a_damaged_manifest_is_one_clear_error(folder, text):
    (folder / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=r"manifest\.json"):
        verify_manifest(folder)


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname"])
def test_a_manifest_cannot_name_a_file_outside_its_folder(folder, name):
    (folder / "manifest.json").write_text(json.dumps({"files": {name: "00"}}))
    with pytest.raises(UserError, match="outside its folder"):
        verify_manifest(folder)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), plain, min_size=2))
def test_a_hash_does_not_depend_on_key_order(value):
    assert hash_json(value) == hash_json(dict(reversed(list(value.items()))))


def test_a_hash_refuses_what_has_no_stable_meaning():
    with pytest.raises(TypeError):
        hash_json({"x": object()})
