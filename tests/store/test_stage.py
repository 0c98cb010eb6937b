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


def test_work_that_is_refused_leaves_a_finished_stage_finished_unless_it_changed_something(tmp_path):
    stage, file = Stage(tmp_path / "pretrain"), tmp_path / "pretrain" / "checkpoints" / "weights"
    with stage.record({"settings": "a"}, **HOW):
        file.parent.mkdir()
        file.write_text("1")
    with pytest.raises(ValueError, match="no"), stage.record({"settings": "b"}, **HOW):
        raise ValueError("no")
    assert stage.changed_inputs({"settings": "a"}) == []
    with pytest.raises(ValueError, match="no"), stage.record({"settings": "b"}, **HOW):
        file.write_text("22")
        raise ValueError("no")
    assert stage.manifest() is None


def test_a_manifest_of_another_shape_counts_as_unfinished(tmp_path):
    (tmp_path / "manifest.json").write_text('{"files": {}}')
    assert Stage(tmp_path).changed_inputs({}) is None
