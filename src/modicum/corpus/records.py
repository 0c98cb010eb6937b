"""The documents of one file or Hub data set, as they stand there: text, and what the record says of its origin."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modicum.corpus.files import RECORD_LIMIT, bytes_of_lines, kind, plain_suffix, read_json_lines, read_whole
from modicum.recipe import SourceSettings
from modicum.store import UserError


@dataclass(frozen=True)
class Record:
    """`place` is unique within its source: the file's relative name, with #line where a file holds many documents.
    `id` is the record's own, or else its place."""

    id: str
    place: str
    text: str
    domain: str
    licence: str | None


def read_file(source: SourceSettings, root: Path, name: str) -> Iterator[Record]:
    """The documents of `root`/`name`. Raises UserError with file and line at the first fault."""
    path = root / name
    place = os.fsencode(name).decode("utf-8", "backslashreplace")
    suffix = plain_suffix(path)
    if suffix == ".jsonl":
        for number, record in read_json_lines(path):
            yield _record(source, record, f"{place}#{number}", f"{path}:{number}")
    elif suffix == ".parquet":
        for number, record in _parquet_rows(source, path):
            yield _record(source, record, f"{place}#{number}", f"{path}: row {number}")
    else:
        yield Record(place, place, read_whole(path), source.name, None)


def bytes_until(path: Path, records: int) -> int:
    """About how many bytes of the file, as it lies on the disk, its first records take: to know what the rest holds."""
    suffix, size = plain_suffix(path), path.stat().st_size
    if suffix == ".jsonl":
        return bytes_of_lines(path, records)
    if suffix == ".parquet":
        import pyarrow.parquet as pq

        rows: int = pq.read_metadata(path).num_rows
        return round(size * records / max(records, rows))
    return size


def read_hub(source: SourceSettings) -> Iterator[Record]:
    """The rows of a Hub data set, streamed. Raises UserError when it cannot be read."""
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"source {source.name}: a Hub data set needs the datasets package: pip install 'modicum[hub]'"
        ) from None
    origin = f"source {source.name}: data set {source.hub}"
    try:
        rows: Iterable[dict[str, Any]] = datasets.load_dataset(
            source.hub, source.subset, split=source.split, revision=source.revision, streaming=True
        )
        for number, row in enumerate(rows, 1):
            yield _record(source, row, f"{source.split}#{number}", f"{origin}: row {number}")
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise UserError(f"{origin}: cannot be read: {' '.join(str(error).split())}") from error


def _parquet_rows(source: SourceSettings, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(row number from 1, the fields that are used). A batch of 16 rows bounds what one step can unpack to."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    wanted = {source.text_field, "id", "licence", "license", source.domain_field}
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if source.text_field not in names:
                raise UserError(_no_field(source.text_field, names, str(path)))
            if source.domain_field is not None and source.domain_field not in names:
                raise UserError(_no_field(source.domain_field, names, str(path)))
            for batch in file.iter_batches(batch_size=16, columns=[name for name in names if name in wanted]):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except UnicodeDecodeError:
        raise UserError(f"{path}: after row {number}: text that is not UTF-8; write the file again") from None
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable parquet file ({error}); make the file again") from None


def _record(source: SourceSettings, record: dict[str, Any], place: str, origin: str) -> Record:
    text = record.get(source.text_field)
    if source.text_field not in record:
        raise UserError(_no_field(source.text_field, record, origin))
    if not isinstance(text, str):
        raise UserError(f"{origin}: {source.text_field} must be a string, found {kind(text)}")
    if len(text) > RECORD_LIMIT // 4 and len(text.encode("utf-8")) > RECORD_LIMIT:
        raise UserError(f"{origin}: a text of more than {RECORD_LIMIT // 2**20} MiB; cut it into parts")
    domain = None
    if source.domain_field is not None:
        if source.domain_field not in record:
            raise UserError(_no_field(source.domain_field, record, origin))
        domain = _string(record, source.domain_field, origin)
    own = record.get("id")
    if isinstance(own, int) and not isinstance(own, bool):
        own = str(own)
    elif own is not None and not isinstance(own, str):
        raise UserError(f"{origin}: id must be a string or a whole number, found {kind(own)}")
    licence = _string(record, "licence", origin) or _string(record, "license", origin)
    return Record(own or place, place, text, domain or source.name, licence)


def _string(record: dict[str, Any], field: str, origin: str) -> str | None:
    value = record.get(field)
    if value is not None and not isinstance(value, str):
        raise UserError(f"{origin}: {field} must be a string, found {kind(value)}")
    return value


def _no_field(field: str, names: Iterable[str], origin: str) -> str:
    return f"{origin}: no field {field!r}; the fields are {', '.join(sorted(names)) or 'none'}"


def second_id(record: Record) -> str:
    """What a document is called when an earlier one of its source has its id."""
    return f"{record.id}~{record.place}"
