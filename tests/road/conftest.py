"""The figures of an invented run: what `gather` returns, whole, for the page to be made from; a recipe to plan."""

import math

import pytest

from modicum.recipe import load_recipe


def curve(updates, start, end):
    steps = list(range(0, updates, 5))
    losses = [end + (start - end) * math.exp(-7 * step / updates) for step in steps]
    return {
        "steps": steps,
        "loss": losses,
        "learning_rate": [1e-3] * len(steps),
        "speed": {"steps": steps[1:], "tokens_per_second": [4200.0 + step for step in steps[1:]]},
        "heldout": {"steps": [updates // 2, updates - 1], "loss": [end + 0.3, end + 0.2]},
    }


def stage(updates, start, end):
    return {
        "steps": updates,
        "tokens": updates * 8192,
        "seconds": updates * 2.0,
        "tokens_per_second": 4200.0,
        "peak_memory_bytes": 1_900_000_000,
        "best_heldout_loss": end + 0.2,
        "chosen": {"dtype": "bfloat16", "compile": "on"},
        "curve": curve(updates, start, end),
    }


def bits(value):
    one = {"bits_per_byte": value, "low": value * 0.97, "high": value * 1.03, "bytes": 40_000, "documents": 12}
    return {"domains": {"novels": one, "manuals": {**one, "bytes": 90_000}}, "total": {**one, "bytes": 130_000}}


def score(accuracy, half, n=100):
    span = {"low": accuracy - half, "high": accuracy + half}
    return {"n": n, "accuracy": accuracy, **span, "chance": 0.25, "majority": 0.27, "word_overlap": 0.35}


def nats(value):
    return {"nats_per_token": value, "low": value - 0.1, "high": value + 0.1}


def choices(accuracy):
    parts = {"recall": score(accuracy + 0.02, 0.07, 60), "generalisation": score(accuracy - 0.02, 0.07, 40)}
    return {
        **score(accuracy, 0.05),
        "per_kind": parts,
        "per_source": {"CWE": parts["recall"], "FOLDOC": score(0.3, 0.1)},
    }


@pytest.fixture
def figures():
    heldout = {"untrained": bits(3.9), "base": bits(2.01), "chat": bits(2.2)}
    questions = {"base": choices(0.28), "chat": choices(0.33)}
    source = {
        "name": "library",
        "documents_in": 200,
        "documents_kept": 150,
        "bytes_kept": 5_900_000,
        "documents_heldout": 12,
        "bytes_heldout": 130_000,
        "dropped": {"too short": 30, "near duplicate": 8},
        "licences": {"MIT": {"documents": 100, "bytes": 900_000}, "GPL-2": {"documents": 50, "bytes": 5_000_000}},
    }
    settings = {
        "batch_size": 16,
        "sequence_length": 512,
        "optimizer": "muon",
        "learning_rate": 0.003,
        "schedule": "wsd",
        "warmup_fraction": 0.02,
        "decay_fraction": 0.5,
        "weight_decay": 0.1,
        "betas": [0.9, 0.95],
        "clip_norm": 1.0,
        "separate_documents": True,
        "dtype": "auto",
        "compile": "auto",
    }
    parts = {"embedding": 1_048_576, "attention": 2_097_152, "mlp": 4_718_592, "norms": 4352, "head": 0}
    return {
        "name": "harbour",
        "code_version": "0.1.0",
        "written": "2030-01-01 12:00 UTC",
        "machine": "a processor, 2 cores, 25.3 GB of memory",
        "model": {
            "vocab_size": 4096,
            "hidden_size": 256,
            "num_hidden_layers": 8,
            "parameters": {**parts, "total": sum(parts.values())},
        },
        "headline": {
            "bits_per_byte": {name: result["total"]["bits_per_byte"] for name, result in heldout.items()},
            "choices": questions,
        },
        "training": {"pretrain": stage(300, 8.3, 3.1), "sft": stage(120, 4.0, 1.8)},
        "heldout": heldout,
        "choices": questions,
        "answers": {
            "chat": {
                "prompts": 100,
                "max_new_tokens": 128,
                "stop_rate": 0.97,
                "empty_rate": 0.0,
                "median_length": 31.0,
                "median_reference_length": 29.0,
                "median_length_ratio": 1.07,
                "repeated_4grams": 0.021,
                "repeated_4grams_reference": 0.01,
                "distinct_1": 0.2,
                "distinct_2": 0.6,
                "too_long": 0,
            },
            "loss": {"base": nats(3.1), "chat": nats(1.9), "chat_shuffled": nats(2.9)},
        },
        "not_measured": {},
        "samples": [
            {
                "messages": [
                    {"role": "user", "content": "What is a port?"},
                    {"role": "assistant", "content": "A number."},
                ],
                "reference": "A number from 0 to 65535.",
                "finish_reason": "stop",
            }
        ],
        "corpus": {"sources": [source], "warnings": ["source library: every page is from one printer"]},
        "plan": {
            "stages": [{"name": "pretrain", "steps": 300}, {"name": "sft", "steps": 119}],
            "seconds": {"pretrain": 600.0},
            "peak_memory_bytes": {"pretrain": 2.0e9},
            "how": "cpu, bfloat16",
        },
        "measured": {"seconds": {"pretrain": 560.0, "sft": 210.0}, "peak_memory_bytes": {"pretrain": 1.9e9}},
        "stages": [{"stage": "pretrain", "wall_seconds": 560.0, "device": "cpu", "code_version": "0.1.0"}],
        "recipe": {"name": "harbour", "pretrain": settings, "sft": settings},
    }


@pytest.fixture
def without_tuning(figures):
    """The same run without an sft part, and nothing measured of a chat model."""
    for part in ("training", "heldout", "choices", "headline"):
        figures[part] = dict(figures[part])
    del figures["training"]["sft"], figures["heldout"]["chat"], figures["choices"]["chat"]
    del figures["headline"]["bits_per_byte"]["chat"]
    figures["headline"]["choices"] = figures["choices"]
    figures["recipe"]["sft"] = None
    return {**figures, "answers": None, "samples": []}


@pytest.fixture
def recipe(tiny):
    return load_recipe(tiny(pretrain={"steps": 100, "evaluate_every_steps": 50, "evaluate_tokens": 1024}))
