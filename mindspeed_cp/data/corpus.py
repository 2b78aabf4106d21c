"""Corpora: the sources of the standard library, or a text or JSON-lines file of the user.

A corpus is read when it is opened, and each rank holds it in memory. Tokens are bytes, and one that ends a document, so
that any file can be read::

    b"if"  ->  [105, 102, 256]
"""

from __future__ import annotations

import json
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
MAX_BYTES = 2**31
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
    """Open a corpus.

    Args:
        source: "stdlib", the sources of Python's standard library, with thousands of documents on every machine, in the
            order of their paths; a .txt file, which is one document; or a .jsonl file, with one document per line,
            {"text": "..."}.

    Raises:
        ConfigError: the source is no such file, cannot be read or has no text, or a line is not a JSON object with a
            "text".
    """
    shown = f"corpus {str(source).encode('utf-8', 'backslashreplace').decode()[:200]}"  # bytes that are not UTF-8
    if str(source) == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        paths = [path for path in root.rglob("*.py") if not NOT_STDLIB & {*path.parts[len(root.parts) :]}]
        texts = [path.read_bytes() for path in sorted(paths, key=Path.as_posix) if path.is_file()]
    else:
        content = _read(Path(source).expanduser(), shown)
        texts = [content]
        if str(source).lower().endswith(JSON_LINES):
            lines = enumerate(content.split(b"\n"), 1)
            texts = [_text_of(line, f"{shown}:{number}") for number, line in lines if line.strip()]
    if not any(texts):
        raise ConfigError(f"{shown}: none of its {len(texts)} documents has text; nothing can be learned")
    return FileCorpus(texts)


def _read(path: Path, shown: str) -> bytes:
    """Return the content of a file of the user."""
    try:
        if path.suffix.lower() not in (".txt", JSON_LINES):
            problem = f"suffix {path.suffix!r} is not read"
        elif not path.is_file():
            problem = "no such regular file"
        elif path.stat().st_size > MAX_BYTES:
            problem = f"has more than {MAX_BYTES:,} bytes, and each rank holds it in memory"
        else:
            return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL byte
        problem = f"cannot be read ({getattr(error, 'strerror', None) or error})"
    raise ConfigError(f"{shown}: {problem}; valid: {STDLIB!r}, a .txt file, or a {JSON_LINES} file")


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
