"""What became of the documents, source by source."""

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from modicum.corpus.inputs import SourceFiles

TOO_MUCH_HELDOUT = 3  # times the fraction that was asked for


@dataclass(frozen=True)
class SourceReport:
    """Counts of one source. Bytes are UTF-8 after cleaning, so bytes in = kept + held out + those dropped.

    dropped: reason to documents; examples: reason to at most three ids; domains: domain to documents kept or held out;
    licences: licence ("not named" where a document has none) to documents and bytes kept for training.
    """

    name: str
    files: int
    documents_in: int
    bytes_in: int
    documents_kept: int
    bytes_kept: int
    documents_heldout: int
    bytes_heldout: int
    dropped: dict[str, int]
    examples: dict[str, list[str]]
    domains: dict[str, int]
    licences: dict[str, dict[str, int]]


@dataclass(frozen=True)
class CorpusReport:
    """All sources by name. wall_seconds is not part of report.json: equal corpora have equal files."""

    sources: list[SourceReport]
    warnings: list[str]
    wall_seconds: float

    @property
    def documents_kept(self) -> int:
        return sum(source.documents_kept for source in self.sources)

    @property
    def documents_heldout(self) -> int:
        return sum(source.documents_heldout for source in self.sources)

    @property
    def documents_in(self) -> int:
        return sum(source.documents_in for source in self.sources)

    @property
    def dropped(self) -> dict[str, int]:
        """Reason to documents, over all sources."""
        total: dict[str, int] = {}
        for source in self.sources:
            for reason, count in source.dropped.items():
                total[reason] = total.get(reason, 0) + count
        return total

    def to_json(self) -> dict[str, Any]:
        """Plain data, as in report.json."""
        return {"sources": [asdict(source) for source in self.sources], "warnings": self.warnings}


def source_report(work: Path, files: SourceFiles) -> SourceReport:
    """Read what the last step counted for one source."""
    counts = json.loads((work / f"counts-{files.source.name}.json").read_text("utf-8"))
    documents, size = counts["documents"], counts["bytes"]
    return SourceReport(
        name=files.source.name,
        files=len(files.names),
        documents_in=documents["in"],
        bytes_in=size["in"],
        documents_kept=documents["train"],
        bytes_kept=size["train"],
        documents_heldout=documents["heldout"],
        bytes_heldout=size["heldout"],
        dropped=counts["dropped"],
        examples=counts["examples"],
        domains=counts["domains"],
        licences=counts["licences"],
    )


def warnings_of(sources: list[SourceReport], heldout_fraction: float, without_copies: Collection[str]) -> list[str]:
    """What the user should know though it is no error. without_copies: the sources whose near
    duplicates are dropped."""
    found = []
    for source in sources:
        if source.documents_in and not source.documents_kept + source.documents_heldout:
            reasons = ", ".join(f"{count} {reason}" for reason, count in source.dropped.items())
            found.append(f"source {source.name}: every document was dropped ({reasons})")
        if source.documents_heldout and not source.documents_kept:
            found.append(f"source {source.name}: all of it is held out and none of it trained on; add text to it")
        if source.documents_heldout and source.name not in without_copies:
            found.append(
                f"source {source.name}: near_duplicates is off, so what is held out may have near copies in what is "
                "trained on, and the figures on held-out text flatter"
            )
    heldout = sum(source.bytes_heldout for source in sources)
    share = heldout / max(1, heldout + sum(source.bytes_kept for source in sources))
    if share > TOO_MUCH_HELDOUT * heldout_fraction:
        found.append(
            f"{share:.1%} of the text is held out, and corpus.heldout_fraction asks for {heldout_fraction:.1%}: a "
            "document is held out whole or not at all; cut long ones into several, or add text"
        )
    if heldout_fraction and not sum(source.documents_heldout for source in sources):
        found.append("nothing is held out, since the corpus is a single document: held-out loss cannot be measured")
    return found
