import random
import shutil
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modicum.corpus import near, read_documents
from modicum.corpus.chunks import Chunk
from modicum.corpus.decide import decide
from modicum.corpus.executor import run_stages
from modicum.corpus.inputs import find_files
from modicum.corpus.near import PlainWords, bands_for, candidate_pairs
from modicum.corpus.pipeline import corpus_stages
from modicum.recipe import CorpusSettings, SourceSettings


def shingles(text: str) -> set:
    words = text.split()
    return {tuple(words[i : i + 5]) for i in range(len(words) - 4)}


def jaccard(one: set, other: set) -> float:
    return len(one & other) / len(one | other)


@pytest.fixture(scope="module")
def family():
    """200 texts of 150 words in 40 families; within one, up to 12 words differ from the family's first text."""
    draw = random.Random(5)
    texts = []
    for _ in range(40):
        original = [f"w{draw.getrandbits(30)}" for _ in range(150)]
        for changes in (0, 1, 3, 6, 12):
            words = list(original)
            for place in draw.sample(range(150), changes):
                words[place] = f"w{draw.getrandbits(30)}"
            texts.append(" ".join(words))
    draw.shuffle(texts)
    return texts


@pytest.mark.parametrize("similarity", [0.5, 0.8, 0.95])
def test_what_goes_is_like_something_that_stays_and_what_stays_is_unlike(write_lines, prepare, family, similarity):
    path = write_lines("in.jsonl", [{"id": str(i), "text": text} for i, text in enumerate(family)])
    out, report = prepare(path, near_duplicate_similarity=similarity, heldout_fraction=0.0)
    kept = {int(document.id) for document in read_documents(out)}
    assert report.dropped == {"near duplicate": len(family) - len(kept)}
    assert 0 < len(kept) < len(family)
    slack = 0.12  # nearly three standard deviations of an estimate from 128 values
    sets = [shingles(text) for text in family]
    for i in range(len(family)):
        nearest = max((jaccard(sets[i], sets[j]) for j in kept if j < i), default=0.0)
        assert nearest > similarity - slack if i not in kept else nearest < similarity + slack


def test_likeness_is_not_handed_on_along_a_chain(write_lines, prepare):
    draw = random.Random(2)
    words = [f"w{draw.getrandbits(30)}" for _ in range(300)]
    chain = [" ".join(words[12 * i : 12 * i + 200]) for i in range(3)]
    first, second, third = map(shingles, chain)
    assert min(jaccard(first, second), jaccard(second, third)) > 0.85
    assert jaccard(first, third) < 0.8
    out, _ = prepare(write_lines("in.jsonl", chain), near_duplicate_similarity=0.82, heldout_fraction=0.0)
    assert [document.text for document in read_documents(out)] == [chain[0], chain[2]]


def test_templates_that_differ_in_one_number_are_no_duplicates(write_lines, prepare):
    texts = [
        f"Which weakness has the identifier CWE-{i}? The weakness CWE-{i} has the rank {i * i}." for i in range(50)
    ]
    _, report = prepare(write_lines("in.jsonl", texts))
    assert report.dropped == {}


@pytest.mark.parametrize("similarity", [0.3, 0.5, 0.7, 0.8, 0.9, 0.95])
def test_bands_find_99_percent_of_the_pairs_at_the_wanted_similarity(similarity):
    bands, rows = bands_for(similarity)
    assert bands * rows <= 128
    assert (1 - similarity**rows) ** bands <= 0.01 < (1 - similarity ** (rows + 1)) ** (128 // (rows + 1))


@settings(max_examples=60)
@given(st.lists(st.integers(2, 14), max_size=8), st.integers(1, 7))
def test_runs_give_their_pairs_wherever_a_block_of_the_file_ends(tmp_path_factory, lengths, block):
    work = tmp_path_factory.mktemp("work")
    (work / "pairs").mkdir()
    chunks = [Chunk(100_000_000, "a", 60, 0), Chunk(100_010_000, "b", 60, 60)]
    runs, place = [], 0
    for length in lengths:
        runs.append(list(range(place, place + length)))
        place += length
    link = [(chunks[p >= 60].number, p - 60 * (p >= 60)) for p in range(place)]
    links = [(*link[a], *link[b]) for run in runs for a, b in pairwise(run)]
    (work / "pairs" / "00000_00.dups").write_bytes(np.array(links, "<u4").tobytes())
    whole, near._LINKS = near._LINKS, block
    try:
        found = {pair for a, b in candidate_pairs(work, chunks) for pair in zip(a.tolist(), b.tolist(), strict=True)}
    finally:
        near._LINKS = whole
    expected = {(run[i], run[j]) for run in runs for j in range(len(run)) for i in range(j) if i == 0 or j - i <= 8}
    assert found == expected


def test_the_decision_is_the_same_when_the_tables_do_not_fit_into_memory(tmp_path, write_lines, family):
    records = [{"id": f"{i % 90}", "text": text} for i, text in enumerate([*family, *family[:20]])]
    source = SourceSettings(name="a", path=write_lines("in.jsonl", records))
    work = tmp_path / "work"
    work.mkdir()
    stages = corpus_stages(
        CorpusSettings(sources=[source]), [find_files(source)], work, tmp_path, seed=0, decontaminate_against=[]
    )
    run_stages(stages[:3], work / "logs", workers=1)
    outcomes = []
    for number, memory in enumerate((2**30, 3000)):
        copy = tmp_path / f"copy{number}"
        shutil.copytree(work, copy)
        decide(copy, exact=True, near=True, similarity=0.8, heldout_fraction=0.1, memory_bytes=memory)
        outcomes.append((copy / "outcome.bin").read_bytes())
    assert outcomes[0] == outcomes[1]
    assert {1, 7, 8, 0x80, 0x81} <= set(outcomes[0])  # every kind of decision was made


def test_datatrove_is_given_our_words():
    assert PlainWords().word_tokenize("One, two.\nThree") == ["one", "two", "three"]
    assert PlainWords().span_tokenize("One, two.\nThree") == [(0, 9), (10, 15)]
