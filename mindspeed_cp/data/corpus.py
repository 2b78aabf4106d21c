"""Corpora of files: the sources of the standard library, or text and JSON-lines files of the user.

Opening a corpus determines the number and lengths of its documents; contents are read on demand, and every read checks
that the file is as it was. Tokens are bytes, and one that ends a document: so any file can be read, and the number of
tokens follows from its size::

    b"if"  ->  [105, 102, 256]
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from mindspeed_cp.data.packing import chunk_documents
from mindspeed_cp.errors import ConfigError

EOD = 256  #: end of a document
VOCAB_SIZE = 257

STDLIB, JSON_LINES = "stdlib", ".jsonl"
USER_SUFFIXES = (".txt", JSON_LINES)
#: Folders of the standard library with other packages or without sources; they differ between machines.
NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__"})


def tokenize(content: bytes, end: bool = True) -> np.ndarray:
    """Return the tokens of `content` and, if `end`, a final EOD; int64 [bytes + end]."""
    tokens = np.full(len(content) + end, EOD, np.int64)
    tokens[: len(content)] = np.frombuffer(content, np.uint8)
    return tokens


def detokenize(tokens: np.ndarray) -> bytes:
    """Return the bytes of `tokens` (int [tokens]) without EOD."""
    return tokens[tokens != EOD].astype(np.uint8).tobytes()


class Corpus(Protocol):
    """Documents of known lengths, numbered from 0; `open_corpus` returns one of files."""

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each document, int64 [documents]."""

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return tokens start .. stop-1 of a document, int64 [stop - start]; by default all."""


class FileEntries:
    """Byte ranges of files, in the order of `paths`: the lines of a .jsonl file that are not blank, or any other file.

    Args:
        paths: the files.
        on_line: called with each line of .jsonl files and its name.

    Raises:
        ConfigError: a file cannot be read.
    """

    def __init__(self, paths: Sequence[Path], on_line: Callable[[bytes, str], object] = lambda line, name: None):
        self._files: list[tuple[Path, int, int]] = []  # path, bytes, and time of modification in nanoseconds
        entries: list[tuple[int, int, int, int]] = []
        for number, path in enumerate(paths):
            try:
                status, start = path.stat(), 0
                self._files.append((path, status.st_size, status.st_mtime_ns))
                if path.suffix.lower() != JSON_LINES:
                    entries.append((number, 0, status.st_size, 0))
                    continue
                with path.open("rb") as opened:
                    for line_number, line in enumerate(opened, 1):
                        if line.strip():
                            entries.append((number, start, len(line), line_number))
                            on_line(line, f"{printable_path(path)}:{line_number}")
                        start += len(line)
                    self._check(number, opened)
            except OSError as error:
                raise _unreadable(path, error) from None
        #: File, first byte, number of bytes and line (from 1; 0: the whole file) of each entry, int64 [entries, 4].
        self.entries = np.array(entries, np.int64).reshape(-1, 4)

    def __len__(self) -> int:
        return len(self.entries)

    def name(self, entry: int) -> str:
        """Return the path of an entry, for a .jsonl file `path:line`."""
        file, _, _, line = self.entries[entry].tolist()
        path = printable_path(self._files[file][0])
        return f"{path}:{line}" if line else path

    def read_bytes(self, entry: int, start: int = 0, stop: int | None = None) -> bytes:
        """Read bytes start .. stop-1 of an entry; by default all.

        Raises:
            ConfigError: its file has been removed or changed since it was opened.
        """
        file, first, size, _ = self.entries[entry].tolist()
        path, file_size, _ = self._files[file]
        count = (size if stop is None else stop) - start
        try:
            with path.open("rb") as opened:
                opened.seek(first + start)
                content = opened.read(count)
                self._check(file, opened)
        except OSError as error:
            raise _unreadable(path, error) from None
        if len(content) != count:
            raise ConfigError(
                f"{printable_path(path)}: ended after {first + start + len(content)} of its {file_size} bytes"
            )
        return content

    def _check(self, file: int, opened: BinaryIO) -> None:
        path, size, modified = self._files[file]
        now = os.fstat(opened.fileno())
        if (now.st_size, now.st_mtime_ns) != (size, modified):
            raise ConfigError(
                f"{printable_path(path)}: has changed since the corpus was opened (it had {size} bytes, now "
                f"{now.st_size}); leave a corpus alone while a run reads it, and start the run anew"
            )


class FileCorpus(FileEntries):
    """Documents of files: the tokens of a document are its bytes (of a JSON line: its "text" in UTF-8) and EOD; an
    empty file is a document of one token. Opening the corpus reads .jsonl files once, and only the sizes of others.

    Raises:
        ConfigError: a file cannot be read, or a line is not a JSON object with a text under "text".
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        text_sizes: list[int] = []
        super().__init__(paths, lambda line, name: text_sizes.append(len(_text_of(line, name))))
        sizes = self.entries[:, 2].copy()
        sizes[self.entries[:, 3] > 0] = text_sizes
        #: Number of tokens of each document (bytes + 1), int64 [documents], read-only.
        self.lengths = sizes + 1
        self.lengths.setflags(write=False)
        self._last_text: tuple[int, bytes] | None = None  # chunks of one long line are read in a row

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return tokens start .. stop-1 of a document, int64 [stop - start]; by default all; the last one is EOD.

        Raises:
            ConfigError: the file has been removed or changed since the corpus was opened.
        """
        length = int(self.lengths[document])
        stop = length if stop is None else stop
        last = min(stop, length - 1)  # the final token is no byte of the file
        if self.entries[document, 3]:
            if self._last_text is None or self._last_text[0] != document:
                self._last_text = document, _text_of(self.read_bytes(document), self.name(document))
            content = self._last_text[1][start:last]
        else:
            content = self.read_bytes(document, min(start, last), last)
        return tokenize(content, end=stop == length and start < length)


def open_corpus(source: str | Path) -> FileCorpus:
    """Open a corpus of files; their order depends only on their names.

    Args:
        source: "stdlib", the standard library of Python, with thousands of documents on every machine; a .txt or .jsonl
            file; or a folder, which is searched for these with its subfolders (write "./stdlib" for a folder of that
            name). A .jsonl file has one document per line, {"text": "..."}; any other file is one document.

    Raises:
        ConfigError: the source does not exist, it has no such file, or a line is not a JSON object with a "text".
    """
    if str(source) == STDLIB:
        paths = find_files(sysconfig.get_path("stdlib"), (".py",), skip=NOT_STDLIB)
    else:
        paths = find_files(source, USER_SUFFIXES, f"{STDLIB!r}, ")
    corpus = FileCorpus(paths)
    if not len(corpus):
        raise ConfigError(
            f"corpus {printable_path(Path(source))}: has no document; its {JSON_LINES} files have no lines"
        )
    return corpus


def find_files(
    source: str | Path, suffixes: tuple[str, ...], valid: str = "", skip: frozenset[str] = frozenset()
) -> list[Path]:
    """Return a file, or the files below a folder, sorted by their path inside it.

    Names that begin with a dot are left out. Links are followed; each folder is read once.

    Args:
        source: a file or a folder.
        suffixes: suffixes of the files to read.
        valid: what is valid in place of files, with a comma, for errors.
        skip: names of folders that are left out.

    Raises:
        ConfigError: the source does not exist, has no file with one of the suffixes, or one that cannot be read.
    """
    root, either = Path(source).expanduser(), " or ".join(suffixes)
    shown = f"corpus {printable_path(root)[:200]}"
    try:
        exists = str(source).strip() != "" and root.exists()
    except (OSError, ValueError) as error:  # a name that is too long, or has a NUL byte
        raise ConfigError(f"{shown}: {error}") from None
    if not exists:
        raise ConfigError(f"{shown}: no such file or folder; valid: {valid}a {either} file, or a folder of them")
    if root.is_dir():
        paths = _files_below(root, suffixes, skip)
        if not paths:
            raise ConfigError(f"{shown}: no {either} file in this folder or the folders in it")
        return paths
    if root.suffix.lower() not in suffixes:
        raise ConfigError(f"{shown}: suffix {root.suffix!r} is not read; valid: {either}, or a folder of them")
    if not root.is_file():
        raise ConfigError(f"{shown}: is no regular file; valid: {either}, or a folder of them")
    return [root]


def _files_below(root: Path, suffixes: tuple[str, ...], skip: frozenset[str]) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise ConfigError(f"corpus {printable_path(Path(error.filename))}: cannot be listed ({error.strerror})")

    files: list[tuple[str, Path]] = []
    seen: set[tuple[int, int]] = set()
    for folder, folders, names in os.walk(root, onerror=refuse, followlinks=True):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in skip)
        for name in names:
            path = Path(folder, name)
            if name.startswith(".") or path.suffix.lower() not in suffixes:
                continue
            if path.is_symlink() and not path.exists():
                raise ConfigError(f"corpus {printable_path(path)}: is a link to nothing; remove or mend it")
            if path.is_file():
                files.append((path.relative_to(root).as_posix(), path))
    return [path for _, path in sorted(files)]


def check_learnable(corpus: Corpus, source: str) -> None:
    """Raise ConfigError if there is no token to predict: all documents are empty, or all weights of trajectories 0."""
    if getattr(corpus, "learned_tokens", 1) == 0:
        raise ConfigError(
            f"corpus {source}: no token of its {len(corpus.lengths)} groups is predicted with a weight other than 0; "
            "nothing can be learned"
        )
    if corpus.lengths.max(initial=0) < 2:
        raise ConfigError(
            f"corpus {source}: all of its {len(corpus.lengths)} documents are empty; nothing can be learned"
        )


def printable_path(path: Path) -> str:
    """Return a path as text; bytes that are not UTF-8 are escaped."""
    return str(path).encode("utf-8", "backslashreplace").decode()


def json_object(line: bytes, where: str, key: str, example: str) -> dict[str, Any]:
    """Return the object of a JSON line; raise ConfigError unless it is one that has `key`, as the example has."""
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: is no JSON ({error}); each line must be an object such as {example}") from None
    if not isinstance(value, dict) or key not in value:
        what = f"has the keys {sorted(value)}" if isinstance(value, dict) else f"is a JSON {type(value).__name__}"
        raise ConfigError(f"{where}: {what}; each line must be an object such as {example}")
    return value


def encode(text: str, where: str) -> bytes:
    """Return a text in UTF-8; raise ConfigError for half a surrogate pair, which JSON can hold."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where} has half a surrogate pair at character {error.start}; mend the line") from None


def _text_of(line: bytes, where: str) -> bytes:
    """Return the "text" of a JSON line, in UTF-8."""
    text = json_object(line, where, "text", '{"text": "..."}')["text"]
    if not isinstance(text, str):
        raise ConfigError(f'{where}: "text" is {json.dumps(text)[:40]}, which is no text; give one in quotes')
    return encode(text, f'{where}: "text"')


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{printable_path(path)}: cannot be read ({error.strerror}); leave a corpus in place while a run reads it"
    )


# Digests of what documents contain: equal lengths do not mean equal documents. A corpus has a few digests, each of
# consecutive documents, which ranks compare at the start and a resumed run with its checkpoint. They cover all tokens
# of a small corpus and evenly spaced blocks of a large one, so that opening it stays quick; what a run then reads
# is digested row by row (:class:`mindspeed_cp.data.stream.ReplicaBatch`).

DIGEST_BITS = 52  # ranks compare digests as float64, which holds integers of this size exactly
WHOLE_TOKENS = 2**24  # of a corpus that is digested as a whole
BLOCK_TOKENS, SAMPLED_BLOCKS = 2**14, 1024  # of larger ones
GROUPS = 16  # digests of a corpus


def corpus_digests(corpus: Corpus) -> list[str]:
    """Return the digests of GROUPS runs of documents, each 16 hexadecimal digits; all blocks are read.

    Groups of trajectories were digested as a whole when their corpus was opened.

    Raises:
        ConfigError: the corpus cannot be read.
    """
    documents = len(corpus.lengths)
    digests = [blake2b(digest_size=8) for _ in range(GROUPS)]
    whole: Sequence[bytes] | None = getattr(corpus, "group_digests", None)
    if whole is not None:
        for number, group_digest in enumerate(whole):
            digests[number * GROUPS // documents].update(group_digest)
        return [digest.hexdigest() for digest in digests]
    blocks = chunk_documents(np.asarray(corpus.lengths, np.int64), BLOCK_TOKENS)
    if int(blocks["length"].sum()) > WHOLE_TOKENS:
        blocks = blocks[np.linspace(0, len(blocks) - 1, SAMPLED_BLOCKS).astype(np.int64)]
    for document, start, length in blocks.tolist():
        digest = digests[document * GROUPS // documents]
        digest.update(np.array([document, start, start + length], "<i8").tobytes())
        digest.update(_as_bytes(corpus.tokens(document, start, start + length)))
    return [digest.hexdigest() for digest in digests]


def different_documents(digests: Sequence[str], others: Sequence[str], documents: int) -> str | None:
    """Return where two corpora of equal lengths differ, "documents 120 to 239 of 300", or None if they do not."""
    different = [group for group, pair in enumerate(zip(digests, others, strict=False)) if pair[0] != pair[1]]
    if not different:
        return None if len(digests) == len(others) else f"documents 0 to {documents - 1} of {documents}"
    first, last = -(-different[0] * documents // GROUPS), -(-(different[-1] + 1) * documents // GROUPS) - 1
    return f"{'document' if first == last else 'documents'} {first}{f' to {last}' * (first < last)} of {documents}"


def rows_digest(rows: Iterable[np.ndarray]) -> int:
    """Return a digest of the contents of some rows, an integer of DIGEST_BITS."""
    digest = blake2b(digest_size=8)
    for tokens in rows:
        digest.update(_as_bytes(tokens))
    return int.from_bytes(digest.digest(), "little") >> (64 - DIGEST_BITS)


def _as_bytes(tokens: np.ndarray) -> bytes:
    return np.asarray(tokens).astype("<u4").tobytes()
