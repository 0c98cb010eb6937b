"""One answer and one prompt, measured in each system on the same weights."""

import json

import pytest
from typer.testing import CliRunner

from modicum.bench import decoding_worker
from modicum.bench.decoding import DecodeBench, DecodeRow, bench_decoding
from modicum.checkpoint import load_checkpoint, save_checkpoint
from modicum.cli import bench_decode
from modicum.cli.app import app
from modicum.model import Decoder, ModelConfig
from modicum.store import UserError
from modicum.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    texts = ["An answer comes token by token, and the first one waits for the prompt. 1, 2, 3."] * 40
    tokenizer = train_tokenizer(texts, vocab_size=384, min_frequency=2, sample_bytes=10**6, seed=0)[0]
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=96,
        max_position_embeddings=64,
    )
    weights = Decoder(config).state_dict()
    root = tmp_path_factory.mktemp("checkpoints")
    return save_checkpoint(root, 1, config=config, weights=weights, tokenizer=tokenizer, chat=False, training=None)


def row(system, mode, speed, memory=100.0):
    return DecodeRow(system, mode, speed, speed, speed, 10 * speed, memory)


def test_ratios_are_of_the_first_row_to_each_other():
    found = DecodeBench("x", (row("modicum", "int8", 300), row("llama.cpp", "q8_0", 200, 50)), {"line": "m"})
    assert found.ratios == {
        "tokens_per_s": {"llama.cpp q8_0": 1.5},
        "prefill_tokens_per_s": {"llama.cpp q8_0": 1.5},
        "peak_rss_mb": {"llama.cpp q8_0": 2.0},
    }
    assert found.to_dict().keys() == {"what", "rows", "ratios", "machine"}
    assert any("llama.cpp q8_0" in line and "1.50 x" in line for line in bench_decode.decode_lines(found))


def test_the_worker_gives_as_many_tokens_as_it_counts(checkpoint, monkeypatch):
    asked = []
    real = decoding_worker._modicum

    def counting(path):
        answer = real(path)

        def counted(ids, tokens):
            (completion,) = answer(ids, tokens)
            asked.append((len(ids), len(completion.ids)))

        return counted

    monkeypatch.setattr(decoding_worker, "_modicum", counting)
    order = {"system": "modicum", "path": str(checkpoint), "threads": 1, "repeats": 1, "tokens": 5}
    found = decoding_worker.measure({**order, "prompt": [1] * 20, "short": [1] * 16})
    assert asked == [(20, 1), (16, 1), (16, 6)] * 2
    assert found["tokens_per_s"] > 0
    assert found["prefill_tokens_per_s"] > 0


def test_what_does_not_fit_the_context_is_refused(checkpoint):
    with pytest.raises(UserError, match="context of 64"):
        bench_decoding(checkpoint, prompt=64)


def test_a_stranger_among_the_peers_is_named(checkpoint):
    ended = CliRunner().invoke(app, ["bench", "decode", str(checkpoint), "--against", "transformers,ollama"])
    assert ended.exit_code == 2
    assert "ollama" in ended.output


def test_number_types_of_a_peer_that_is_not_there_are_refused(checkpoint):
    ended = CliRunner().invoke(app, ["bench", "decode", str(checkpoint), "--gguf", "q4_0"])
    assert ended.exit_code == 2
    assert "needs --against llama.cpp" in ended.output


@pytest.mark.slow
def test_all_systems_have_a_turn_on_the_same_weights(checkpoint):
    size = {"prompt": 40, "tokens": 8, "repeats": 1, "rounds": 1}
    found = bench_decoding(checkpoint, ours=["int8", "int4"], transformers=True, llama=["f32", "q8_0"], **size)
    assert [f"{r.system} {r.mode}" for r in found.rows] == [
        "modicum int8",
        "modicum int4",
        "transformers generate fp32",
        "llama.cpp f32",
        "llama.cpp q8_0",
    ]
    assert all(r.low <= r.tokens_per_s <= r.high and r.peak_rss_mb > 10 for r in found.rows)
    json.dumps(found.to_dict())
    assert load_checkpoint(checkpoint).rounded == {}
