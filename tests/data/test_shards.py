import json
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shard_fakes import ByteTokenizer, FakeDocument, documents_of_lengths, make_shards

from modicum.data import open_shards, write_shards
from modicum.data import write as write_module
from modicum.store import UserError, hash_tree, write_manifest


@pytest.fixture
def shards_folder(tmp_path: Path) -> Path:
    documents = [*documents_of_lengths([9, 30, 4, 50], "a"), *documents_of_lengths([12, 7], "b")]
    make_shards(tmp_path / "shards", documents)
    return tmp_path / "shards"


def reopen(path: Path, **options: object) -> None:
    open_shards(path, **{"tokenizer_hash": ByteTokenizer().hash, **options})


# --- writing


def test_every_document_lies_in_its_source_exactly_once(tmp_path: Path) -> None:
    documents = [*documents_of_lengths(range(1, 40), "a"), *documents_of_lengths([5, 5, 8], "b.c-d_e")]
    shards = make_shards(tmp_path / "s", documents, tokens_per_shard=100)
    for name, source in shards.sources.items():
        texts = Counter(document.text for document in documents if document.source == name)
        stream = source.read(0, source.tokens + 1)
        starts = np.load(source.folder / "documents.npy", allow_pickle=False)
        assert starts.dtype == np.uint64
        found = []
        for begin, end in pairwise(starts):
            assert stream[begin] == 0
            found.append(bytes(int(token) - 2 for token in stream[begin + 1 : end]).decode())
        assert Counter(found) == texts
        assert stream[starts[-1]] == 0


def test_documents_are_shuffled_by_the_seed_alone(tmp_path: Path) -> None:
    documents = documents_of_lengths([5] * 60)
    again = [hash_tree(make_shards(tmp_path / f"s{i}", documents, seed=3).path) for i in range(2)]
    assert again[0] == again[1]
    orders = []
    for seed in range(3):
        source = make_shards(tmp_path / "t", documents, seed=seed).sources["a"]
        orders.append(source.read(0, source.tokens).tolist())
    reading_order = [t for d in documents for t in (0, *ByteTokenizer().encode_batch([d.text])[0])]
    assert len({tuple(order) for order in [*orders, reading_order]}) == 4


def test_the_index_says_what_the_shards_hold(tmp_path: Path) -> None:
    documents = [FakeDocument("1", "héllo", "a"), FakeDocument("2", "", "a"), FakeDocument("3", "xyz", "b")]
    info = write_shards(documents, ByteTokenizer(), tmp_path / "s", seed=7, tokens_per_shard=3)
    assert info == open_shards(tmp_path / "s", tokenizer_hash=info.tokenizer_hash).info
    assert (info.documents, info.tokens, info.bytes) == (3, 12, 9)
    a = info.sources["a"]
    assert (a.documents, a.tokens, a.bytes, a.max_id, a.files) == (2, 8, 6, 2 + 0xC3, (3, 3, 3))
    assert (info.dtype, info.vocab_size, info.eot_id, info.pad_id, info.seed) == ("uint16", 320, 0, 1, 7)
    sizes = [file.stat().st_size for file in sorted((tmp_path / "s/sources/a").glob("*.bin"))]
    assert sizes == [6, 6, 6]


def test_a_disk_that_is_full_when_the_starts_are_written_is_told_by_name(tmp_path: Path, full_at: Any) -> None:
    documents = documents_of_lengths([1] * 4000)  # their starts take more room than their tokens
    with full_at(16_000), pytest.raises(UserError, match=r"documents\.npy: could not be written .*; make room on the"):
        make_shards(tmp_path / "s", documents)
    assert not list(tmp_path.iterdir())


def test_reading_crosses_the_borders_of_files(tmp_path: Path) -> None:
    documents = documents_of_lengths([40, 33, 7])
    one = make_shards(tmp_path / "one", documents, tokens_per_shard=1000).sources["a"]
    many = make_shards(tmp_path / "many", documents, tokens_per_shard=7).sources["a"]
    for begin in range(81):
        for end in range(begin + 1, 82):
            assert np.array_equal(one.read(begin, end), many.read(begin, end))


@pytest.mark.parametrize(("vocab_size", "dtype", "width"), [(65_536, "uint16", 2), (65_537, "uint32", 4)])
def test_ids_are_as_wide_as_the_vocabulary_asks(tmp_path: Path, vocab_size: int, dtype: str, width: int) -> None:
    class Highest(ByteTokenizer):
        def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
            return [[self.vocab_size - 1] * len(text) for text in texts]

    tokenizer = Highest(vocab_size=vocab_size)
    info = write_shards([FakeDocument("1", "abc")], tokenizer, tmp_path / "s", seed=0)
    assert info.dtype == dtype
    assert (tmp_path / "s/sources/a/00000.bin").stat().st_size == 5 * width
    source = open_shards(tmp_path / "s", tokenizer_hash=tokenizer.hash).sources["a"]
    assert source.read(0, 5).tolist() == [0, *[vocab_size - 1] * 3, 0]


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_module, "_BATCH_CHARACTERS", 20_000)
    monkeypatch.setattr(write_module, "_BLOCK_TOKENS", 20_000)

    def peak(count: int) -> int:
        documents = (FakeDocument(str(i), chr(97 + i % 26) * 2_000) for i in range(count))
        tracemalloc.start()
        try:
            write_shards(documents, ByteTokenizer(), tmp_path / "s", seed=0)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    small, large = peak(50), peak(1_000)  # the large one holds 2,000,000 tokens, 4 MB
    assert large < small + 500_000


def test_a_failure_leaves_the_former_shards_and_nothing_else(shards_folder: Path) -> None:
    before = hash_tree(shards_folder)

    def broken() -> Iterator[FakeDocument]:
        yield FakeDocument("1", "good")
        raise OSError("disk on fire")

    with pytest.raises(OSError, match="on fire"):
        write_shards(broken(), ByteTokenizer(), shards_folder, seed=0)
    assert hash_tree(shards_folder) == before
    assert [path.name for path in shards_folder.parent.iterdir()] == ["shards"]


def test_nothing_but_the_named_files_is_written(shards_folder: Path) -> None:
    names = {path.relative_to(shards_folder).as_posix() for path in shards_folder.rglob("*") if path.is_file()}
    assert names == {
        "index.json",
        "manifest.json",
        *(f"sources/a/{name}" for name in ("00000.bin", "00001.bin", "documents.npy")),
        *(f"sources/b/{name}" for name in ("00000.bin", "documents.npy")),
    }


def test_a_text_that_the_tokenizer_refuses_is_reported_with_its_document(tmp_path: Path) -> None:
    class Strict(ByteTokenizer):
        def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
            for text in texts:
                if "\ud800" in text:
                    raise UserError("a lone surrogate")
            return super().encode_batch(texts)

    documents = [FakeDocument("1", "good"), FakeDocument("2", "bad \ud800"), FakeDocument("3", "good")]
    with pytest.raises(UserError, match="document 2 of source a: a lone surrogate"):
        write_shards(documents, Strict(), tmp_path / "s", seed=0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [-1, 320, 70_000])
def test_an_id_outside_the_vocabulary_is_never_written(tmp_path: Path, wrong: int) -> None:
    class Wild(ByteTokenizer):
        def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
            return [[2, wrong] for _ in texts]

    with pytest.raises(ValueError, match="document 1: the tokenizer gave an id outside its 320 ids"):
        write_shards([FakeDocument("1", "x")], Wild(), tmp_path / "s", seed=0)


@pytest.mark.parametrize("name", ["../a", "a/b", "", ".hidden", "a\nb"])
def test_a_source_name_cannot_leave_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not a source name"):
        write_shards([FakeDocument("1", "x", name)], ByteTokenizer(), tmp_path / "s", seed=0)


def test_an_empty_split_is_shards_without_sources(tmp_path: Path) -> None:
    shards = make_shards(tmp_path / "s", [])
    assert shards.sources == {}
    assert shards.windows(8) == {}
    assert shards.info.tokens == 0


# --- opening


def test_shards_of_another_tokenizer_are_refused(shards_folder: Path) -> None:
    with pytest.raises(UserError, match=r"written with another tokenizer .*0123456789ab.*run `modicum prepare`"):
        reopen(shards_folder, tokenizer_hash="f" * 64)


def test_an_id_beyond_the_vocabulary_is_refused_when_opening(shards_folder: Path) -> None:
    file, largest = shards_folder / "index.json", 2 + ord("z")
    file.write_text(json.dumps({**json.loads(file.read_text()), "vocab_size": largest}))
    write_manifest(shards_folder)
    with pytest.raises(UserError, match=rf"holds the id {largest}, beyond the vocabulary of {largest}; delete /"):
        reopen(shards_folder)


@pytest.mark.parametrize("name", ["index.json", "sources/a/00001.bin", "sources/b/documents.npy"])
def test_any_flipped_bit_is_found_and_the_file_named(shards_folder: Path, name: str) -> None:
    file = shards_folder / name
    whole = file.read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 60)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        file.write_bytes(flipped)
        with pytest.raises(UserError) as caught:
            reopen(shards_folder)
        assert str(shards_folder) in str(caught.value)
        assert f"delete {shards_folder} and run `modicum prepare` again" in str(caught.value)
        if name != "index.json":
            assert f"{file}: damaged" in str(caught.value)


@pytest.mark.parametrize("name", ["sources/a/00000.bin", "sources/b/documents.npy", "index.json"])
@pytest.mark.parametrize("verify", [True, False])
def test_a_truncated_or_missing_file_is_named_even_without_full_verification(
    shards_folder: Path, name: str, verify: bool
) -> None:
    file = shards_folder / name
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(UserError, match=f"{name}: .*(truncated|damaged)"):
        reopen(shards_folder, verify=verify)
    file.unlink()
    with pytest.raises(UserError, match=f"{name}: missing"):
        reopen(shards_folder, verify=verify)


def test_all_damaged_files_are_named_at_once(shards_folder: Path) -> None:
    for name in ("a/00000.bin", "b/documents.npy"):
        (shards_folder / "sources" / name).unlink()
    with pytest.raises(UserError) as caught:
        reopen(shards_folder)
    assert str(caught.value).count("missing") == 2


def test_a_missing_manifest_means_the_shards_are_not_whole(shards_folder: Path) -> None:
    (shards_folder / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"manifest.json: missing or damaged.*modicum prepare"):
        reopen(shards_folder)


def test_an_index_that_points_out_of_the_folder_is_refused(shards_folder: Path) -> None:
    file = shards_folder / "index.json"
    index = json.loads(file.read_text())
    index["sources"]["../../etc"] = index["sources"].pop("a")
    file.write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"index.json: damaged.*not a source name"):
        reopen(shards_folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 0}, "written by another version"),
        ({"dtype": "object"}, "damaged, not an index"),
        ({"sources": []}, "damaged, not an index"),
        ({"tokens": 3}, "damaged, not an index"),
        ({"pad_id": 2}, "damaged .its SHA-256"),
    ],
)
def test_an_index_of_another_kind_is_one_clear_error(shards_folder: Path, change: dict, message: str) -> None:
    file = shards_folder / "index.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(UserError, match=f"index.json: {message}"):
        reopen(shards_folder, verify=False)


def test_a_folder_without_shards_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"index.json: missing, so there are no finished shards here"):
        reopen(tmp_path / "nowhere")


def test_a_foreign_file_beside_the_shards_does_no_harm(shards_folder: Path) -> None:
    (shards_folder / ".DS_Store").write_bytes(b"x")
    reopen(shards_folder)


def test_the_fingerprint_follows_the_content(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Case:
        seed: int = 0
        text: str = "abc"

    def fingerprint(case: Case) -> str:
        documents = [FakeDocument("1", case.text), FakeDocument("2", "def")]
        return make_shards(tmp_path / "s", documents, seed=case.seed).fingerprint

    assert fingerprint(Case()) == fingerprint(Case())
    assert len({fingerprint(Case()), fingerprint(Case(text="abd")), fingerprint(Case(seed=1))}) == 3
