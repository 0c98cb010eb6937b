"""The verb that puts users on a server: its rows, what it refuses, and a real server under it."""

import json

import pytest
import torch
from typer.testing import CliRunner

from modicum.bench import serving
from modicum.bench.decoding import _rounded
from modicum.bench.serving import ServeBench, ServeRow, bench_serving, nearest_type
from modicum.bench.serving_load import Load, Mix
from modicum.checkpoint import load_checkpoint, save_checkpoint
from modicum.cli.app import app
from modicum.cli.bench_serve import GgufName, serve_lines
from modicum.exchange.gguf_weights import TYPES
from modicum.model import Decoder, ModelConfig
from modicum.store import UserError, write_manifest
from modicum.tokenizer import train_tokenizer

WAITS = [f"{name}{which}_ms" for name in ("first_token", "between_tokens") for which in ("", "_p95", "_p99")]


def saved(root, dtype=torch.float32):
    texts = ["Many users ask one server, and each of them waits for the first word of an answer. 1, 2, 3."] * 40
    tokenizer = train_tokenizer(texts, vocab_size=384, min_frequency=2, sample_bytes=10**6, seed=0)[0]
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=96,
        max_position_embeddings=256,
        initializer_range=0.1,
    )
    model = Decoder(config)
    model.init_weights(3)
    weights = {name: weight.to(dtype) for name, weight in model.state_dict().items()}
    return save_checkpoint(root, 1, config=config, weights=weights, tokenizer=tokenizer, chat=False, training=None)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("checkpoints"))


def row(system="modicum", load="4 users", speed=300.0, wait=20.0, faults=None):
    figures = dict.fromkeys(WAITS, wait)
    errors = sum((faults or {}).values())
    counts = {"slots": 4, "requests": 32, "errors": errors, "faults": faults or {}}
    rest = {"tokens_per_piece": 1.0, "ready_s": 2.0, "peak_rss_mb": 100.0}
    return ServeRow(system, "int8", load, **counts, tokens_per_s=speed, low=speed, high=speed, **figures, **rest)


def test_ratios_are_ours_by_the_peers_under_the_same_load():
    rows = (row(), row("llama.cpp", speed=100, wait=40), row(load="1 user", speed=50), row("llama.cpp", "1 user", 100))
    found = ServeBench("x", rows, {"line": "m"})
    assert found.ratios["tokens_per_s"] == {"llama.cpp int8, 4 users": 3.0, "llama.cpp int8, 1 user": 0.5}
    assert found.ratios["first_token_ms"] == {"llama.cpp int8, 4 users": 0.5, "llama.cpp int8, 1 user": 1.0}
    assert found.to_dict().keys() == {"what", "rows", "ratios", "machine"}
    json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.parametrize("faulty", ["modicum", "llama.cpp"])
def test_rows_with_errors_on_either_side_are_not_compared(faulty):
    rows = [row(system, faults={"late": 1} if system == faulty else None) for system in ("modicum", "llama.cpp")]
    assert set(map(len, ServeBench("x", tuple(rows), {"line": "m"}).ratios.values())) == {0}


def test_the_table_has_a_line_a_row_and_says_what_failed():
    failing = row("llama.cpp", speed=100, faults={"status 503: too many": 3})
    whole = (row(load="1 user"), row("llama.cpp", "1 user", speed=100, wait=50))
    lines = serve_lines(ServeBench("x", (*whole, row(), failing), {"line": "m"}))
    (line,) = [line for line in lines if line.startswith("llama.cpp int8, 4 users  ")]
    assert "3 of 32" in line
    assert " x" not in line
    (line,) = [line for line in lines if line.startswith("llama.cpp int8, 1 user  ")]
    assert line.split()[-4:] == ["3.00", "x", "2.50", "x"]
    assert lines[-1] == "llama.cpp int8, 4 users: 3 x status 503: too many"


def test_rows_are_medians_of_rounds_and_counts_are_sums(checkpoint, monkeypatch):
    asked = []

    def turns(module, orders, *, rounds, say):  # noqa: ARG001
        asked.append(orders)
        one = {**dict.fromkeys(WAITS, 1.0), "requests": 5, "tokens_per_piece": 1.0, "ready_s": 1.0, "peak_rss_mb": 7.0}
        faults = [{}, {"a": 1}, {"a": 1, "b": 1}]
        rounds = [
            {**one, "tokens_per_s": speed, "faults": found, "errors": sum(found.values())}
            for speed, found in zip((10.0, 40.0, 20.0), faults, strict=True)
        ]
        return dict.fromkeys(orders, rounds)

    monkeypatch.setattr(serving, "take_turns", turns)
    found = bench_serving(checkpoint, loads=[Load(2), Load(rate=3.0)], mix=Mix((30,), (4,)))
    command = asked[0]["modicum float32"]["command"]
    assert command[command.index("--context") + 1] == "66", "what the requests need, and a little more"
    first, second = found.rows
    assert (first.tokens_per_s, first.low, first.high) == (20.0, 10.0, 40.0)
    assert (first.requests, first.errors, first.faults) == (15, 3, {"a": 2, "b": 1})
    assert (first.load, first.slots, second.load, second.slots) == ("2 users", 2, "3 requests/s", 16)
    closed, opened = (orders["modicum float32"] for orders in asked)
    assert (closed["users"], opened["users"]) == (2, None)
    assert len(closed["warm"]) == 2
    assert [one["prompt"] for one in closed["asked"]] == [one["prompt"] for one in opened["asked"][:32]]
    assert opened["asked"][0]["at"] > 0


def test_what_cannot_be_measured_is_refused_before_any_server_starts(checkpoint, monkeypatch):
    with pytest.raises(UserError, match="context of 256"):
        bench_serving(checkpoint, mix=Mix((200,), (60,)))
    with pytest.raises(UserError, match="at least 2"):
        bench_serving(checkpoint, mix=Mix((20,), (1,)))
    with pytest.raises(UserError, match="fewer than the shortest has"):
        bench_serving(checkpoint, mix=Mix((20, 30), (4,), shared=20))
    with pytest.raises(UserError, match="8 requests are fewer than 16 users"):
        bench_serving(checkpoint, loads=[Load(4), Load(16)], mix=Mix((20,), (4,)), requests=8)
    monkeypatch.setattr(serving, "find_spec", lambda name: None if name == "aiohttp" else name)
    with pytest.raises(UserError, match=r"pip install 'modicum\[bench\]'"):
        bench_serving(checkpoint, mix=Mix((20,), (4,)))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--users", "1,x"], "--users 1,x"),
        (["--users", "1.5"], "whole numbers"),
        (["--prompt", "0"], "above 0"),
        (["--rate", "inf"], "--rate inf"),
        (["--tokens", ","], "--tokens ,"),
        (["--gguf", "q8_0"], "need --against"),
        (["--peer-plain-attention"], "need --against"),
    ],
)
def test_a_faulty_option_is_the_users_to_mend(checkpoint, options, word):
    ended = CliRunner().invoke(app, ["bench", "serve", str(checkpoint), *options])
    assert ended.exit_code == 2
    assert word in ended.output


def test_the_peers_types_are_all_that_a_file_can_have():
    assert [name.value for name in GgufName] == list(TYPES)


def test_the_peers_file_has_the_checkpoints_own_width(checkpoint, tmp_path):
    loaded = load_checkpoint(checkpoint)
    assert nearest_type(loaded) == "f32"
    assert nearest_type(load_checkpoint(saved(tmp_path, torch.bfloat16))) == "bf16"
    for kind, wanted in (("int8", "q8_0"), ("int4", "q4_0")):
        assert nearest_type(load_checkpoint(_rounded(loaded, kind, tmp_path), verify=False)) == wanted


def test_users_are_answered_by_the_real_server(checkpoint):
    options = ["--users", "3", "--prompt", "20,40", "--tokens", "6", "--requests", "7", "--rounds", "1", "--json"]
    ended = CliRunner().invoke(app, ["bench", "serve", str(checkpoint), *options])
    assert ended.exit_code == 0, ended.output
    printed = json.loads(ended.stdout)
    (only,) = printed["rows"]
    assert (only["system"], only["mode"], only["load"], only["slots"]) == ("modicum", "float32", "3 users", 3)
    assert (only["requests"], only["errors"], only["faults"]) == (7, 0, {})
    assert only["tokens_per_s"] > 0
    assert 0 < only["first_token_ms"] <= only["first_token_p95_ms"] <= only["first_token_p99_ms"]
    assert only["ready_s"] > 0.2
    assert only["peak_rss_mb"] > 50
    assert printed["ratios"]["tokens_per_s"] == {}


def test_a_server_that_cannot_start_is_named_with_its_last_words(checkpoint, monkeypatch):
    monkeypatch.setattr(serving, "_ours", lambda *_: ["/bin/sh", "-c", "echo no such weights >&2; exit 2"])
    with pytest.raises(UserError, match=r"^modicum float32: the server ended with status 2; it said: no such weights$"):
        bench_serving(checkpoint, loads=[Load(1)], mix=Mix((20,), (4,)), rounds=1)


@pytest.mark.slow
def test_both_servers_answer_the_same_requests_in_full(checkpoint, tmp_path):
    rounded = _rounded(load_checkpoint(checkpoint), "int8", tmp_path)
    write_manifest(rounded)
    loads = [Load(4), Load(rate=30.0)]
    mix = Mix((20, 60), (8,))
    found = bench_serving(rounded, loads=loads, mix=mix, llama=True, plain_attention=True, requests=12, rounds=1)
    names = [
        f"{system}, {load}"
        for load in ("4 users", "30 requests/s")
        for system in ("modicum int8", "llama.cpp q8_0", "llama.cpp q8_0 plain attention")
    ]
    assert [one.name for one in found.rows] == names
    for one in found.rows:
        assert (one.requests, one.errors, one.faults) == (12, 0, {})
        assert one.low <= one.tokens_per_s <= one.high
        assert one.peak_rss_mb > 10
    assert found.ratios["tokens_per_s"].keys() == {name for name in names if name.startswith("llama.cpp")}
