"""Pipeline steps for the whole corpus: decide what stays, and write it with the counts for the report."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from datatrove.pipeline.base import PipelineStep

from modicum.corpus.chunks import read_chunk, read_chunk_list, zstd_lines
from modicum.corpus.decide import TAKEN, decide, read_outcomes
from modicum.corpus.outcomes import HELD_OUT, REASONS
from modicum.corpus.records import second_id

LEVEL = 9  # of Zstandard; the files are read many times
EXAMPLES = 3


class Decide(PipelineStep):  # type: ignore[misc]
    """One task, since it looks at the whole corpus. Arguments as those of `decide`."""

    type = "decide"
    name = "what stays"

    def __init__(self, work: Path, **arguments: Any) -> None:
        super().__init__()
        self.work = work
        self.arguments = arguments

    def run(self, _data: None = None, _rank: int = 0, world_size: int = 1) -> None:
        if world_size != 1:
            raise ValueError("the decision needs the whole corpus, so it is one task")
        decide(self.work, **self.arguments)


class WriteCorpus(PipelineStep):  # type: ignore[misc]
    """Write every `world_size`-th source: documents/<source>.jsonl.zst, heldout/<source>.jsonl.zst, and its counts."""

    type = "write"
    name = "corpus"

    def __init__(self, work: Path, out: Path, sources: list[str]) -> None:
        super().__init__()
        self.work = work
        self.out = out
        self.sources = sources

    def run(self, _data: None = None, rank: int = 0, world_size: int = 1) -> None:
        for source in self.sources[rank::world_size]:
            counts = write_source(self.work, self.out, source)
            (self.work / f"counts-{source}.json").write_text(json.dumps(counts), "utf-8")


def write_source(work: Path, out: Path, source: str) -> dict[str, Any]:
    """Write the documents of one source that stay; returns documents, bytes, dropped, examples, domains, licences."""
    documents, size = Counter({"in": 0, "train": 0, "heldout": 0}), Counter({"in": 0, "train": 0, "heldout": 0})
    dropped: Counter[str] = Counter()
    domains: Counter[str] = Counter()
    licences: dict[str, dict[str, int]] = {}
    examples: dict[str, list[str]] = {}
    paths = {"train": out / "documents" / f"{source}.jsonl.zst", "heldout": out / "heldout" / f"{source}.jsonl.zst"}
    for path in paths.values():
        path.parent.mkdir(exist_ok=True)
    with zstd_lines(paths["train"], level=LEVEL) as train, zstd_lines(paths["heldout"], level=LEVEL) as heldout:
        for chunk in (chunk for chunk in read_chunk_list(work) if chunk.source == source):
            outcomes = read_outcomes(work, chunk)
            for record, marked in zip(read_chunk(work, chunk), outcomes, strict=True):
                outcome = int(marked & ~TAKEN)
                name = second_id(record) if marked & TAKEN else record.id
                length = len(record.text.encode("utf-8"))
                documents["in"] += 1
                size["in"] += length
                if outcome in REASONS:
                    reason = REASONS[outcome]
                    dropped[reason] += 1
                    if dropped[reason] <= EXAMPLES:
                        examples.setdefault(reason, []).append(name)
                    continue
                split, lines = ("heldout", heldout) if outcome == HELD_OUT else ("train", train)
                documents[split] += 1
                size[split] += length
                domains[record.domain] += 1
                if split == "train":
                    licence = licences.setdefault(record.licence or "not named", {"documents": 0, "bytes": 0})
                    licence["documents"] += 1
                    licence["bytes"] += length
                lines.write(
                    {
                        "id": name,
                        "text": record.text,
                        "source": source,
                        "domain": record.domain,
                        "licence": record.licence,
                    }
                )
    return {
        "documents": documents,
        "bytes": size,
        "dropped": dict(sorted(dropped.items())),
        "examples": dict(sorted(examples.items())),
        "domains": dict(sorted(domains.items())),
        "licences": dict(sorted(licences.items())),
    }
