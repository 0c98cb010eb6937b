"""An invented trial of a small model, for plans to be made from."""

from dataclasses import replace

from modicum.model import ModelConfig
from modicum.road.trial import Trial

CONFIG = ModelConfig(vocab_size=512, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)


def trial(**changes):
    found = Trial(
        rows=4,
        length=128,
        choices={"device": "cpu", "dtype": "float32", "compile": False, "threads": 2},
        program_bytes=300_000_000,
        peak_bytes=900_000_000,
        device_bytes=0,
        first_seconds=9.0,
        update_seconds=2.0,
        step_seconds=0.4,
        forward_seconds=0.5,
        score_seconds=0.001,
        decode_seconds=0.01,
    )
    return replace(found, **changes)
