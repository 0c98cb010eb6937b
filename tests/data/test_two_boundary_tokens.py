"""A tokenizer whose documents begin with one token and end with another: the stream, its windows, and what counts."""

from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_fakes import ByteTokenizer, documents_of_lengths, make_shards

from modicum.data import open_shards, window_batch, write_shards
from modicum.store import hash_tree

BOS, EOT = 2, 3
pytestmark = pytest.mark.usefixtures("without_fsync")


class TwoTokens(ByteTokenizer):
    def encode_batch(self, texts):
        return [[4 + byte for byte in text.encode()] for text in texts]


TOKENIZER = TwoTokens(bos_id=BOS, eot_id=EOT, pad_id=0)


def opened(folder, documents, **options):
    write_shards(documents, TOKENIZER, folder, **{"seed": 0, "tokens_per_shard": 64, **options})
    return open_shards(folder, tokenizer_hash=TOKENIZER.hash)


def test_a_document_is_its_ids_between_the_two_and_one_more_start_ends_the_stream(tmp_path):
    documents = documents_of_lengths([9, 1, 30, 4])
    source = opened(tmp_path / "s", documents).sources["a"]
    stream = source.read(0, source.tokens + 1).tolist()
    starts = np.load(source.folder / "documents.npy", allow_pickle=False)
    found = [stream[begin:end] for begin, end in pairwise(starts)]
    assert sorted(found) == sorted([BOS, *TOKENIZER.encode_batch([d.text])[0], EOT] for d in documents)
    assert stream[-1] == BOS
    assert source.tokens == len(stream) - 1 == starts[-1]


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 50), st.integers(0, 3))
def test_windows_hold_every_token_once_and_every_target_but_the_start_of_the_next_document(lengths, T, seed):
    with TemporaryDirectory() as folder:
        documents = documents_of_lengths(lengths)
        shards = opened(Path(folder) / "s", documents, seed=seed)
        batch = window_batch(shards, [("a", i) for i in range(shards.windows(T)["a"])], sequence_length=T)
        stream = shards.sources["a"].read(0, shards.sources["a"].tokens + 1).tolist()
    real = batch.documents >= 0
    inputs = batch.ids[:, :-1][real].tolist()
    assert inputs == stream[:-1]
    # walked token by token: what predicts the end counts, what stands at the end predicts nothing
    counts = batch.supervised[:, 1:]
    assert not counts[~real].any()
    assert counts[real].tolist() == [token != EOT for token in inputs]
    targets = batch.ids[:, 1:][counts].tolist()
    assert targets.count(EOT) == len(documents)
    assert BOS not in targets
    assert len(targets) == sum(len(document.text) + 1 for document in documents)
    for ids, numbers, positions in zip(batch.ids[:, :-1], batch.documents, batch.positions, strict=True):
        for place in range(T):
            begins = place == 0 or ids[place] == BOS
            if numbers[place] >= 0:
                assert numbers[place] == (numbers[place - 1] + begins if place else 0)
                assert positions[place] == (0 if begins else positions[place - 1] + 1)


def test_the_index_names_the_start_only_where_it_is_another_token(tmp_path):
    two = opened(tmp_path / "two", documents_of_lengths([5]))
    assert (two.info.bos_id, two.info.eot_id) == (BOS, EOT)
    assert '"bos_id": 2' in (tmp_path / "two/index.json").read_text()
    one = make_shards(tmp_path / "one", documents_of_lengths([5]))
    assert (one.info.bos_id, one.info.eot_id) == (0, 0)
    assert "bos_id" not in (tmp_path / "one/index.json").read_text()


def test_shards_with_one_boundary_token_have_the_bytes_they_always_had(tmp_path):
    """Runs and checkpoints hold this hash: it was taken before there were two tokens."""
    documents = [*documents_of_lengths([9, 30, 4, 50], "a"), *documents_of_lengths([12, 7], "b")]
    shards = make_shards(tmp_path / "s", documents, seed=5)
    assert hash_tree(tmp_path / "s") == "ccd9111fc48e3908ddad4d9928dd795bedeba21cbda1a1dea61b09d1a0c69f90"
    assert shards.fingerprint == "ad3bc969b8eefe4df5749caa025964dca25c0d87045c33190441354fac914192"
