"""Corpora: the sources of the standard library, or text and JSON-lines files of the user.

Opening a corpus determines the number and lengths of its documents; contents are read on demand.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np

from mindspeed_cp.data.file_corpus import JSON_LINES, FileCorpus, find_files, printable_path
from mindspeed_cp.errors import ConfigError

STDLIB = "stdlib"
USER_SUFFIXES = (".txt", JSON_LINES)
#: Folders of the standard library with other packages or without sources; they differ between machines.
NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__"})


class Corpus(Protocol):
    """Documents of known lengths, numbered from 0; `open_corpus` returns one of files."""

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each document, int64 [documents]."""

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return tokens start .. stop-1 of a document, int64 [stop - start]; by default all."""


def open_corpus(source: str | Path, suffixes: Iterable[str] | None = None) -> FileCorpus:
    """Open a corpus of files; their order depends only on their names.

    Args:
        source: "stdlib", the standard library of Python, with thousands of documents on every machine; a file; or a
            folder, which is searched with its subfolders (write "./stdlib" for a folder of that name).
        suffixes: suffixes of the files to read; default: .py for the standard library, .txt and .jsonl elsewhere. A
            .jsonl file has one document per line, {"text": "..."}; any other file is one document.

    Raises:
        ConfigError: the source does not exist, it has no file with one of the suffixes, or a line is not a JSON object
            with a "text".
    """
    if str(source) == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        paths = _paths(root, _checked(suffixes or (".py",)), STDLIB, NOT_STDLIB)
    else:
        root, paths = user_files(source, _checked(suffixes or USER_SUFFIXES), STDLIB)
    corpus = FileCorpus(paths)
    if not len(corpus):
        raise ConfigError(f"corpus {printable_path(root)}: has no document; its {JSON_LINES} files have no lines")
    return corpus


def user_files(source: str | Path, suffixes: tuple[str, ...], name: str) -> tuple[Path, list[Path]]:
    """Return the file or folder that a user names, and the files that it is or has.

    Args:
        source: a file or a folder.
        suffixes: suffixes of the files to read.
        name: the corpus that is valid in place of files, for errors.

    Raises:
        ConfigError: the source does not exist, or has no file with one of the suffixes.
    """
    if not str(source).strip():
        raise ConfigError(f"corpus {str(source)!r} names nothing; valid: {name!r}, a file, or a folder of files")
    root = Path(source).expanduser()
    return root, _paths(root, suffixes, name)


def _paths(root: Path, valid_suffixes: tuple[str, ...], name: str, skip: frozenset[str] = frozenset()) -> list[Path]:
    """Return a file, or the files of a folder; arguments and errors as for `user_files`."""
    try:
        exists = root.exists()
    except (OSError, ValueError) as error:  # a name that is too long, or has a NUL byte
        raise ConfigError(f"corpus {printable_path(root)[:200]}: {error}") from None
    if not exists:
        raise ConfigError(
            f"corpus {printable_path(root)}: no such file or folder; "
            f"valid: {name!r}, a {_either(valid_suffixes)} file, or a folder of them"
        )
    if root.is_dir():
        paths = find_files(root, valid_suffixes, skip)
        if not paths:
            raise ConfigError(
                f"corpus {printable_path(root)}: no {_either(valid_suffixes)} file in this folder or the folders in it"
            )
    elif root.suffix.lower() in valid_suffixes:
        paths = [root]
    else:
        raise ConfigError(
            f"corpus {printable_path(root)}: suffix {root.suffix!r} is not read; valid: "
            f"{_either(valid_suffixes)}, or a folder of them"
        )
    irregular = next((path for path in paths if not path.is_file()), None)
    if irregular is not None:
        raise ConfigError(
            f"corpus {printable_path(irregular)}: is no regular file; valid: {_either(valid_suffixes)}, or a folder "
            "of them"
        )
    return paths


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


def _checked(suffixes: Iterable[str]) -> tuple[str, ...]:
    checked = tuple(suffixes)
    for suffix in checked:
        if not suffix.startswith(".") or suffix != suffix.lower():
            raise ConfigError(f"corpus suffix {suffix!r} must begin with a dot and be lower-case, as in '.txt'")
    return checked


def _either(suffixes: tuple[str, ...]) -> str:
    return " or ".join(suffixes)
