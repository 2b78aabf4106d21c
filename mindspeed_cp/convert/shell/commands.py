"""Simple commands of a shell script: assignments, words and redirections."""

from __future__ import annotations

import re

from mindspeed_cp.convert.shell.reader import Reader
from mindspeed_cp.convert.shell.words import Assignment, Command, Opaque, Statement, Text, Word

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]\s]*\])?(\+?)=", re.ASCII)
_REDIRECTION = re.compile(r"[0-9]*(?:<<<|<<-?|>>|<>|>\||&>>?|[<>]&?)")
_DECLARATIONS = frozenset({"export", "readonly", "declare", "typeset", "local"})
_SETTERS = frozenset({"read", "mapfile", "readarray", "getopts", "unset"})


def read_command(reader: Reader, here_documents: list[tuple[str, bool]]) -> list[Statement]:
    """Read the simple command at the place of a reader; return its assignments, or the command.

    Args:
        reader: at the beginning of the command.
        here_documents: gets the ends of the here-documents that begin here, each with True for `<<-`.
    """
    start = reader.position
    assignments: list[Assignment] = []
    words: list[Word] = []
    while True:
        reader.blanks()
        redirection = _REDIRECTION.match(reader.source, reader.position)
        if redirection and not (reader.starts("<(") or reader.starts(">(")):
            _redirect(reader, redirection, here_documents)
            continue
        if not reader.letter or reader.letter in "\n;|&()":
            break
        declares = bool(words) and _plain(words[0]) in _DECLARATIONS
        assignment = _ASSIGNMENT.match(reader.source, reader.position) if not words or declares else None
        if assignment:
            assignments.append(_read_assignment(reader, assignment))
            continue
        before = reader.position
        word = reader.word()
        if reader.position == before:
            break
        words.append(word)
    first = _plain(words[0]) if words else ""
    if not words or first in _DECLARATIONS:
        return list(assignments)
    if first in _SETTERS:
        unknown = (Opaque((start, reader.position), True),)
        names = filter(str.isidentifier, map(_plain, words[1:]))
        return [Assignment(name, (unknown,), False, False, start) for name in names]
    return [Command(tuple(words), start)]


def _read_assignment(reader: Reader, match: re.Match[str]) -> Assignment:
    start = match.start()
    name, subscript, appends = match.groups()
    reader.position = match.end()
    if reader.letter != "(":
        word = reader.word()
        if subscript:  # one element: the others are kept, so the whole is not known
            word = (Opaque((start, reader.position), True),)
        return Assignment(name, (word,), False, bool(appends) and not subscript, start)
    reader.position += 1
    words: list[Word] = []
    while reader.letter != ")":
        reader.blanks()
        if not reader.letter:
            raise reader.error(start, f"{name}=( is not closed")
        word = reader.word()
        if word:
            words.append(word)
        elif reader.letter != ")":
            reader.position += 1
    reader.position += 1
    return Assignment(name, tuple(words), True, bool(appends), start)


def _redirect(reader: Reader, match: re.Match[str], here_documents: list[tuple[str, bool]]) -> None:
    reader.position = match.end()
    reader.blanks()
    before = reader.position
    word = reader.word()
    if match[0].lstrip("0123456789") in ("<<", "<<-"):
        here_documents.append((_plain(word) or "", match[0].endswith("-")))
    if reader.position == before and reader.letter in ("&", "-"):
        reader.position += 1


def _plain(word: Word) -> str:
    """Return the text of a word without expansions; empty for others."""
    return (
        "".join(part.text for part in word if isinstance(part, Text))
        if all(isinstance(part, Text) for part in word)
        else ""
    )
