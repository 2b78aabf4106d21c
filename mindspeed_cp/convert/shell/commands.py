"""Simple commands of a shell script: assignments, words and redirections."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from mindspeed_cp.convert.shell.arithmetic import assigned_names
from mindspeed_cp.convert.shell.changes import plain_text
from mindspeed_cp.convert.shell.reader import Reader
from mindspeed_cp.convert.shell.words import Assignment, Command, Opaque, Span, Statement, Text, Word

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]\s]*\])?(\+?)=", re.ASCII)
_REDIRECTION = re.compile(r"[0-9]*(?:<<<|<<-?|>>|<>|>\||&>>?|[<>]&?)")
_DECLARATIONS = frozenset({"export", "readonly", "declare", "typeset", "local"})
_EMPTYING = frozenset({"local", "declare", "typeset"})  # in a function, where they make a variable of its own
_SETTERS = frozenset({"read", "mapfile", "readarray", "getopts", "unset"})
_QUOTED_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=", re.ASCII)


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
        declares = bool(words) and plain_text(words[0]) in _DECLARATIONS
        assignment = _ASSIGNMENT.match(reader.source, reader.position) if not words or declares else None
        if assignment:
            assignments.append(_read_assignment(reader, assignment))
            continue
        before = reader.position
        word = reader.word()
        if reader.position == before:
            break
        words.append(word)
    first = plain_text(words[0]) if words else ""
    if not words or first in _DECLARATIONS:
        quoted = filter(None, (_quoted_assignment(word, start) for word in words[1:]))
        bare = filter(str.isidentifier, map(plain_text, words[1:])) if first in _EMPTYING else ()
        unset = unknown_assignments(bare, (start, reader.position))
        return [replace(assignment, is_local=first == "local") for assignment in (*assignments, *quoted, *unset)]
    names = _set_names(first, words[1:])
    if names is not None:
        return list(unknown_assignments(names, (start, reader.position)))
    return [Command(tuple(words), start)]


def unknown_assignments(names: Iterable[str], span: Span) -> list[Assignment]:
    """Return assignments of what only the running script knows."""
    return [Assignment(name, ((Opaque(span, True),),), False, False, span[0]) for name in names]


def _set_names(command: str, words: Sequence[Word]) -> list[str] | None:
    """Return the variables that a command of the shell sets; None for other commands."""
    if command == "let":
        return [name for word in words for name in assigned_names(_with_zeros(word))]
    texts = list(map(plain_text, words))
    if command in _SETTERS:
        return list(filter(str.isidentifier, texts))
    if command == "printf" and texts[:1] and texts[0].startswith("-v"):
        return list(filter(str.isidentifier, [texts[0][2:], *texts[1:2]]))[:1]
    return None


def _with_zeros(word: Word) -> str:
    """Return the text of a word with 0 in place of its expansions."""
    return "".join(part.text if isinstance(part, Text) else "0" for part in word)


def _quoted_assignment(word: Word, start: int) -> Assignment | None:
    """Return the assignment of a word such as "name=$value" behind `export`; None for other words."""
    parts = [part for part in word if not isinstance(part, Text) or part.text]
    first = parts[0] if parts else None
    match = _QUOTED_ASSIGNMENT.match(first.text) if isinstance(first, Text) else None
    if match is None or not isinstance(first, Text):
        return None
    rest = Text(first.text[match.end() :], first.start + match.end(), True)
    return Assignment(match[1], ((rest, *parts[1:]),), False, False, start)


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
        here_documents.append((plain_text(word) or "", match[0].endswith("-")))
    if reader.position == before and reader.letter in ("&", "-"):
        reader.position += 1
