from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_fakes import ByteTokenizer, FakeDocument, documents_of_lengths, make_shards

from modicum.data import Shards, open_shards, split, window_batch, write_shards
from modicum.store import UserError

corpora = st.lists(st.integers(1, 40), min_size=1, max_size=12)
EOT, PAD = 0, 1
pytestmark = pytest.mark.usefixtures("without_fsync")


def stream_on_disk(shards: Shards, source: str = "a") -> list[int]:
    """All ids of a source as its files hold them, the closing end of text included."""
    files = sorted((shards.path / "sources" / source).glob("*.bin"))
    return np.concatenate([np.fromfile(file, np.uint16) for file in files]).tolist()


def expected_row(stream: list[int], window: int, T: int) -> tuple[list[int], list[int], list[int], list[bool]]:
    """A window built token by token from the contract; a document is known by the end of text that leads it."""
    ids, positions, documents, supervised = [PAD] * (T + 1), [0] * T, [-1] * T, [False] * (T + 1)
    document = position = 0
    for place in range(T + 1):
        here = window * T + place
        if here >= len(stream):
            break
        ids[place] = stream[here]
        supervised[place] = place > 0
        if place == T or here == len(stream) - 1:
            break  # a target only
        if place > 0 and stream[here] == EOT:
            document, position = document + 1, 0
        documents[place], positions[place] = document, position
        position += 1
    return ids, positions, documents, supervised


@settings(deadline=None)
@given(corpora, st.integers(1, 50), st.integers(1, 70), st.integers(0, 3))
def test_documents_and_positions_are_those_of_a_walk_along_the_tokens(
    lengths: list[int], T: int, tokens_per_shard: int, seed: int
) -> None:
    with TemporaryDirectory() as folder:
        shards = make_shards(
            Path(folder) / "s", documents_of_lengths(lengths), seed=seed, tokens_per_shard=tokens_per_shard
        )
        stream = stream_on_disk(shards)
        count = shards.windows(T)["a"]
        batch = window_batch(shards, [("a", i) for i in range(count)], sequence_length=T)
        for i in range(count):
            ids, positions, documents, supervised = expected_row(stream, i, T)
            assert batch.ids[i].tolist() == ids
            assert batch.positions[i].tolist() == positions
            assert batch.documents[i].tolist() == documents
            assert batch.supervised[i].tolist() == supervised


@settings(deadline=None)
@given(corpora, st.integers(1, 50))
def test_every_token_is_an_input_once_and_a_target_once(lengths: list[int], T: int) -> None:
    with TemporaryDirectory() as folder:
        shards = make_shards(Path(folder) / "s", documents_of_lengths(lengths))
        stream = stream_on_disk(shards)
        batch = window_batch(shards, [("a", i) for i in range(shards.windows(T)["a"])], sequence_length=T)
        inputs = batch.ids[:, :-1][batch.documents >= 0].tolist()
        targets = batch.ids[batch.supervised].tolist()
        assert inputs == stream[:-1]
        assert targets == stream[1:]
        assert stream[-1] == EOT
        # without waste: only the last row has padding, and it is not all padding
        assert (batch.documents[:-1] >= 0).all()
        assert batch.supervised[-1].any()


def test_no_document_reaches_across_its_end(tmp_path: Path) -> None:
    shards = make_shards(tmp_path / "s", documents_of_lengths([3, 5, 2, 6]))
    batch = window_batch(shards, [("a", 0)], sequence_length=16)
    starts = [place for place, token in enumerate(batch.ids[0, :16].tolist()) if token == EOT]
    assert len(starts) == 4
    for number, (begin, end) in enumerate(zip(starts, [*starts[1:], 16], strict=True)):
        assert batch.documents[0, begin:end].tolist() == [number] * (end - begin)
        assert batch.positions[0, begin:end].tolist() == list(range(end - begin))
        # the token after a document's last is the end of text, and the document is taught to give it
        assert batch.ids[0, end] == EOT
        assert batch.supervised[0, end]


def test_documents_can_be_left_joined(tmp_path: Path) -> None:
    shards = make_shards(tmp_path / "s", documents_of_lengths([3, 5, 3]))
    batch = window_batch(shards, [("a", 0), ("a", 1)], sequence_length=8, separate_documents=False)
    assert batch.positions.tolist() == [list(range(8))] * 2
    assert batch.documents.tolist() == [[0] * 8, [0] * 3 + [-1] * 5]
    assert batch.supervised.sum() == 11


def test_a_batch_has_the_promised_shapes_and_types(tmp_path: Path) -> None:
    shards = make_shards(tmp_path / "s", documents_of_lengths([30, 30]))
    batch = window_batch(shards, [("a", 1), ("a", 0), ("a", 7)], sequence_length=8)
    assert batch.rows == 3
    assert (batch.ids.shape, batch.ids.dtype) == ((3, 9), torch.int64)
    assert (batch.positions.shape, batch.positions.dtype) == ((3, 8), torch.int64)
    assert (batch.documents.shape, batch.documents.dtype) == ((3, 8), torch.int32)
    assert (batch.supervised.shape, batch.supervised.dtype) == ((3, 9), torch.bool)
    assert not batch.supervised[:, 0].any()
    assert batch.supervised_tokens == 8 + 8 + 4
    assert batch.to("cpu").ids.data_ptr() == batch.ids.data_ptr()


def test_a_document_longer_than_the_window_goes_on_in_the_next_ones(tmp_path: Path) -> None:
    shards = make_shards(tmp_path / "s", documents_of_lengths([20]))
    batch = window_batch(shards, [("a", 0), ("a", 1), ("a", 2)], sequence_length=8)
    assert batch.documents.tolist() == [[0] * 8, [0] * 8, [0] * 4 + [-1] * 4]
    assert batch.positions.tolist() == [list(range(8)), list(range(8)), [0, 1, 2, 3, 0, 0, 0, 0]]
    # the last token of a window is the first input of the next
    assert batch.ids[:-1, -1].tolist() == batch.ids[1:, 0].tolist()


def test_a_corpus_smaller_than_one_window_is_one_padded_row(tmp_path: Path) -> None:
    shards = make_shards(tmp_path / "s", [FakeDocument("only", "ab")])
    assert shards.windows(8) == {"a": 1}
    batch = window_batch(shards, [("a", 0)], sequence_length=8)
    assert batch.ids.tolist() == [[EOT, 99, 100, EOT, PAD, PAD, PAD, PAD, PAD]]
    assert batch.documents.tolist() == [[0, 0, 0, -1, -1, -1, -1, -1]]
    assert batch.supervised.tolist() == [[False, True, True, True, False, False, False, False, False]]


def test_a_source_that_fills_its_windows_exactly_has_no_empty_one(tmp_path: Path) -> None:
    for tokens, windows in ((16, 2), (17, 3)):
        shards = make_shards(tmp_path / "s", documents_of_lengths([tokens]))
        assert shards.windows(8) == {"a": windows}
        last = window_batch(shards, [("a", windows - 1)], sequence_length=8)
        assert last.supervised_tokens == (8 if tokens == 16 else 1)


def test_micro_batches_are_the_rows_in_order(tmp_path: Path) -> None:
    shards = make_shards(tmp_path / "s", documents_of_lengths([50]))
    batch = window_batch(shards, [("a", i) for i in range(6)], sequence_length=8)
    parts = list(split(batch, 4))
    assert [part.rows for part in parts] == [4, 2]
    for name in ("ids", "positions", "documents", "supervised"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(batch, name))


def test_an_id_beyond_the_embedding_is_refused_where_the_batch_is_made(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    write_shards([FakeDocument("x", "abcdefgh")], tokenizer, tmp_path / "s", seed=0)
    file = tmp_path / "s/sources/a/00000.bin"
    tokens = np.fromfile(file, np.uint16)
    tokens[3] = 320
    tokens.tofile(file)
    shards = open_shards(tmp_path / "s", tokenizer_hash=tokenizer.hash, verify=False)
    with pytest.raises(UserError, match=r"sources/a: holds the id 320, beyond .*: delete .*/s and run"):
        window_batch(shards, [("a", 0)], sequence_length=8)
