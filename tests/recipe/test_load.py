import contextlib
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from modicum.recipe import PRESETS, identity, load_recipe, resolved_yaml
from modicum.store import UserError

MINIMAL = "name: r\ncorpus: {sources: [{name: s, path: text.txt}]}\n"


@pytest.fixture
def write(tmp_path):
    (tmp_path / "text.txt").write_text("some text")

    def write(text):
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return path

    return write


def faults(path, *overrides):
    with pytest.raises(UserError) as error:
        load_recipe(path, list(overrides))
    return str(error.value).splitlines()


def test_a_minimal_recipe_gets_every_default(write):
    recipe = load_recipe(write(MINIMAL))
    assert recipe.model.hidden_size == PRESETS["micro"]["hidden_size"]
    assert recipe.run_folder.name == "r"
    assert recipe.run_folder.parent.name == "runs"


def test_paths_are_relative_to_the_recipe_and_not_to_the_working_directory(write, tmp_path, monkeypatch):
    path = write(MINIMAL)
    monkeypatch.chdir("/")
    assert load_recipe(path).corpus.sources[0].path == (tmp_path / "text.txt").resolve()


def test_the_resolved_recipe_loads_as_an_equal_one(write, tmp_path):
    recipe = load_recipe(
        write(MINIMAL + "sft: {data: [text.txt], epochs: 1.5}\nmodel: {preset: nano, rope_theta: 5e4}\n")
    )
    again = tmp_path / "resolved.yaml"
    again.write_text(resolved_yaml(recipe))
    assert load_recipe(again) == recipe


WORDS = ["3e-4", "1e3", "1.5", "0x10", "1_000", "12", "true", "null", "no", "Off", "2024-01-01", "1.e1", "on"]


@pytest.mark.parametrize("word", WORDS)
def test_a_word_that_looks_like_something_else_stays_a_word_when_it_is_written_out(write, tmp_path, word):
    source = f"{{name: '{word}', path: text.txt, language: '{word}'}}"
    text = f"name: '{word}'\ncorpus: {{sources: [{source}], languages: {{'{word}': {{}}}}}}\n"
    recipe = load_recipe(write(text))
    again = tmp_path / "resolved.yaml"
    again.write_text(resolved_yaml(recipe))
    assert load_recipe(again) == recipe
    assert recipe.name == word


def test_an_unknown_key_is_named_with_the_nearest_known_one(write):
    lines = faults(write(MINIMAL + "pretrain: {stepz: 3}\n"))
    assert len(lines) == 1
    assert lines[0].endswith("pretrain.stepz: unknown key; did you mean steps?")


def test_an_unknown_key_with_no_near_one_lists_what_is_known(write):
    (line,) = faults(write(MINIMAL + "tokenizer: {qqq: 3}\n"))
    assert "vocab_size" in line


def test_all_faults_are_told_at_once_each_with_its_dotted_path(write):
    text = """
name: r
corpus: {sources: [{name: s, path: text.txt, wieght: 2}, {name: t, path: nowhere.txt}]}
tokenizer: {vocab_size: 0}
model: {hidden_size: 256, num_attention_heads: 3, max_position_embeddings: 128}
pretrain: {steps: many, sequence_length: 512}
sft: {data: [nowhere.jsonl]}
"""
    lines = faults(write(text))
    for expected in (
        "corpus.sources.0.wieght: unknown key; did you mean weight?",
        "corpus.sources.1.path: no such file or folder",
        "tokenizer.vocab_size: input should be greater than or equal to 320",
        "model: num_attention_heads 3 does not divide hidden_size 256",
        "pretrain.steps: input should be a valid integer",
        "pretrain.sequence_length: 512 tokens are longer than model.max_position_embeddings 128",
        "sft.data.0: no such file or folder",
    ):
        assert any(expected in line for line in lines), (expected, lines)


def test_a_sequence_longer_than_the_positions_is_refused_also_when_all_else_is_right(write):
    (line,) = faults(write(MINIMAL + "model: {preset: nano}\npretrain: {sequence_length: 1024}\n"))
    assert "longer than model.max_position_embeddings 512" in line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model: {num_attention_heads: 4, num_key_value_heads: 3}", "num_key_value_heads 3 does not divide"),
        ("model: {head_dim: 3}", "head_dim must be even"),
        ("model: {qk_norm: true, mlp_bias: true}", "neither a stock Llama nor a stock Qwen3"),
        ("pretrain: {batch_size: 8, micro_batch_size: 3}", "does not divide batch_size"),
        ("pretrain: {warmup_fraction: 0.6, decay_fraction: 0.5}", "more than the whole run"),
        ("pretrain: {optimizer: adamw, momentum: 0.9}", "momentum: of optimizer muon alone"),
        ("pretrain: {optimizer: adamw, embedding_learning_rate_factor: 3}", "factor: of optimizer muon alone"),
        ("pretrain: {schedule: cosine, decay_fraction: 0.2}", "decay_fraction: of schedule wsd alone"),
        ("pretrain: {learning_rate: .inf}", "learning_rate"),
        ("pretrain: {steps: '100'}", "valid integer"),
        ("seed: -1", "seed"),
        ("sft: {epochs: 1}", "sft.data: missing"),
        ("sft: {data: []}", "sft.data"),
        ("corpus: {sources: []}", "corpus.sources"),
        ("corpus: {sources: [{name: s}]}", "exactly one of path"),
        ("corpus: {sources: [{name: s, path: text.txt}, {name: s, path: text.txt}]}", "names must differ"),
        ("name: ../escape", "name"),
        ("corpus: {sources: [{name: s, path: text.txt}, {name: S, path: text.txt}]}", "upper and lower case; twice: s"),
        ("corpus: {sources: [{name: s, path: text.txt, split: test, revision: v1}]}", "split, revision: of a Hub data"),
        ("corpus: {sources: [{name: s, path: text.txt, subset: x}]}", "subset: of a Hub data set alone"),
        ("corpus: {sources: [{name: s, path: text.txt}], languages: {de: {}}}", "language de; theirs are en"),
        ("corpus: {sources: [{name: s, hub: ./folder}]}", "hub './folder': expected the name of a data set"),
        ("corpus: {sources: [{name: s, hub: /folder/set}]}", "hub '/folder/set': expected the name of a data set"),
        (
            "tokenizer: {path: text.txt, vocab_size: 512, sample_mb: 3}",
            "tokenizer: vocab_size, sample_mb: for training",
        ),
        ("tokenizer: {path: text.txt, min_frequency: 3}", "tokenizer: min_frequency: for training"),
        ("tokenizer: {missing_special_tokens: extend}", "missing_special_tokens: for a tokenizer that path loads"),
        ("corpus: {sources: [{name: s, path: ~nosuchuser/x}]}", "corpus.sources.0.path: ~nosuchuser/x: "),
        ("output: ~nosuchuser/x", "output: ~nosuchuser/x: "),
        pytest.param(f"corpus: {{sources: [{{name: s, path: {'x' * 300}}}]}}", "corpus.sources.0.path: ", id="long"),
    ],
)
def test_impossible_settings_are_refused_by_name(write, text, expected):
    values = yaml.safe_load(MINIMAL) | yaml.safe_load(text)
    assert any(expected in line for line in faults(write(yaml.safe_dump(values))))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: [r", "recipe.yaml:1"),
        ("name: r\nname: s\n", "'name' comes twice"),
        ("- a\n- b\n", "expected keys and values"),
        ("", "expected keys and values"),
        ("x: !!python/object/apply:os.system [true]", "not valid YAML"),
        ("? {a: b}\n: c\n", "recipe.yaml:1:3: not valid YAML: a key must be"),
        ("? [a]\n: c\n", "recipe.yaml:1:3: not valid YAML: a key must be"),
        pytest.param("[" * 5000, "nested too deeply", id="lists"),
        pytest.param("x: " + "{a: " * 5000, "nested too deeply", id="keys"),
        ("x: !!int ''", "not valid YAML"),
        ("x: !!bool maybe", "not valid YAML"),
        ("x: !!binary gICA", "recipe.yaml:1:4: not valid YAML"),
        ("x: \x07", "not valid YAML"),
    ],
)
def test_what_is_not_a_recipe_is_one_clear_line(write, text, expected):
    (line,) = faults(write(text))
    assert expected in line


def test_a_missing_or_unreadable_recipe_says_how_to_get_one(tmp_path):
    assert "modicum new" in faults(tmp_path / "none.yaml")[0]
    assert "a folder" in faults(tmp_path)[0]
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe")
    assert "not UTF-8" in faults(tmp_path / "x.yaml")[0]


@pytest.mark.parametrize(("text", "value"), [("1e-3", 1e-3), ("1.5E+2", 150.0), ("3", 3.0), (".5", 0.5)])
def test_numbers_are_read_as_people_write_them(write, text, value):
    assert load_recipe(write(MINIMAL + f"pretrain: {{learning_rate: {text}}}\n")).pretrain.learning_rate == value


def test_words_that_old_yaml_takes_for_booleans_stay_words(write):
    text = "name: r\ncorpus: {sources: [{name: no, path: text.txt, language: no}]}\n"
    source = load_recipe(write(text)).corpus.sources[0]
    assert (source.name, source.language) == ("no", "no")


def test_an_override_reaches_any_depth(write):
    path = write(MINIMAL)
    recipe = load_recipe(
        path,
        ["pretrain.steps=7", "model.preset=nano", "corpus.sources.0.weight=2", "sft.data=[text.txt]", "sft.epochs=1e0"],
    )
    assert recipe.pretrain.steps == 7
    assert recipe.model.hidden_size == 128
    assert recipe.corpus.sources[0].weight == 2
    assert recipe.sft is not None
    assert recipe.sft.epochs == 1


@pytest.mark.parametrize("override", ["steps", "=3", "pretrain..steps=1", "name.x=1", "corpus.sources.9.weight=1"])
def test_an_override_that_means_nothing_is_refused(write, override):
    assert "--set" in faults(write(MINIMAL), override)[0]


@pytest.mark.parametrize("override", ["sft.data.0.x=1", "sft.data.0.x.y=1", "sft.data.0.0=1"])
def test_an_override_below_a_value_of_a_list_is_refused(write, override):
    (line,) = faults(write(MINIMAL + "sft: {data: [text.txt]}\n"), override)
    assert f"--set {override.split('=')[0]}: 0 holds a value, not keys" in line


@pytest.mark.parametrize(
    ("path", "output"),
    [(".", "runs"), ("texts", "texts/deep/runs"), ("runs", "runs"), ("runs/r", "runs"), ("runs/r/x.txt", "runs")],
)
def test_what_a_run_writes_is_not_its_own_source(write, tmp_path, path, output):
    (tmp_path / "texts").mkdir()
    (tmp_path / "runs" / "r").mkdir(parents=True)
    (tmp_path / "runs" / "r" / "x.txt").write_text("some text")
    recipe = write(f"name: r\noutput: {output}\ncorpus: {{sources: [{{name: s, path: {path}}}]}}\n")
    (line,) = faults(recipe)
    assert "corpus.sources.0.path: " in line
    assert "the run's own folder" in line


def test_text_beside_the_runs_and_another_runs_text_may_be_sources(write, tmp_path):
    for name in ("runs-of-text", "runs/r2", "r"):
        (tmp_path / name).mkdir(parents=True)
        load_recipe(write(f"name: r\ncorpus: {{sources: [{{name: s, path: {name}}}]}}\n"))


def test_links_that_lead_round_in_a_circle_are_no_path(write, tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    (line,) = faults(write("name: r\ncorpus: {sources: [{name: s, path: a}]}\n"))
    assert "corpus.sources.0.path: " in line


def test_a_folder_here_is_not_taken_for_a_data_set_of_the_hub(write, tmp_path, monkeypatch):
    recipe = write("name: r\ncorpus: {sources: [{name: s, hub: some/set, revision: v1}]}\n")
    assert load_recipe(recipe).corpus.sources[0].revision == "v1"
    (tmp_path / "some" / "set").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    (line,) = faults(recipe)
    assert "corpus.sources.0: hub 'some/set': expected the name" in line


def test_identity_holds_what_the_run_is_and_leaves_out_how_it_is_carried_out(write):
    plain = load_recipe(write(MINIMAL))
    how = ["steps=9", "device=cpu", "keep_last=5", "micro_batch_size=2"]
    operated = load_recipe(write(MINIMAL), [f"pretrain.{setting}" for setting in how])
    changed = load_recipe(write(MINIMAL), ["pretrain.learning_rate=1e-4"])
    assert identity(plain.pretrain) == identity(operated.pretrain)
    assert identity(plain.pretrain) != identity(changed.pretrain)


def test_identity_does_not_depend_on_where_a_file_lies(write, tmp_path):
    (tmp_path / "moved.txt").write_text("some text")
    here = load_recipe(write(MINIMAL))
    there = load_recipe(write(MINIMAL), ["corpus.sources.0.path=moved.txt"])
    assert identity(here.corpus) == identity(there.corpus)


PIECES = [
    *"{}[],:?-&*!|>'\"%@`~=#. \n\t", "? ", "- ", ": ", "---\n", "\n  ", "&a ", "*a", "<<", "é",
    "!!int ", "!!float ", "!!bool ", "!!timestamp ", "!!binary ", "!!set ", "!!omap ", "!!map ", "!!str ", "!x ",
    "1", "0x", "1e3", "1:30", "true", "null", "name", "corpus", "sources", "path", "model", "rope_scaling", "sft",
]  # fmt: skip
YAML_LIKE = st.lists(st.sampled_from(PIECES), max_size=40).map("".join)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60) | YAML_LIKE)
def test_no_text_whatsoever_ends_in_a_traceback(text):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(text, "utf-8")
        with pytest.raises(UserError):
            load_recipe(path)


@given(st.sampled_from(["name", "corpus", "corpus.sources.0.path", "model.rope_scaling", "sft.data", "x"]), YAML_LIKE)
def test_no_override_whatsoever_ends_in_a_traceback(key, value):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "text.txt").write_text("some text")
        (Path(folder) / "recipe.yaml").write_text(MINIMAL)
        with contextlib.suppress(UserError):
            resolved_yaml(load_recipe(Path(folder) / "recipe.yaml", [f"{key}={value}"]))
