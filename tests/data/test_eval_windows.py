from pathlib import Path

import pytest
import torch
from shard_fakes import documents_of_lengths, make_shards

from modicum.data import Shards, eval_windows, window_batch


@pytest.fixture
def heldout(tmp_path: Path) -> Shards:
    sizes = {"big": [40] * 40, "small": [40], "tiny": [3]}  # 200, 5 and 1 windows of 8
    return make_shards(
        tmp_path / "s", [d for name, lengths in sizes.items() for d in documents_of_lengths(lengths, name)]
    )


def test_the_same_windows_come_every_time(heldout: Shards) -> None:
    first, second = (torch.cat([batch.ids for batch in eval_windows(heldout, 8, 240)]) for _ in range(2))
    assert torch.equal(first, second)


def test_windows_are_taken_evenly_from_every_source_and_over_its_length(heldout: Shards) -> None:
    batches = list(eval_windows(heldout, 8, 8 * 12, batch_size=4))
    # twelve windows for three sources are four each; what tiny lacks goes to the others
    chosen = [("big", i) for i in (0, 33, 66, 100, 133, 166)] + [("small", i) for i in range(5)] + [("tiny", 0)]
    assert torch.equal(torch.cat([b.ids for b in batches]), window_batch(heldout, chosen, sequence_length=8).ids)


def test_everything_is_taken_once_when_it_fits(heldout: Shards) -> None:
    batches = list(eval_windows(heldout, 8, 10**9, batch_size=16))
    assert sum(batch.supervised_tokens for batch in batches) == heldout.info.tokens
    assert {batch.rows for batch in batches} == {16}  # one shape, so that a compiled model is compiled once
    assert len(batches) == 13  # 206 windows
    assert (batches[-1].documents[14:] == -1).all()
    assert not batches[-1].supervised[14:].any()


def test_the_budget_is_kept_but_never_below_one_window(heldout: Shards) -> None:
    for budget, rows in ((1, 1), (8, 1), (17, 2), (100, 12)):
        batches = list(eval_windows(heldout, 8, budget))
        assert [batch.rows for batch in batches] == [rows]


def test_an_empty_split_gives_no_batch(tmp_path: Path) -> None:
    assert list(eval_windows(make_shards(tmp_path / "s", []), 8, 100)) == []


def test_documents_can_be_left_joined_in_evaluation_too(heldout: Shards) -> None:
    batch = next(eval_windows(heldout, 64, 10**6, separate_documents=False))
    assert batch.documents.max() == 0
    assert batch.positions[0].tolist() == list(range(64))
