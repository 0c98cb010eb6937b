"""Does the cost grow with the corpus and no faster? The road up to pretraining at 1, 4 and 16 times a corpus's size.

    python benchmarks/growth.py TEXTS.jsonl.gz [MORE.jsonl.gz ...] --megabytes 4

The smallest corpus holds --megabytes of text, the first documents of each file in turn; the others 4 and 16 times as
much. Corpus and shards should take a time that grows as the text does. The tokenizer's sample, which it keeps in
memory, is as large in each as the smallest corpus. All learn the same network for the same number of updates, so
pretraining should take the same time; and nothing more memory.
"""

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

import yaml

from modicum.road.machine import describe_machine
from modicum.store import Stage

TIMES = (1, 4, 16)
STAGES = ("corpus", "tokenizer", "shards", "pretrain")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--megabytes", type=float, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--preset", default="micro")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    given = parser.parse_args()
    rows = [measured(given, times) for times in TIMES]
    print("| text | seconds: corpus | tokenizer | shards | MB/s of text | peak MB | pretraining tokens/s | peak MB |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        seconds, peaks = row["seconds"], row["peak_mb"]
        ready, peak = sum(seconds[stage] for stage in STAGES[:3]), max(peaks[stage] for stage in STAGES[:3])
        print(
            f"| {row['megabytes']:.0f} MB | {seconds['corpus']:.1f} | {seconds['tokenizer']:.1f} "
            f"| {seconds['shards']:.1f} | {row['megabytes'] / ready:.2f} | {peak:,} "
            f"| {row['tokens_per_second']:,.0f} | {peaks['pretrain']:,} |"
        )
    print(describe_machine().line())
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


def measured(given: argparse.Namespace, times: int) -> dict[str, Any]:
    """Seconds and peak memory of each stage, and the median speed of pretraining.

    The stages before it share a process, so the peak of one holds those before it; pretraining has its own.
    """
    with tempfile.TemporaryDirectory(prefix="modicum-growth-") as name:
        folder = Path(name)
        size = write_texts(given.texts, folder / "text.jsonl", round(given.megabytes * times * 1e6))
        recipe = {
            "name": "run",
            "output": str(folder),
            "corpus": {"heldout_fraction": 0, "sources": [{"name": "text", "path": str(folder / "text.jsonl")}]},
            "tokenizer": {"vocab_size": 8192, "sample_mb": max(1, round(given.megabytes))},
            "model": {"preset": given.preset},
            "pretrain": {"steps": given.steps, "sequence_length": 256, "log_every_steps": 5, "compile": "on"},
        }
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        for verb in ("prepare", "pretrain"):
            command = [sys.executable, "-m", "modicum", verb, str(folder / "recipe.yaml")]
            subprocess.run(command, check=True, stdout=sys.stderr)
        stages = {stage: Stage(folder / "run" / stage).manifest() for stage in STAGES}
        speeds = sorted(speeds_in(folder / "run" / "pretrain" / "metrics.jsonl"))
        row = {
            "megabytes": size / 1e6,
            "seconds": {stage: made.wall_seconds for stage, made in stages.items() if made},
            "peak_mb": {stage: made.peak_memory_mb for stage, made in stages.items() if made},
            "tokens_per_second": speeds[len(speeds) // 2],
        }
        print(row, file=sys.stderr, flush=True)
        return row


def write_texts(files: list[Path], out: Path, wanted: int) -> int:
    """Documents of all files in turn, until they hold `wanted` bytes of text; how many bytes they hold."""
    size = 0
    with ExitStack() as opened, out.open("w", encoding="utf-8") as written:
        sources = [opened.enter_context(open_text(f)) for f in files]
        for line in in_turn(sources):
            written.write(line)
            size += len(json.loads(line)["text"].encode())
            if size >= wanted:
                return size
    sys.exit(
        f"the files hold {size / 1e6:.0f} MB of text, where {wanted / 1e6:.0f} are needed; take a smaller --megabytes"
    )


def open_text(path: Path) -> TextIO:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def in_turn(sources: list[TextIO]) -> Iterator[str]:
    """A line of each source after the other, as long as there are any."""
    while sources:
        for source in list(sources):
            line = source.readline()
            if line:
                yield line
            else:
                sources.remove(source)


def speeds_in(metrics: Path) -> list[float]:
    """Tokens a second of each logged window but the first, in which code is compiled."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [float(r["tokens_per_second"]) for r in records if "tokens_per_second" in r][1:]


if __name__ == "__main__":
    main()
