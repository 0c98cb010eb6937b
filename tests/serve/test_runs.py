"""Runs for the page: read as they grow, and only those that a listing shows."""

import json
import os

import pytest


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def run(root):
    stage = root / "a run" / "pretrain"
    (stage / "checkpoints" / "step-00000002").mkdir(parents=True, exist_ok=True)
    (stage / "metrics.jsonl").write_text(line(1) + line(2))
    return stage


@pytest.fixture(scope="module")
def http(start, root):
    with start(runs=root) as server, server.http() as http:
        yield http


def line(step):
    return json.dumps({"kind": "train", "step": step, "loss": 1.5}) + "\n"


def steps(page):
    return [record["step"] for record in page["records"]]


@pytest.mark.usefixtures("run")
def test_runs_with_curves_are_listed(http, root):
    (root / "empty").mkdir(exist_ok=True)
    (found,) = http.get("/runs").json()["runs"]
    assert (found["name"], found["stages"], found["has_samples"]) == ("a run", ["pretrain"], False)
    assert found["checkpoints"] == {"pretrain": ["step-00000002"]}


def test_a_curve_is_read_on_from_where_it_ended(http, run):
    file = run / "metrics.jsonl"
    first = http.get("/runs/a run/pretrain").json()
    assert (steps(first), first["again"]) == ([1, 2], True)
    with file.open("a") as more:
        more.write(line(3) + line(4)[:10])
    second = http.get("/runs/a run/pretrain", params={"cursor": first["cursor"]}).json()
    assert (steps(second), second["again"]) == ([3], False)
    with file.open("a") as more:
        more.write(line(4)[10:])
    third = http.get("/runs/a run/pretrain", params={"cursor": second["cursor"]}).json()
    assert steps(third) == [4]
    assert steps(http.get("/runs/a run/pretrain", params={"cursor": third["cursor"]}).json()) == []


def test_a_curve_that_was_replaced_begins_anew(http, run):
    first = http.get("/runs/a run/pretrain").json()
    (run / "new").write_text(line(1) + line(2) + line(3))
    os.replace(run / "new", run / "metrics.jsonl")
    again = http.get("/runs/a run/pretrain", params={"cursor": first["cursor"]}).json()
    assert (steps(again), again["again"]) == ([1, 2, 3], True)


@pytest.mark.parametrize("cursor", ["x", "1-2-3", "-", "9" * 400, "1-\u0663"])
@pytest.mark.usefixtures("run")
def test_a_cursor_of_anothers_making_begins_anew(http, cursor):
    page = http.get("/runs/a run/pretrain", params={"cursor": cursor}).json()
    assert (steps(page), page["again"]) == ([1, 2], True)


@pytest.mark.parametrize("place", ["5", "0" * 15 + "5", "0" * 14 + "7"])
def test_a_place_within_a_line_begins_anew(http, run, place):
    cursor = f"{(run / 'metrics.jsonl').stat().st_ino}-{place}"
    page = http.get("/runs/a run/pretrain", params={"cursor": cursor}).json()
    assert (steps(page), page["again"]) == ([1, 2], True)


DAMAGED = [b"{", b"3", b"[1]", b"", b"\xff\xfe", b'{"kind": "train", "st', b"[" * 100_000, b'{"step": 1', b"9" * 5000]


@pytest.mark.parametrize("damaged", [*DAMAGED, *(b"\n".join(DAMAGED[i:]) for i in range(2))], ids=lambda d: d[:12])
def test_damaged_lines_are_left_out_and_counted(http, run, damaged):
    (run / "metrics.jsonl").write_bytes(line(1).encode() + damaged + b"\n" + line(2).encode() + line(3).encode()[:9])
    page = http.get("/runs/a run/pretrain").json()
    assert (steps(page), page["damaged"]) == ([1, 2], damaged.count(b"\n") + 1)
    with (run / "metrics.jsonl").open("ab") as more:
        more.write(line(3).encode()[9:])
    rest = http.get("/runs/a run/pretrain", params={"cursor": page["cursor"]}).json()
    assert (steps(rest), rest["damaged"]) == ([3], 0)


def test_a_line_beyond_what_is_read_at_once_is_left_out_and_the_curve_goes_on(http, run):
    with (run / "metrics.jsonl").open("wb") as file:
        file.write(line(1).encode() + b"x" * (9 << 20) + b"\n" + line(2).encode() + b"y" * (5 << 20))
    first = http.get("/runs/a run/pretrain").json()
    assert (steps(first), first["more"]) == ([1], True)
    second = http.get("/runs/a run/pretrain", params={"cursor": first["cursor"]}).json()
    assert (steps(second), second["damaged"], second["more"]) == ([], 1, True)
    third = http.get("/runs/a run/pretrain", params={"cursor": second["cursor"]}).json()
    assert steps(third) == [2]
    unfinished = http.get("/runs/a run/pretrain", params={"cursor": third["cursor"]}).json()
    assert (unfinished["cursor"], unfinished["damaged"], unfinished["more"]) == (third["cursor"], 0, False)


def test_a_directory_that_is_gone_has_no_runs(start, tmp_path):
    root = tmp_path / "runs"
    root.mkdir()
    with start(runs=root) as server, server.http() as http:
        root.rmdir()
        assert http.get("/runs").json() == {"runs": []}
        assert http.get("/runs/a/pretrain").status_code == 404


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999"])
def test_what_is_no_number_in_json_is_null(http, run, value):
    (run / "metrics.jsonl").write_text(f'{{"kind": "train", "step": 1, "loss": {value}, "note": "\\ud800"}}\n')
    response = http.get("/runs/a run/pretrain")
    assert (response.status_code, response.json()["damaged"]) == (200, 0)
    assert response.json()["records"][0]["loss"] is None


@pytest.mark.parametrize("text", [*DAMAGED, b'{"samples": 3}', b'{"samples": [3]}'], ids=lambda d: d[:12])
def test_damaged_samples_break_nothing(http, run, text):
    (run.parent / "evaluate").mkdir(exist_ok=True)
    (run.parent / "evaluate" / "results.json").write_bytes(text)
    response = http.get("/runs/a run/samples")
    assert response.status_code == 404 or response.json() == {"samples": []}


def test_samples_are_those_of_the_evaluation(http, run):
    (run.parent / "evaluate").mkdir(exist_ok=True)
    samples = [{"messages": [{"role": "text", "content": "a"}]}]
    (run.parent / "evaluate" / "results.json").write_text(json.dumps({"samples": samples, "heldout": {}}))
    assert http.get("/runs/a run/samples").json() == {"samples": samples}


@pytest.mark.usefixtures("run")
def test_nothing_outside_of_the_directory_is_read(http, root):
    outside = root.parent / "outside" / "pretrain"
    outside.mkdir(parents=True, exist_ok=True)
    (outside / "metrics.jsonl").write_text(line(1))
    if not (root / "link").exists():
        (root / "link").symlink_to(outside.parent)
    for name in ("..%2Foutside", "%2e%2e", "link", "none", "a run%00"):
        for rest in ("pretrain", "samples", "..%2Fpretrain"):
            assert http.get(f"/runs/{name}/{rest}").status_code == 404, (name, rest)
    assert http.get("/runs/a run/checkpoints").status_code == 404
    assert [one["name"] for one in http.get("/runs").json()["runs"]] == ["a run"]


def test_a_server_without_a_directory_shows_no_runs(server):
    with server.http() as http:
        assert http.get("/runs").status_code == 404
