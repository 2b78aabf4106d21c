"""Where documents come from: the standard library's sources, or the user's text and JSON-lines files.

Opening a corpus finds out how many documents there are and how long each one is; contents are read on demand.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np

from mindspeed_cp.data.files import JSON_LINES, FileCorpus, find_files, shown
from mindspeed_cp.errors import ConfigError

STDLIB = "stdlib"
USER_SUFFIXES = (".txt", JSON_LINES)
#: Folders inside the standard library that hold other packages or no sources; they differ from machine to machine.
NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__"})


class Corpus(Protocol):
    """Documents of known lengths, numbered from 0. `open_corpus` makes one from files; any like it will do."""

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each document, int64 [documents]."""

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Tokens start .. stop-1 of a document, int64 [stop - start]; all of them by default."""


def open_corpus(source: str | Path, suffixes: Iterable[str] | None = None) -> FileCorpus:
    """Opens a corpus of files, in an order that depends on nothing but their names.

    Args:
        source: "stdlib", Python's own standard library: thousands of real documents, on every machine; or a file; or a
            folder, which is searched with its subfolders (a folder named "stdlib" is "./stdlib").
        suffixes: which files to take; by default .py of the standard library, .txt and .jsonl elsewhere. A .jsonl file
            holds one document per line, {"text": "..."}; any other file is one document.

    Raises:
        ConfigError: nothing is there, nothing in it has one of the suffixes, or a line is no JSON object with a "text".
    """
    if str(source) == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        wanted = _checked(suffixes or (".py",))
        skip = NOT_STDLIB
    else:
        if not str(source).strip():
            raise ConfigError(f"corpus {str(source)!r} names nothing; valid: {STDLIB!r}, a file, or a folder of files")
        root = Path(source).expanduser()
        wanted = _checked(suffixes or USER_SUFFIXES)
        skip = frozenset()
    try:
        found = root.exists()
    except (OSError, ValueError) as error:  # a name that is too long, or has a NUL byte
        raise ConfigError(f"corpus {shown(root)[:200]}: {error}") from None
    if not found:
        raise ConfigError(
            f"corpus {shown(root)}: no such file or folder; "
            f"valid: {STDLIB!r}, a {_either(wanted)} file, or a folder of them"
        )
    if root.is_dir():
        paths = find_files(root, wanted, skip)
        if not paths:
            raise ConfigError(f"corpus {shown(root)}: no {_either(wanted)} file in this folder or the folders in it")
    elif root.suffix.lower() in wanted:
        paths = [root]
    else:
        raise ConfigError(
            f"corpus {shown(root)}: suffix {root.suffix!r} is not read; valid: {_either(wanted)}, or a folder of them"
        )
    odd = next((path for path in paths if not path.is_file()), None)
    if odd is not None:
        raise ConfigError(f"corpus {shown(odd)}: is no regular file; valid: {_either(wanted)}, or a folder of them")
    corpus = FileCorpus(paths)
    if not len(corpus):
        raise ConfigError(f"corpus {shown(root)}: has no document; its {JSON_LINES} files have no lines")
    return corpus


def check_learnable(corpus: Corpus, source: str) -> None:
    """Raise ConfigError when no document has a token to predict, because all are empty."""
    if corpus.lengths.max(initial=0) < 2:
        raise ConfigError(
            f"corpus {source}: all of its {len(corpus.lengths)} documents are empty; nothing can be learned"
        )


def _checked(suffixes: Iterable[str]) -> tuple[str, ...]:
    wanted = tuple(suffixes)
    for suffix in wanted:
        if not suffix.startswith(".") or suffix != suffix.lower():
            raise ConfigError(f"corpus suffix {suffix!r} must begin with a dot and be lower-case, as in '.txt'")
    return wanted


def _either(suffixes: tuple[str, ...]) -> str:
    return " or ".join(suffixes)
