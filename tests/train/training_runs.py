"""A training run small enough for a test, the same in the test's process and in one of its own that can be killed."""

import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from modicum.data import Batch, Loader, WindowRows, eval_windows, open_shards, write_shards
from modicum.model import Decoder, ModelConfig
from modicum.tokenizer import load_tokenizer, train_tokenizer
from modicum.train import ALONE, Intervals, OptimizerSettings, Schedule, Wishes, train

LENGTH = 32


@dataclass(frozen=True)
class Text:
    id: str
    text: str
    source: str = "a"


def prepare(folder):
    """Tokenizer and shards below `folder`."""
    texts = [
        f"Entry {i}: item {i % 7} follows item {(i * 5) % 11}, and {i} is {'odd' if i % 2 else 'even'}."
        for i in range(300)
    ]
    tokenizer = train_tokenizer(texts, vocab_size=384, min_frequency=2, sample_bytes=10**6, seed=0)[0]
    tokenizer.save(folder / "tokenizer")
    write_shards([Text(str(i), text) for i, text in enumerate(texts)], tokenizer, folder / "shards", seed=0)


def small_model(tokenizer, **changes):
    sizes = {
        "vocab_size": tokenizer.vocab_size,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 256,
    }
    return Decoder(ModelConfig(**{**sizes, **changes}))


def small_run(
    folder,
    out,
    *,
    steps=8,
    dropout=0.0,
    size=None,
    length=LENGTH,
    compile="off",
    dtype="float32",
    checkpointing="none",
    evaluating=False,
    batch_size=6,
    parallel="ddp",
    ranks=ALONE,
    **changes,
):
    """Train on what `prepare` left in `folder`. `size` goes into the model, which is handed over in evaluation mode
    when `evaluating`; `changes` goes into train."""
    tokenizer = load_tokenizer(folder / "tokenizer")
    shards = open_shards(folder / "shards", tokenizer_hash=tokenizer.hash)
    rows = WindowRows(shards, sequence_length=length, seed=1)
    loader = Loader(rows, batch_size=batch_size, rank=ranks.rank, world_size=ranks.world_size)
    arguments = {
        "out": out,
        "tokenizer": tokenizer,
        "chat": False,
        "identity": {"recipe": {"learning_rate": 3e-3}},
        "steps": steps,
        "seed": 5,
        "schedule": Schedule("wsd", 3e-3),
        "optimizer": OptimizerSettings(),
        "micro_batch_size": 4,
        "heldout": lambda: eval_windows(shards, length, 8 * length, batch_size=4),
        "intervals": Intervals(log=3, evaluate=4, checkpoint=2),
        "wishes": Wishes("cpu", dtype, compile, activation_checkpointing=checkpointing, parallel=parallel),
        "ranks": ranks,
    }
    model = small_model(tokenizer, attention_dropout=dropout, **(size or {})).train(not evaluating)
    return train(model, loader, **{**arguments, **changes})


def digests(checkpoint):
    """SHA-256 of what a resumed run must have in common with one that never stopped."""
    names = ("model.safetensors", "training/optimizer.safetensors")
    return {name: hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() for name in names}


def random_batch(vocab_size, rows, length, *, seed=0, supervised=None):
    """Random ids in one document a row; `supervised` (rows, length) chooses the targets."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(rows, length + 1, dtype=torch.bool)
    mask[:, 0] = False
    if supervised is not None:
        mask[:, 1:] = supervised
    return Batch(
        ids=torch.randint(vocab_size, (rows, length + 1), generator=generator),
        positions=torch.arange(length).expand(rows, length).contiguous(),
        documents=torch.zeros(rows, length, dtype=torch.int32),
        supervised=mask,
    )


if __name__ == "__main__":
    small_run(Path(sys.argv[1]), Path(sys.argv[2]), **json.loads(sys.argv[3]))
