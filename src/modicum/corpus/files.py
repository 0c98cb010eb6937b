"""Bytes of a plain, .gz or .zst file as a bounded stream, and its JSON lines with their place.

A compressed file may unpack to any size, so nothing here holds more than one line, and a line has a limit.
"""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import zstandard

from modicum.store import UserError

RECORD_LIMIT = 64 * 2**20  # bytes; the longest line, and the longest file that is read whole
OWN_LIMIT = 16 * RECORD_LIMIT  # of lines that we wrote: escapes and normalization lengthen a text, by less than this
_BOM = b"\xef\xbb\xbf"


def plain_suffix(path: Path) -> str:
    """The suffix that says what a file holds, without .gz or .zst: ".jsonl" for "a.jsonl.gz"."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in (".gz", ".zst") else suffix


@contextmanager
def open_stream(path: Path) -> Iterator[BinaryIO]:
    """The file's unpacked bytes. Raises UserError when it cannot be opened, or (while reading) when it is damaged."""
    try:
        with path.open("rb") as raw:
            yield _unpacked(raw, path)
    except (gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise UserError(f"{path}: damaged, or not packed as its name says ({error}); make the file again") from None
    except EOFError:
        raise UserError(f"{path}: ends in the middle; it was not copied completely, copy it again") from None
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise UserError(f"{path}: a folder; name a file in it") from None
    except PermissionError:
        raise UserError(f"{path}: not readable by this user; change its permissions") from None


def _unpacked(raw: BinaryIO, path: Path) -> BinaryIO:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=_InPieces(raw))  # type: ignore[return-value]
    return io.BufferedReader(_ZstdStream(raw)) if suffix == ".zst" else raw


def bytes_of_lines(path: Path, lines: int) -> int:
    """About how many bytes on the disk the file takes as far as its line `lines`, blank lines not numbered."""
    with path.open("rb") as raw:
        written = (line for line in _unpacked(raw, path) if not line.isspace())
        for _ in islice(written, lines):
            pass
        return raw.tell()


class _InPieces(io.RawIOBase):
    """At most 8 KiB a call: Python from 3.12 on reads packed files far ahead, and their place would not be known."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        return self._raw.read(min(size, 8192) if size >= 0 else 8192)


class _ZstdStream(io.RawIOBase):
    """Unpacks Zstandard frames. The library's own reader takes a file cut in the middle for its end; this one says so.

    One block of a frame takes at least 4 bytes and unpacks to at most 128 KiB, so 1 KiB of input is at most 32 MiB.
    """

    _STEP = 1024

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._frame = zstandard.ZstdDecompressor(max_window_size=2**27).decompressobj()
        self._fresh = True  # nothing of this frame was read yet
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        while not self._ready:
            piece = b""
            if self._frame.eof:
                piece = self._frame.unused_data
                self._frame = zstandard.ZstdDecompressor(max_window_size=2**27).decompressobj()
                self._fresh = True
            piece = piece or self._raw.read(self._STEP)
            if not piece:
                if self._fresh:
                    return 0
                raise EOFError
            self._fresh = False
            self._ready = memoryview(self._frame.decompress(piece))
        size = min(len(view), len(self._ready))
        view[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size


def read_lines(path: Path, limit: int | None = None) -> Iterator[tuple[int, int, bytes]]:
    """(line number from 1, offset of its first byte in the unpacked file, line). Raises UserError at one too long."""
    limit = limit or RECORD_LIMIT
    with open_stream(path) as stream:
        number = offset = 0
        while line := stream.readline(limit + 1):
            number += 1
            if len(line) > limit:
                raise UserError(
                    f"{path}:{number}: a line of more than {limit // 2**20} MiB; cut the document into parts"
                )
            start = len(_BOM) if number == 1 and line.startswith(_BOM) else 0
            yield number, offset + start, line[start:]
            offset += len(line)


def read_json_lines(path: Path, limit: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, record) of every line that is not blank. Raises UserError with file and line at the first fault."""
    for number, offset, line in read_lines(path, limit):
        if line.isspace():
            continue
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            decode(line, path, offset)
            raise UserError(f"{path}:{number}: {_json_fault(error)}") from None
        if not isinstance(record, dict):
            raise UserError(f'{path}:{number}: expected an object such as {{"text": "..."}}, found {kind(record)}')
        yield number, record


def _json_fault(error: orjson.JSONDecodeError) -> str:
    if "surrogate" in error.msg:
        return (
            "half of a surrogate pair (such as \\ud83d alone) is no character; write the line again with a JSON library"
        )
    return f"not valid JSON: {error.msg} (column {error.colno})"


def read_whole(path: Path) -> str:
    """The text of a file that is one document. Raises UserError when it is not UTF-8 or too long."""
    with open_stream(path) as stream:
        data = stream.read(RECORD_LIMIT + 1)
    if len(data) > RECORD_LIMIT:
        raise UserError(
            f"{path}: more than {RECORD_LIMIT // 2**20} MiB in one document; cut it into files, or into lines of .jsonl"
        )
    return decode(data, path, 0)


def decode(data: bytes, path: Path, offset: int) -> str:
    """UTF-8 text of `data`, which starts at byte `offset` of the file. Raises UserError naming the first wrong byte."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: byte {offset + error.start} is not UTF-8 text; convert the file, for example with "
            f"`iconv -f LATIN1 -t UTF-8`, or take it out"
        ) from None


def kind(value: Any) -> str:
    """What a JSON value is, in JSON's words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
