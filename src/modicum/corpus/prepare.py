"""From the sources of a recipe to cleaned, deduplicated, split documents on disk, and a report of what was dropped."""

import errno
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from modicum.corpus.inputs import SourceFiles, find_files
from modicum.corpus.outcomes import filters_of
from modicum.corpus.report import CorpusReport, source_report, warnings_of
from modicum.recipe import CorpusSettings
from modicum.store import UserError, atomic_directory, write_json, write_manifest


def prepare_corpus(
    settings: CorpusSettings,
    out: Path,
    *,
    seed: int,
    decontaminate_against: Sequence[str],
    progress: Callable[[str], None] | None = None,
) -> CorpusReport:
    """Write `out`: documents/<source>.jsonl.zst, heldout/<source>.jsonl.zst, report.json and manifest.json.

    `decontaminate_against` are texts that no document may contain. The files' bytes depend on the sources' texts, the
    settings that identify a run, and the seed; not on workers, memory or the order of a directory. Memory in use grows
    with `memory_mb` and the longest document, not with the corpus; the disk holds about twice the corpus for a while.
    Raises UserError for input that cannot be read, when no document stays, and when the disk is full; `out` is then as
    it was.
    """
    from modicum.corpus.executor import run_stages  # datatrove takes half a second to load
    from modicum.corpus.pipeline import corpus_stages

    started = time.monotonic()
    inputs = [find_files(source) for source in settings.sources]
    try:
        with atomic_directory(out) as folder:
            work = folder / "work"
            work.mkdir()
            stages = corpus_stages(
                settings, inputs, work, folder, seed=seed, decontaminate_against=decontaminate_against
            )
            run_stages(stages, work / "logs", workers=settings.workers, progress=progress)
            report = finish_corpus(settings, inputs, work, folder)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise UserError(f"{out}: the disk is full; make room (about twice the corpus) and run again") from None
        raise
    return replace(report, wall_seconds=round(time.monotonic() - started, 3))


def finish_corpus(settings: CorpusSettings, inputs: Sequence[SourceFiles], work: Path, out: Path) -> CorpusReport:
    """What remains when all stages have run, here or on a cluster: report.json, manifest.json, and `work` goes.

    Raises UserError when no document stays.
    """
    sources = sorted((source_report(work, files) for files in inputs), key=lambda source: source.name)
    without_copies = {files.source.name for files in inputs if filters_of(settings, files.source).near_duplicates}
    report = CorpusReport(sources, warnings_of(sources, settings.heldout_fraction, without_copies), 0.0)
    _check_kept(report)
    shutil.rmtree(work)
    write_json(out / "report.json", report.to_json())
    write_manifest(out)
    return report


def _check_kept(report: CorpusReport) -> None:
    """Raise UserError for a source without documents, and when nothing is left to train on."""
    empty = [source.name for source in report.sources if not source.documents_in]
    if empty:
        raise UserError("\n".join(f"source {name}: no document in its files" for name in empty))
    if not report.documents_kept:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(report.dropped.items()))
        raise UserError(
            f"no document is left of {report.documents_in}: {reasons}; change corpus.filters, or give other text"
        )
