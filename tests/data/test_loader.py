import gc
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_fakes import ByteTokenizer, documents_of_lengths, make_shards

from modicum.data import Batch, Loader, Mixture, Shards, WindowRows, open_shards, window_batch
from modicum.data import windows as windows_module
from modicum.store import UserError

pytestmark = pytest.mark.usefixtures("without_fsync")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    documents = [*documents_of_lengths([13, 40, 7, 90, 22] * 6, "a"), *documents_of_lengths([31, 17] * 5, "b")]
    return make_shards(tmp_path_factory.mktemp("loader") / "s", documents, tokens_per_shard=300)


def make_loader(shards: Shards, **changes: object) -> Loader:
    options = {"sequence_length": 16, "batch_size": 8, "seed": 5, **changes}
    of_loader = {
        name: options.pop(name) for name in ("batch_size", "rank", "world_size", "prefetch") if name in options
    }
    return Loader(WindowRows(shards, **options), **of_loader)


def take(loader: Loader, count: int) -> list[Batch]:
    return [next(loader) for _ in range(count)]


def rows_of(batches: list[Batch]) -> list[tuple]:
    """The rows one by one, comparable."""
    return [
        (b.ids[i].tolist(), b.positions[i].tolist(), b.documents[i].tolist(), b.supervised[i].tolist())
        for b in batches
        for i in range(b.rows)
    ]


# --- coverage


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=1, max_size=3),
    st.integers(1, 24),
    st.integers(1, 5),
    st.integers(0, 100),
    st.integers(1, 3),
)
def test_every_token_is_trained_on_exactly_once_an_epoch(
    lengths: list[list[int]], T: int, batch_size: int, seed: int, epochs: int
) -> None:
    with TemporaryDirectory() as folder:
        documents = [d for i, source in enumerate(lengths) for d in documents_of_lengths(source, f"s{i}")]
        shards = make_shards(Path(folder) / "s", documents)
        rows = sum(shards.windows(T).values())
        with make_loader(shards, sequence_length=T, batch_size=batch_size, seed=seed) as loader:
            ids, supervised = [], []
            while len(ids) < epochs * rows:
                batch = next(loader)
                ids += batch.ids.tolist()
                supervised += batch.supervised.tolist()
        targets = Counter(
            token
            for row, counts in zip(ids[: epochs * rows], supervised, strict=False)
            for token, counted in zip(row, counts, strict=True)
            if counted
        )
        once = Counter(t for d in documents for t in ByteTokenizer().encode_batch([d.text])[0])
        once[0] = len(documents)  # each document's end
        assert targets == Counter({token: count * epochs for token, count in once.items()})


def test_no_part_of_the_corpus_is_left_out_and_none_comes_twice(shards: Shards) -> None:
    n = sum(shards.windows(16).values())
    rows = rows_of(take(make_loader(shards, batch_size=1), 2 * n))
    first, second = rows[:n], rows[n:]
    assert len({str(row) for row in first}) == n
    assert sorted(map(str, first)) == sorted(map(str, second))


def test_the_order_differs_from_epoch_to_epoch_and_from_seed_to_seed(shards: Shards) -> None:
    n = sum(shards.windows(16).values())
    first, second = (rows_of(take(make_loader(shards, batch_size=n), 2)[i : i + 1]) for i in range(2))
    other = rows_of(take(make_loader(shards, batch_size=n, seed=6), 1))
    again = rows_of(take(make_loader(shards, batch_size=n), 1))
    assert first == again
    assert first != second
    assert first != other


def test_the_order_does_not_depend_on_the_batch_size_or_on_timing(shards: Shards) -> None:
    plain = rows_of(take(make_loader(shards), 12))
    slow = make_loader(shards, batch_size=4, prefetch=5)
    batches = []
    for _ in range(24):
        time.sleep(0.001)
        batches.append(next(slow))
    assert rows_of(batches) == plain


# --- ranks


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_ranks_together_see_the_one_order(shards: Shards, world_size: int) -> None:
    whole = rows_of(take(make_loader(shards), 20))
    ranks = [take(make_loader(shards, rank=rank, world_size=world_size), 20) for rank in range(world_size)]
    joined = [batch for update in zip(*ranks, strict=True) for batch in update]
    assert {batch.rows for batch in joined} == {8 // world_size}
    assert rows_of(joined) == whole


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.integers(0, 10))
@settings(deadline=None, max_examples=20)
def test_a_run_goes_on_with_another_number_of_ranks(shards: Shards, before: int, after: int, updates: int) -> None:
    whole = rows_of(take(make_loader(shards), updates + 3))
    first = make_loader(shards, rank=before - 1, world_size=before)
    take(first, updates)
    ranks = [make_loader(shards, rank=rank, world_size=after) for rank in range(after)]
    for rank in ranks:
        rank.load_state_dict(first.state_dict())
    rest = [batch for update in zip(*(take(rank, 3) for rank in ranks), strict=True) for batch in update]
    assert rows_of(rest) == whole[8 * updates :]


def test_a_batch_that_ranks_cannot_share_is_refused(shards: Shards) -> None:
    with pytest.raises(UserError, match="batch_size 8 cannot be shared by 3 ranks"):
        make_loader(shards, rank=0, world_size=3)


# --- state


@given(st.integers(0, 60), st.integers(0, 3))
@settings(deadline=None, max_examples=30)
def test_a_restored_loader_neither_skips_nor_replays(shards: Shards, updates: int, prefetched: int) -> None:
    whole = rows_of(take(make_loader(shards), updates + 4))
    first = make_loader(shards, prefetch=prefetched + 1)
    take(first, updates)
    second = make_loader(shards)
    second.load_state_dict(first.state_dict())
    assert rows_of(take(second, 4)) == whole[8 * updates :]


def test_the_state_counts_what_was_handed_out_and_not_what_was_made_ahead(shards: Shards) -> None:
    loader = make_loader(shards, prefetch=4)
    assert loader.state_dict()["rows"] == 0
    take(loader, 3)
    time.sleep(0.1)
    assert loader.state_dict()["rows"] == 24
    assert all(type(value) is int for value in loader.state_dict().values())


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_state_in_the_midst_of_an_accumulation_restores_exactly(shards: Shards, world_size: int) -> None:
    for rank in range(world_size):
        options = {"rank": rank, "world_size": world_size}
        whole = rows_of(take(make_loader(shards, **options), 5))
        loader = make_loader(shards, **options)
        batch = take(loader, 3)[-1]
        for used in range(0, batch.rows + 1):
            state = loader.state_dict(unused_rows=batch.rows - used)
            restored = make_loader(shards, **options)
            restored.load_state_dict(state)
            rest = take(restored, 2)
            assert rest[0].rows == (batch.rows - used or batch.rows)
            done = 2 * batch.rows + used
            assert rows_of(rest) == whole[done : done + rest[0].rows + rest[1].rows]


def test_a_state_within_an_update_needs_the_same_ranks_and_batch(shards: Shards) -> None:
    loader = make_loader(shards, rank=0, world_size=2)
    take(loader, 2)
    state = loader.state_dict(unused_rows=2)
    for options in ({}, {"rank": 1, "world_size": 4}, {"rank": 1, "world_size": 2, "batch_size": 4}):
        with pytest.raises(UserError, match="within an update of 8 sequences on 2 ranks"):
            make_loader(shards, **options).load_state_dict(state)


def test_more_unused_rows_than_the_newest_batch_has_are_refused(shards: Shards) -> None:
    loader = make_loader(shards)
    with pytest.raises(ValueError, match="0 rows"):
        loader.state_dict(unused_rows=1)
    take(loader, 1)
    for wrong in (-1, 9):
        with pytest.raises(ValueError, match="8 rows"):
            loader.state_dict(unused_rows=wrong)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match="0 rows"):
        loader.state_dict(unused_rows=1)


@pytest.mark.parametrize(
    "changes",
    [{"seed": 6}, {"sequence_length": 17}, {"weights": {"a": 2.0}}, {"separate_documents": False}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_state_of_other_data_is_refused(shards: Shards, changes: dict) -> None:
    state = make_loader(shards).state_dict()
    make_loader(shards, weights={"b": 1.0}, max_epochs={"a": 9.0}).load_state_dict(state)
    with pytest.raises(UserError, match="loader's state belongs to other shards"):
        make_loader(shards, **changes).load_state_dict(state)


def test_a_state_of_other_shards_is_refused(shards: Shards, tmp_path: Path) -> None:
    other = make_shards(tmp_path / "s", documents_of_lengths([40, 50], "a"))
    with pytest.raises(UserError, match="loader's state belongs to other shards"):
        make_loader(shards).load_state_dict(make_loader(other).state_dict())


def test_another_process_makes_the_same_batches(shards: Shards) -> None:
    script = (
        "import sys, hashlib; from pathlib import Path; from modicum.data import Loader, WindowRows, open_shards\n"
        f"shards = open_shards(Path(sys.argv[1]), tokenizer_hash={ByteTokenizer().hash!r})\n"
        "loader = Loader(WindowRows(shards, sequence_length=16, seed=5), batch_size=8)\n"
        "print(hashlib.sha256(b''.join(next(loader).ids.numpy().tobytes() for _ in range(9))).hexdigest())\n"
        # no close: leaving must neither hang nor complain
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", script, str(shards.path)], capture_output=True, text=True, check=True, timeout=120
        )
        for _ in range(2)
    ]
    assert runs[0].stdout == runs[1].stdout
    assert [run.stderr for run in runs] == ["", ""]


# --- limits, faults, the thread


def test_a_run_beyond_max_epochs_is_refused_before_and_during_training(shards: Shards) -> None:
    loader = make_loader(shards, max_epochs={"a": 1.0})
    n = loader.rows_available
    assert n is not None
    steps = n // 8
    loader.check(8 * steps)
    with pytest.raises(UserError, match=f"source a: {steps + 1} steps see it .*\n.*at most {steps} steps"):
        loader.check(8 * (steps + 1))
    take(loader, steps)
    with pytest.raises(UserError, match="source a"):
        next(loader)
    assert loader.state_dict()["rows"] == 8 * steps
    assert max(loader.epochs(8 * steps).values()) <= 1


def test_weights_say_how_often_a_pass_sees_each_window(shards: Shards) -> None:
    windows = shards.windows(16)
    loader = make_loader(shards, weights={"a": 0.5, "b": 3.0})
    rows = windows["a"] // 2 + 3 * windows["b"]
    assert loader.epochs(rows)["b"] == pytest.approx(3, abs=1 / windows["b"])
    assert loader.epochs(rows)["a"] == pytest.approx(0.5, abs=1 / windows["a"])


def test_shards_of_an_empty_split_cannot_be_trained_on(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the shards hold no tokens"):
        make_loader(make_shards(tmp_path / "s", []))


def test_one_document_is_enough(tmp_path: Path) -> None:
    loader = make_loader(make_shards(tmp_path / "s", documents_of_lengths([5])), batch_size=2)
    batch = next(loader)
    assert batch.ids[0].tolist() == batch.ids[1].tolist()
    assert batch.supervised_tokens == 10
    assert loader.epochs(2) == {"a": 2.0}


def test_an_exception_in_the_background_reaches_the_training_loop(tmp_path: Path) -> None:
    folder = make_shards(tmp_path / "s", documents_of_lengths([50])).path
    file = folder / "sources/a/00000.bin"
    np.full(51, 999, np.uint16).tofile(file)
    loader = make_loader(open_shards(folder, tokenizer_hash=ByteTokenizer().hash, verify=False))
    for _ in range(2):
        with pytest.raises(UserError, match="holds the id 999"):
            next(loader)
    assert loader.state_dict()["rows"] == 0


def test_no_thread_outlives_the_loader(shards: Shards) -> None:
    def threads() -> int:
        return sum(thread.name == "modicum-prefetch" for thread in threading.enumerate())

    gc.collect()
    before = threads()
    with make_loader(shards) as loader:
        next(loader)
        assert threads() == before + 1
        loader.load_state_dict(loader.state_dict())
        assert threads() == before
        next(loader)
    assert threads() == before
    dropped = make_loader(shards)
    next(dropped)
    del dropped
    gc.collect()
    assert threads() == before


def test_waiting_for_data_is_measured_across_restarts(shards: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    real = windows_module.window_batch

    def slow(*args: object, **options: object) -> Batch:
        time.sleep(0.1)
        return real(*args, **options)

    monkeypatch.setattr(windows_module, "window_batch", slow)
    loader = make_loader(shards)
    assert loader.wait_seconds == 0
    next(loader)
    waited = loader.wait_seconds
    assert 0.08 < waited < 5
    loader.close()
    assert loader.wait_seconds == waited
    next(loader)
    assert loader.wait_seconds > waited + 0.08


def test_a_batch_is_made_in_far_less_than_a_millisecond_a_row(tmp_path: Path) -> None:
    shards = make_shards(tmp_path / "s", documents_of_lengths([200] * 1000), tokens_per_shard=50_000)
    mixture = Mixture(shards.windows(512), seed=0)

    def seconds() -> float:
        start = time.thread_time()
        window_batch(shards, mixture.rows(160, 16), sequence_length=512)
        return time.thread_time() - start

    assert min(seconds() for _ in range(30)) / 16 < 0.0005
