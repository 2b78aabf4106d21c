"""Documents in files: measured when the corpus is opened, read on demand, and checked for changes at every read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mindspeed_cp.data.byte_tokenizer import tokenize
from mindspeed_cp.errors import ConfigError

JSON_LINES = ".jsonl"

#: One document: `size` bytes of a file from byte `start` on; `line` is its line in a .jsonl file (from 1), else 0.
CORPUS_ENTRY = np.dtype(
    [("file", np.int64), ("start", np.int64), ("size", np.int64), ("line", np.int64), ("tokens", np.int64)]
)


@dataclass(frozen=True)
class SourceFile:
    """A file as it was when the corpus was opened."""

    path: Path
    size: int  # bytes
    modified: int  # nanoseconds since the epoch

    def check(self, opened: BinaryIO) -> None:
        """Raise ConfigError if the open file has changed."""
        now = os.fstat(opened.fileno())
        if (now.st_size, now.st_mtime_ns) != (self.size, self.modified):
            raise ConfigError(
                f"{printable_path(self.path)}: has changed since the corpus was opened (it had {self.size} bytes, now "
                f"{now.st_size}); leave a corpus alone while a run reads it, and start the run anew"
            )


class FileCorpus:
    """Documents of files, in the order of `paths`: a .jsonl file has one per line, any other file is one document.

    The tokens of a document are its bytes (of a JSON line: its "text" in UTF-8) and EOD; an empty file is a document of
    one token. Blank lines of a .jsonl file are skipped. Opening the corpus reads .jsonl files once, and only the sizes
    of others.

    Raises:
        ConfigError: a file cannot be read, or a line is not a JSON object with a text under "text".
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files: list[SourceFile] = []
        entries: list[tuple[int, int, int, int, int]] = []
        for path in paths:
            if path.suffix.lower() == JSON_LINES:
                file, file_entries = _index_lines(path, len(self._files))
            else:
                file = _measure(path)
                file_entries = [(len(self._files), 0, file.size, 0, file.size + 1)]
            self._files.append(file)
            entries += file_entries
        self._entries = np.array(entries, CORPUS_ENTRY)
        self._lengths = self._entries["tokens"].copy()
        self._lengths.setflags(write=False)
        self._last_text: tuple[int, bytes] | None = None  # chunks of one long line are read in a row

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"FileCorpus({len(self)} documents in {len(self._files)} files, {int(self._lengths.sum())} tokens)"

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each document (bytes + 1), int64 [documents], read-only."""
        return self._lengths

    def name(self, document: int) -> str:
        """Return the path of a document, for a .jsonl file `path:line`."""
        entry = self._entries[document]
        path = printable_path(self._files[entry["file"]].path)
        return f"{path}:{entry['line']}" if entry["line"] else path

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return tokens start .. stop-1 of a document, int64 [stop - start]; by default all; the last one is EOD.

        Raises:
            IndexError: the document or its tokens do not exist.
            ConfigError: the file has been removed or changed since the corpus was opened.
        """
        if not 0 <= document < len(self):
            raise IndexError(f"document {document} of a corpus of {len(self)}")
        entry = self._entries[document]
        length = int(entry["tokens"])
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:
            raise IndexError(f"tokens {start} .. {stop} of {self.name(document)}, which has {length}")
        last = min(stop, length - 1)  # the final token is no byte of the file
        if entry["line"]:
            content = self._text(document)[start:last]
        else:
            content = read_range(self._files[entry["file"]], min(start, last), last)
        return tokenize(content, end=stop == length and start < length)

    def _text(self, document: int) -> bytes:
        if self._last_text is None or self._last_text[0] != document:
            entry = self._entries[document]
            line = read_range(self._files[entry["file"]], int(entry["start"]), int(entry["start"] + entry["size"]))
            self._last_text = (document, _text_of(line, self.name(document)))
        return self._last_text[1]


def find_files(root: Path, suffixes: Sequence[str], skip: frozenset[str] = frozenset()) -> list[Path]:
    """Return the files below a folder that have one of the suffixes, sorted by their path inside it.

    Names that begin with a dot, and folders named in `skip`, are left out. Links are followed; each folder is read
    once.

    Raises:
        ConfigError: a folder cannot be listed, or a wanted file is a link to nothing.
    """
    files: list[tuple[str, Path]] = []
    seen: set[tuple[int, int]] = set()

    def walk(folder: Path, inside: str) -> None:
        try:
            status = folder.stat()
            if (status.st_dev, status.st_ino) in seen:
                return
            seen.add((status.st_dev, status.st_ino))
            with os.scandir(folder) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except OSError as error:
            raise ConfigError(f"corpus {printable_path(folder)}: cannot be listed ({error.strerror})") from None
        for entry in entries:
            path = folder / entry.name
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                if entry.name not in skip:
                    walk(path, f"{inside}{entry.name}/")
            elif path.suffix.lower() in suffixes:
                if entry.is_symlink() and not path.exists():
                    raise ConfigError(f"corpus {printable_path(path)}: is a link to nothing; remove or mend it")
                if entry.is_file():
                    files.append((inside + entry.name, path))

    walk(root, "")
    return [path for _, path in sorted(files)]


def printable_path(path: Path) -> str:
    """Return a path as text; bytes that are not UTF-8 are escaped."""
    return str(path).encode("utf-8", "backslashreplace").decode()


def _measure(path: Path) -> SourceFile:
    try:
        status = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from None
    return SourceFile(path, status.st_size, status.st_mtime_ns)


def _index_lines(path: Path, number: int) -> tuple[SourceFile, list[tuple[int, int, int, int, int]]]:
    """Return the file, and the fields of a CORPUS_ENTRY for each of its documents."""
    entries = []

    def add(start: int, line: bytes, line_number: int) -> None:
        tokens = len(_text_of(line, f"{printable_path(path)}:{line_number}")) + 1
        entries.append((number, start, len(line), line_number, tokens))

    return _each_line(path, add), entries


def index_lines(path: Path) -> tuple[SourceFile, list[tuple[int, int, int]]]:
    """Return a file, and of each of its lines that are not blank the first byte, the number of bytes, and its number
    from 1.

    Raises:
        ConfigError: the file cannot be read.
    """
    lines: list[tuple[int, int, int]] = []
    file = _each_line(path, lambda start, line, number: lines.append((start, len(line), number)))
    return file, lines


def _each_line(path: Path, add: Callable[[int, bytes, int], None]) -> SourceFile:
    """Call `add` with first byte, content and number of each line that is not blank; return the file."""
    file = _measure(path)
    start = 0
    try:
        with path.open("rb") as opened:
            for number, line in enumerate(opened, 1):
                if line.strip():
                    add(start, line, number)
                start += len(line)
            file.check(opened)
    except OSError as error:
        raise _unreadable(path, error) from None
    return file


def _text_of(line: bytes, where: str) -> bytes:
    """Return the "text" of a JSON line, in UTF-8."""
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f'{where}: is no JSON ({error}); each line must be an object such as {{"text": "..."}}'
        ) from None
    text = value.get("text") if isinstance(value, dict) else None
    if not isinstance(text, str):
        what = f"has the keys {sorted(value)}" if isinstance(value, dict) else f"is a JSON {type(value).__name__}"
        if isinstance(value, dict) and "text" in value:
            what = f'"text" is {json.dumps(text)[:40]}, which is no text'
        raise ConfigError(f'{where}: {what}; each line must be an object with a text under "text"')
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f'{where}: "text" has half a surrogate pair at character {error.start}; mend the line'
        ) from None


def read_range(file: SourceFile, start: int, stop: int) -> bytes:
    """Read bytes start .. stop-1 of a file; afterwards check that it has not changed.

    Raises:
        ConfigError: it cannot be read, or has changed.
    """
    try:
        with file.path.open("rb") as opened:
            opened.seek(start)
            content = opened.read(stop - start)
            file.check(opened)
    except OSError as error:
        raise _unreadable(file.path, error) from None
    if len(content) != stop - start:
        raise ConfigError(f"{printable_path(file.path)}: ended after {start + len(content)} of its {file.size} bytes")
    return content


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{printable_path(path)}: cannot be read ({error.strerror}); leave a corpus in place while a run reads it"
    )
