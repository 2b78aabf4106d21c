"""Corpora of files: the sources of the standard library, or text and JSON-lines files of the user.

A corpus is read when it is opened, and each rank holds it in memory. Tokens are bytes, and one that ends a document, so
that any file can be read::

    b"if"  ->  [105, 102, 256]
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

import numpy as np

from mindspeed_cp.errors import ConfigError

EOD = 256  #: end of a document
VOCAB_SIZE = 257

STDLIB, JSON_LINES = "stdlib", ".jsonl"
USER_SUFFIXES = (".txt", JSON_LINES)
MAX_BYTES = 2**31  # of all files of a corpus
#: Folders of the standard library with other packages or without sources; they differ between machines.
NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__"})


class FileCorpus:
    """Documents in memory: the tokens of a document are its bytes and EOD; an empty one has one token."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self._texts = texts
        #: Number of tokens of each document, int64 [documents], read-only.
        self.lengths = np.array([len(text) + 1 for text in texts], np.int64)
        self.lengths.setflags(write=False)

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return tokens start .. stop-1 of a document, int64 [stop - start]; by default all; the last one is EOD."""
        text = self._texts[document]
        tokens = np.full((len(text) + 1 if stop is None else stop) - start, EOD, np.int64)
        content = np.frombuffer(text[start : start + len(tokens)], np.uint8)
        tokens[: len(content)] = content
        return tokens

    @cached_property
    def digest(self) -> str:
        """Digest of all documents, 32 hexadecimal digits: equal lengths do not mean equal contents."""
        digest = blake2b(self.lengths.astype("<i8").tobytes(), digest_size=16)
        for text in self._texts:
            digest.update(text)
        return digest.hexdigest()


def open_corpus(source: str | Path) -> FileCorpus:
    """Open a corpus of files; their order depends only on their names.

    Args:
        source: "stdlib", the standard library of Python, with thousands of documents on every machine; a .txt or .jsonl
            file; or a folder, which is searched for these with its subfolders (write "./stdlib" for a folder of that
            name). A .jsonl file has one document per line, {"text": "..."}; any other file is one document.

    Raises:
        ConfigError: the source does not exist, it has no such file or no text, or a line is not a JSON object with a
            "text".
    """
    if str(source) == STDLIB:
        paths = _files_below(Path(sysconfig.get_path("stdlib")), (".py",), NOT_STDLIB)
    else:
        paths = _files_of(source)
    texts: list[bytes] = []
    total = 0
    for path in paths:
        shown = printable_path(path)
        try:
            with path.open("rb") as opened:
                total += os.fstat(opened.fileno()).st_size
                if total > MAX_BYTES:
                    raise ConfigError(
                        f"{shown}: the corpus has more than {MAX_BYTES:,} bytes with this file, and each rank holds it "
                        "in memory; give a part of it, or train by Megatron's own scripts"
                    )
                if path.suffix.lower() == JSON_LINES:
                    lines = ((number, line) for number, line in enumerate(opened, 1) if line.strip())
                    texts += [_text_of(line, f"{shown}:{number}") for number, line in lines]
                else:
                    texts.append(opened.read())
        except OSError as error:
            raise ConfigError(f"{shown}: cannot be read ({error.strerror})") from None
    if not any(texts):
        raise ConfigError(
            f"corpus {printable_path(Path(source))}: none of its {len(texts)} documents has text; nothing can be learned"
        )
    return FileCorpus(texts)


def _files_of(source: str | Path) -> list[Path]:
    """Return a file of the user, or the files below a folder; raise ConfigError if there is none to read."""
    root, either = Path(source).expanduser(), " or ".join(USER_SUFFIXES)
    shown = f"corpus {printable_path(root)[:200]}"
    try:
        exists = str(source).strip() != "" and root.exists()
    except (OSError, ValueError) as error:  # a name that is too long, or has a NUL byte
        raise ConfigError(f"{shown}: {error}") from None
    if not exists:
        raise ConfigError(f"{shown}: no such file or folder; valid: {STDLIB!r}, a {either} file, or a folder of them")
    if root.is_dir():
        paths = _files_below(root, USER_SUFFIXES)
        if not paths:
            raise ConfigError(f"{shown}: no {either} file in this folder or the folders in it")
        return paths
    if root.suffix.lower() not in USER_SUFFIXES:
        raise ConfigError(f"{shown}: suffix {root.suffix!r} is not read; valid: {either}, or a folder of them")
    if not root.is_file():
        raise ConfigError(f"{shown}: is no regular file; valid: {either}, or a folder of them")
    return [root]


def _files_below(root: Path, suffixes: tuple[str, ...], skip: frozenset[str] = frozenset()) -> list[Path]:
    """Return the files below a folder, sorted by their path inside it; names that begin with a dot and folders of
    `skip` are left out. Links are followed; each folder is read once."""

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


def printable_path(path: Path) -> str:
    """Return a path as text; bytes that are not UTF-8 are escaped."""
    return str(path).encode("utf-8", "backslashreplace").decode()


def _text_of(line: bytes, where: str) -> bytes:
    """Return the "text" of a JSON line, in UTF-8; raise ConfigError, naming the line, where there is none."""
    example = 'each line must be an object such as {"text": "..."}'
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: is no JSON ({error}); {example}") from None
    if not isinstance(value, dict) or "text" not in value:
        what = f"has the keys {sorted(value)}" if isinstance(value, dict) else f"is a JSON {type(value).__name__}"
        raise ConfigError(f"{where}: {what}; {example}")
    text = value["text"]
    if not isinstance(text, str):
        raise ConfigError(f'{where}: "text" is {json.dumps(text)[:40]}, which is no text; give one in quotes')
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can hold half a surrogate pair
        problem = f'"text" has half a surrogate pair at character {error.start}'
        raise ConfigError(f"{where}: {problem}; mend the line") from None
