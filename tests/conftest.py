"""What tests of several rooms share: a recipe whose whole road takes seconds."""

import gzip
import json
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from hypothesis import settings

# A machine that is busy elsewhere is no fault of the code; what must be fast has a test of its own.
settings.register_profile("modicum", deadline=None)
settings.load_profile("modicum")

SMALL = Path(__file__).parents[1] / "data" / "small"


def first_lines(name, count, wanted=bool):
    opener = gzip.open if name.endswith(".gz") else open
    with opener(SMALL / name, "rt", encoding="utf-8") as file:
        records = (json.loads(line) for line in file)
        kept = (record for record in records if wanted(record))
        return [json.dumps(record) for _, record in zip(range(count), kept, strict=False)]


@pytest.fixture
def tiny(tmp_path):
    """A function that writes a recipe whose whole road takes seconds; keyword arguments are its top-level parts."""

    def tiny(**parts):
        def short(record):
            return len(record["text"]) < 1500

        texts = first_lines("corpus.jsonl.gz", 150, short)
        (tmp_path / "text.jsonl").write_text("\n".join(texts) + "\n")
        talk = first_lines("instruct.jsonl.gz", 80, lambda record: len(str(record)) < 400)
        (tmp_path / "talk.jsonl").write_text("\n".join(talk) + "\n")
        (tmp_path / "questions.jsonl").write_text("\n".join(first_lines("eval.jsonl", 6)) + "\n")
        training = {"batch_size": 4, "sequence_length": 128, "compile": "off", "dtype": "float32"}
        recipe = {
            "name": "tiny",
            "corpus": {"sources": [{"name": "text", "path": "text.jsonl"}], "heldout_fraction": 0.1},
            "tokenizer": {"vocab_size": 512},
            "model": {
                "preset": "nano",
                "hidden_size": 32,
                "num_attention_heads": 2,
                "intermediate_size": 64,
                "max_position_embeddings": 256,
            },
            "pretrain": {**training, "steps": 4, "checkpoint_every_steps": 2, "evaluate_every_steps": 2},
            "sft": {**training, "data": ["talk.jsonl"], "epochs": 0.5, "sequence_length": 256, "heldout_fraction": 0.2},
            "evaluate": {
                "items": ["questions.jsonl"],
                "heldout_tokens": 2000,
                "prompts": 2,
                "max_new_tokens": 8,
                "bootstrap_samples": 20,
            },
        }
        for name, part in parts.items():
            recipe[name] = {**recipe[name], **part} if isinstance(part, dict) else part
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump({name: part for name, part in recipe.items() if part is not None}))
        return path

    return tiny


@pytest.fixture
def full_at():
    """A function: inside its block no file grows beyond so many bytes, as on a full disk."""

    @contextmanager
    def full_at(size):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return full_at
