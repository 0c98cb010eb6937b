"""What the plan says is what a run then uses; a run of two minutes, which wants the machine for itself."""

import json
import subprocess
import sys

import pytest

from modicum.recipe import load_recipe


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["on", "off"])
def test_time_and_memory_of_pretraining_are_within_30_percent_of_the_plan(tiny, compiled):
    training = {
        "batch_size": 16,
        "sequence_length": 256,
        "compile": compiled,
        "dtype": "auto",
        "evaluate_every_steps": 60,
        "checkpoint_every_steps": 60,
    }
    path = tiny(
        corpus={"sources": [{"name": "text", "path": "text.jsonl", "max_epochs": 1000}]},
        model={"preset": "micro", "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 768},
        pretrain={**training, "steps": 80},
        sft=None,
    )
    planned = subprocess.run(
        [sys.executable, "-m", "modicum", "plan", str(path), "--json"], capture_output=True, text=True, check=True
    )
    plan = json.loads(planned.stdout)
    subprocess.run([sys.executable, "-m", "modicum", "run", str(path), "--until", "pretrain"], check=True)
    folder = load_recipe(path).run_folder / "pretrain"
    state = json.loads((folder / "checkpoints" / "last" / "training" / "state.json").read_text())
    manifest = json.loads((folder / "manifest.json").read_text())
    assert plan["seconds"]["pretrain"] == pytest.approx(state["seconds"], rel=0.3)
    assert plan["peak_memory_bytes"]["pretrain"] == pytest.approx(manifest["peak_memory_mb"] * 10**6, rel=0.3)
