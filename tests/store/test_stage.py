import pytest

from modicum.store import Stage

HOW = {"code_version": "1", "seed": 0, "device": lambda: "cpu"}


def test_a_stage_is_finished_only_when_its_work_ended_well(tmp_path):
    stage = Stage(tmp_path / "corpus")
    assert stage.changed_inputs({"source": "a"}) is None
    with pytest.raises(RuntimeError), stage.record({"source": "a"}, **HOW):
        raise RuntimeError
    assert stage.changed_inputs({"source": "a"}) is None
    with stage.record({"source": "a"}, **HOW):
        pass
    assert stage.changed_inputs({"source": "a"}) == []


def test_a_changed_new_or_vanished_input_is_named(tmp_path):
    stage = Stage(tmp_path / "corpus")
    with stage.record({"source": "a", "settings": "b"}, **HOW):
        pass
    assert stage.changed_inputs({"source": "x", "settings": "b"}) == ["source"]
    assert stage.changed_inputs({"source": "a"}) == ["settings"]
    assert stage.changed_inputs({"source": "a", "settings": "b", "more": "c"}) == ["more"]


def test_a_stage_that_is_done_again_is_unfinished_meanwhile(tmp_path):
    stage = Stage(tmp_path / "corpus")
    with stage.record({}, **HOW):
        pass
    with stage.record({}, **HOW):
        assert stage.manifest() is None
    assert stage.manifest().stage == "corpus"


def test_a_manifest_of_another_shape_counts_as_unfinished(tmp_path):
    (tmp_path / "manifest.json").write_text('{"files": {}}')
    assert Stage(tmp_path).changed_inputs({}) is None
