import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from datatrove.executor.local import LocalPipelineExecutor

from modicum.corpus import chunks, executor, files, inputs, read_documents
from modicum.corpus.inputs import find_files
from modicum.corpus.pipeline import corpus_stages
from modicum.corpus.prepare import finish_corpus
from modicum.recipe import CorpusSettings, FilterSettings, SourceSettings
from modicum.recipe.settings import FilterOverrides
from modicum.store import UserError, hash_tree, verify_manifest


@pytest.fixture
def mixed(tmp_path, prose):
    """A folder of sources with copies, near copies, spam, short texts and ids that come twice, in many files."""
    draw = random.Random(3)
    for number in range(12):
        folder = tmp_path / "in" / "abc"[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        lines = []
        for k in range(30):
            text = prose(draw.randrange(250))
            if draw.random() < 0.3:
                text = text.replace("the", "a", 1)
            if draw.random() < 0.1:
                text = draw.choice(["short", "spam spam spam " * 60])
            lines.append(json.dumps({"id": f"id{draw.randrange(40)}", "text": text, "k": k}))
        (folder / f"f{number:02d}.jsonl").write_text("\n".join(lines), "utf-8")
    return [SourceSettings(name=name, path=tmp_path / "in" / name) for name in "abc"]


def test_the_files_are_equal_byte_for_byte_however_the_work_is_split(mixed, prepare, monkeypatch):
    out, report = prepare(*mixed, out="plain")
    plain = hash_tree(out)
    assert set(report.dropped) == {"too short", "repetitive", "exact duplicate", "near duplicate"}
    assert report.documents_heldout > 0
    for tasks in (1, 3, 20):
        assert hash_tree(prepare(*mixed, out=f"tasks{tasks}", tasks=tasks)[0]) == plain
    assert hash_tree(prepare(*mixed, out="workers", workers=3, memory_mb=64)[0]) == plain
    assert hash_tree(prepare(*reversed(mixed), out="sources")[0]) == plain
    monkeypatch.setattr(chunks, "MAX_DOCUMENTS", 7)
    assert hash_tree(prepare(*mixed, out="chunks")[0]) == plain
    backwards = SimpleNamespace(scandir=lambda path: sorted(os.scandir(path), key=lambda e: e.name, reverse=True))
    monkeypatch.setattr(inputs, "os", backwards)
    assert hash_tree(prepare(*mixed, out="files")[0]) == plain


def test_which_near_duplicate_survives_does_not_depend_on_tasks_or_workers(write_lines, prepare, prose):
    near = [prose(1, 200) + f" end {k}." for k in range(6)]
    for k, text in enumerate(near):
        write_lines(f"in/{k}.jsonl", [prose(100 + k), text])
    survivors = {}
    for tasks, workers in ((1, 1), (2, 1), (6, 1), (6, 2)):
        out, report = prepare(
            write_lines("in/9.jsonl", [near[5]]).parent, out=f"{tasks}-{workers}", tasks=tasks, workers=workers
        )
        everything = [*read_documents(out), *read_documents(out, "heldout")]
        survivors[tasks, workers] = [document.id for document in everything if document.text in near]
        assert report.dropped == {"exact duplicate": 1, "near duplicate": 5}
    assert set(map(tuple, survivors.values())) == {("0.jsonl#2",)}


def test_the_stages_run_on_datatroves_own_executor(mixed, prepare, tmp_path):
    expected, _ = prepare(*mixed, out="ours")
    work, out = tmp_path / "work", tmp_path / "theirs"
    work.mkdir()
    out.mkdir()
    settings = CorpusSettings(sources=mixed)
    found = [find_files(source) for source in mixed]
    for stage in corpus_stages(settings, found, work, out, seed=0, decontaminate_against=[]):
        logs = str(tmp_path / "logs" / stage.name)
        LocalPipelineExecutor(stage.steps, tasks=stage.tasks, workers=1, logging_dir=logs).run()
    finish_corpus(settings, found, work, out)
    assert hash_tree(out) == hash_tree(expected)


def test_one_document_is_trained_on_and_the_report_warns(write_lines, prepare, prose):
    out, report = prepare(write_lines("a.jsonl", [prose(1)]))
    assert (report.documents_kept, report.documents_heldout) == (1, 0)
    assert len(list(read_documents(out))) == 1
    assert any("held out" in warning for warning in report.warnings)


def test_a_document_longer_than_any_context_is_kept_whole(write_lines, prepare, prose):
    text = prose(1, 100_000)
    out, _ = prepare(write_lines("a.jsonl", [text]))
    assert [document.text for document in read_documents(out)] == [text]


def test_a_text_that_json_writes_longer_than_a_line_may_be_is_kept(prepare, prose, tmp_path, monkeypatch):
    text = '"\\"' * 700 + prose(1)
    (tmp_path / "a.txt").write_text(text)
    monkeypatch.setattr(files, "RECORD_LIMIT", len(text) + 10)
    out, _ = prepare(tmp_path / "a.txt")
    assert [document.text for document in read_documents(out)] == [text]


def test_progress_counts_documents_at_most_once_a_second(monkeypatch):
    clock = iter(range(0, 1000))
    monkeypatch.setattr(executor.time, "monotonic", lambda: next(clock) * 0.3)
    said = []
    assert list(executor.Ticker("corpus: read", said.append)("abcdefghij", 0, 1)) == list("abcdefghij")
    assert said == ["corpus: read, 4 documents", "corpus: read, 8 documents"]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], r"source a: no document in its files"),
        (["short", "  \n ", "tiny"], r"no document is left of 3: 1 empty, 2 too short; change corpus\.filters"),
    ],
)
@pytest.mark.parametrize("before", [True, False])
def test_a_corpus_of_nothing_is_refused_and_leaves_things_as_they_were(
    write_lines, prepare, prose, tmp_path, texts, message, before
):
    if before:
        prepare(write_lines("good.jsonl", [prose(1), prose(2)]))
    names = sorted(path.name for path in tmp_path.iterdir())
    state = hash_tree(tmp_path / "out") if before else None
    path = write_lines("a.jsonl", texts)
    with pytest.raises(UserError, match=message):
        prepare(path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, "a.jsonl"])
    assert not before or hash_tree(tmp_path / "out") == state


@pytest.mark.parametrize("workers", [1, 2])
def test_a_fault_in_a_file_reaches_the_user_from_any_worker(write_lines, prepare, prose, tmp_path, workers):
    path = write_lines("in/a.jsonl", [prose(1)])
    (tmp_path / "in" / "b.jsonl").write_bytes(b'{"text": "fine"}\n{"text": "caf\xe9"}\n')
    with pytest.raises(UserError, match=r"b\.jsonl: byte 30 is not UTF-8"):
        prepare(path.parent, workers=workers)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(("faulty", "told"), [(3, 3), (25, 20)])
def test_many_faulty_files_are_named_at_once(prepare, prose, tmp_path, faulty, told):
    (tmp_path / "in").mkdir()
    for k in range(30):
        (tmp_path / "in" / f"{k:02d}.txt").write_bytes(b"caf\xe9 " * 20 if k < faulty else prose(k).encode())
    with pytest.raises(UserError) as caught:
        prepare(tmp_path / "in", tasks=1)
    assert [line.split(": byte 3 is")[0] for line in str(caught.value).splitlines()] == [
        str(tmp_path / "in" / f"{k:02d}.txt") for k in range(told)
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_full_disk_is_one_clear_error(write_lines, prepare, prose, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = write_lines("a.jsonl", [prose(1)])
    monkeypatch.setattr(chunks.zstd_lines, "write", full)
    with pytest.raises(UserError, match="the disk is full"):
        prepare(path)


def test_of_equal_texts_the_first_stays_across_sources(write_lines, prepare, prose):
    paths = {name: write_lines(f"{name}.jsonl", [prose(1), prose(k)]) for k, name in enumerate("ab", 2)}
    sources = [SourceSettings(name=name, path=path) for name, path in paths.items()]
    out, report = prepare(*sources, heldout_fraction=0.0)
    assert [(d.source, d.text) for d in read_documents(out)] == [("a", prose(1)), ("a", prose(2)), ("b", prose(3))]
    assert report.sources[1].dropped == {"exact duplicate": 1}
    assert report.sources[1].examples == {"exact duplicate": ["b.jsonl#1"]}


OFF = FilterOverrides(exact_duplicates=False, near_duplicates=False, length=False, repetition=False)


@pytest.mark.parametrize("where", ["source", "language", "corpus"])
def test_filters_can_be_switched_off_for_a_source_a_language_or_all(write_lines, prepare, prose, where):
    texts = [prose(1, 200), prose(1, 200), prose(1, 200) + " end.", "short", "spam spam spam " * 60]
    on = SourceSettings(name="a", path=write_lines("a.jsonl", texts))
    off = SourceSettings(
        name="b",
        path=write_lines("b.jsonl", texts),
        language="xx",
        filters=OFF if where == "source" else FilterOverrides(),
    )
    settings = {
        "source": {},
        "language": {"languages": {"xx": OFF}},
        "corpus": {"filters": FilterSettings(**OFF.model_dump(exclude_none=True))},
    }[where]
    _, report = prepare(on, off, **settings)
    a, b = report.sources
    every = {"exact duplicate": 1, "near duplicate": 1, "repetitive": 1, "too short": 1}
    assert a.dropped == ({} if where == "corpus" else every)
    assert b.dropped == {}
    assert b.documents_in == 5


def test_a_source_overrides_its_language(write_lines, prepare):
    source = SourceSettings(
        name="a", path=write_lines("a.jsonl", ["twelve chars"]), filters=FilterOverrides(min_characters=12)
    )
    _, report = prepare(source, languages={"en": FilterOverrides(min_characters=13)})
    assert report.dropped == {}


def test_an_id_that_comes_twice_in_a_source_gets_its_place(write_lines, prepare, prose):
    one = write_lines("a.jsonl", [{"id": "x", "text": prose(k)} for k in range(3)] + [{"text": prose(9)}])
    other = write_lines("b.jsonl", [{"id": "x", "text": prose(5)}])
    out, _ = prepare(SourceSettings(name="a", path=one), SourceSettings(name="b", path=other), heldout_fraction=0.0)
    ids = [(document.source, document.id) for document in read_documents(out)]
    assert ids == [("a", "x"), ("a", "x~a.jsonl#2"), ("a", "x~a.jsonl#3"), ("a", "a.jsonl#4"), ("b", "x")]


def test_an_id_that_only_a_dropped_document_had_is_free(write_lines, prepare, prose):
    path = write_lines("a.jsonl", [{"id": "x", "text": "short"}, {"id": "x", "text": prose(1)}])
    assert [document.id for document in read_documents(prepare(path)[0])] == ["x"]


def test_ids_that_cannot_be_made_unique_are_refused(write_lines, prepare, prose):
    ids = ["x", "x", "x~a.jsonl#2"]
    path = write_lines("a.jsonl", [{"id": name, "text": prose(k)} for k, name in enumerate(ids)])
    with pytest.raises(UserError, match="source a: ids of the form"):
        prepare(path)


def test_the_report_adds_up_and_is_the_same_on_disk(mixed, prepare):
    out, report = prepare(*mixed)
    assert json.loads((out / "report.json").read_text()) == report.to_json()
    assert "wall_seconds" not in report.to_json()
    assert report.wall_seconds > 0
    verify_manifest(out)
    for source in report.sources:
        read = {
            split: [d for d in read_documents(out, split) if d.source == source.name] for split in ("train", "heldout")
        }
        size = {split: sum(len(d.text.encode()) for d in documents) for split, documents in read.items()}
        assert (source.documents_kept, source.documents_heldout) == (len(read["train"]), len(read["heldout"]))
        assert (source.bytes_kept, source.bytes_heldout) == (size["train"], size["heldout"])
        assert source.documents_in == 120 == len(read["train"]) + len(read["heldout"]) + sum(source.dropped.values())
        assert source.domains == {source.name: len(read["train"]) + len(read["heldout"])}
        assert source.files == 4
        assert {reason: min(count, 3) for reason, count in source.dropped.items()} == {
            reason: len(ids) for reason, ids in source.examples.items()
        }


def test_the_report_warns_of_a_source_that_is_gone(write_lines, prepare, prose):
    stays = SourceSettings(name="stays", path=write_lines("a.jsonl", [prose(k) for k in range(100)]))
    gone = SourceSettings(name="gone", path=write_lines("c.jsonl", ["short"]))
    _, report = prepare(stays, gone)
    assert report.warnings == ["source gone: every document was dropped (1 too short)"]


@pytest.mark.parametrize(("texts", "told"), [(3, True), (100, False)])
def test_the_report_warns_where_much_more_is_held_out_than_was_asked_for(write_lines, prepare, prose, texts, told):
    out, report = prepare(write_lines("a.jsonl", [prose(k) for k in range(texts)]))
    size = {split: sum(len(d.text.encode()) for d in read_documents(out, split)) for split in ("train", "heldout")}
    share = size["heldout"] / sum(size.values())
    assert (share > 3 * 0.02) == told
    assert [f"{share:.1%} of the text is held out" in warning for warning in report.warnings] == [True] * told


def test_the_report_warns_of_a_source_that_is_wholly_held_out(write_lines, prepare, prose):
    paths = {f"s{k:02d}": write_lines(f"{k}.jsonl", [prose(k)]) for k in range(12)}
    _, report = prepare(*(SourceSettings(name=name, path=path) for name, path in paths.items()), heldout_fraction=0.3)
    held = [source.name for source in report.sources if not source.documents_kept]
    assert held
    assert [warning.split(":")[0] for warning in report.warnings] == [f"source {name}" for name in held]


def test_the_report_warns_where_near_copies_may_stand_on_both_sides(write_lines, prepare, prose):
    path = write_lines("a.jsonl", [prose(k) for k in range(200)])
    filters = FilterOverrides(near_duplicates=False)
    _, report = prepare(SourceSettings(name="a", path=path, filters=filters))
    assert ["near_duplicates is off" in warning for warning in report.warnings] == [True]


def test_files_that_are_not_read_change_nothing_and_are_counted(write_lines, prepare, prose, tmp_path):
    folder = write_lines("in/a.jsonl", [prose(k) for k in range(9)]).parent
    (folder / ".DS_Store").write_text("hidden files are nothing to speak of")
    plain, _ = prepare(folder, out="plain")
    source = SourceSettings(name="a", path=folder)
    assert find_files(source).passed_over == ""
    (folder / "b.pdf").write_text("x")
    (folder / "c.docx").write_text("x")
    (folder / "d.txt").symlink_to(tmp_path / "in" / "a.jsonl")
    (folder / "e.txt").touch()
    (folder / ".#lock.txt").symlink_to("nobody@nowhere")
    again, _ = prepare(folder, out="again")
    assert hash_tree(again) == hash_tree(plain)
    assert find_files(source).passed_over == "1 empty, 1 link, 2 other kind"


def test_progress_names_each_stage_and_nothing_else_is_said_or_left(write_lines, prose, tmp_path):
    write_lines("in/a.jsonl", [prose(k) for k in range(20)])
    code = """
from pathlib import Path
from modicum.corpus import prepare_corpus
from modicum.recipe import CorpusSettings, SourceSettings
settings = CorpusSettings(sources=[SourceSettings(name="a", path=Path("in"))])
prepare_corpus(settings, Path("out"), seed=0, decontaminate_against=[], progress=print)
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stderr == ""
    stages = [line.split(",")[0] for line in run.stdout.splitlines()]
    assert list(dict.fromkeys(stages)) == [
        f"corpus: {stage}" for stage in ("read", "filter", "near duplicates", "decide", "write")
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "documents",
        "heldout",
        "manifest.json",
        "report.json",
    ]


def test_the_room_is_imported_without_what_it_may_not_need():
    code = "import sys, modicum.corpus; print({'datatrove', 'pyarrow', 'datasets', 'torch'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"


def test_a_killed_run_leaves_no_process_and_the_next_one_starts_afresh(write_lines, prose, tmp_path, prepare):
    path = write_lines("in/a.jsonl", [prose(k) for k in range(200)])
    code = f"""
from pathlib import Path
from modicum.corpus import prepare_corpus
from modicum.recipe import CorpusSettings, SourceSettings
if __name__ == "__main__":
    settings = CorpusSettings(sources=[SourceSettings(name="a", path=Path({str(path.parent)!r}))], workers=2)
    prepare_corpus(settings, Path("out"), seed=0, decontaminate_against=[], progress=lambda m: print(m, flush=True))
"""
    (tmp_path / "run.py").write_text(code)
    process = subprocess.Popen(
        [sys.executable, "run.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with process:
        for line in process.stdout:
            if line == "corpus: filter, 4 of 4\n":
                process.kill()
                break
        assert process.stdout.read() is not None  # ends only when every process has closed it
    assert process.returncode == -signal.SIGKILL
    for _ in range(100):
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.1)
    else:
        pytest.fail("processes of the killed run are still there")
    assert not (tmp_path / "out").exists()
    prepare(path.parent)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out", "run.py"]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    peaks = []
    for documents in (20_000, 100_000):
        draw = random.Random(documents)
        vocabulary = [f"word{i}" for i in range(5000)]
        path = tmp_path / f"{documents}.jsonl"
        with path.open("w") as file:
            for k in range(documents):
                text = f"copy {k % 977} " * 10 if k % 3 == 0 else " ".join(draw.choices(vocabulary, k=40))
                file.write(json.dumps({"text": text}) + "\n")
        code = f"""
import resource
from pathlib import Path
from modicum.corpus import prepare_corpus
from modicum.recipe import CorpusSettings, SourceSettings
settings = CorpusSettings(sources=[SourceSettings(name="a", path=Path({str(path)!r}))], memory_mb=64)
prepare_corpus(settings, Path({str(tmp_path / "out")!r}), seed=0, decontaminate_against=[])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if {sys.platform == "darwin"} else 1024))
"""
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        peaks.append(int(run.stdout))
    assert peaks[1] - peaks[0] < 64 * 2**20, peaks
