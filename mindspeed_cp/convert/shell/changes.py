"""What commands change where the text does not tell their order: those of a loop, of a function, of a call."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mindspeed_cp.convert.shell.arithmetic import assigned_names
from mindspeed_cp.convert.shell.words import (
    Arithmetic,
    Assignment,
    Branch,
    Command,
    Opaque,
    Parameter,
    Statement,
    Text,
    Word,
)

_EVALUATED = re.compile(r"(?:^|[\s;&|])([A-Za-z_]\w*)\+?=", re.ASCII)


@dataclass
class Changes:
    """What statements change.

    Attributes:
        variables: for each variable that is assigned, the offset of its last assignment.
        replaced: those of them that are not just appended to.
        glued: those to which a text is appended that does not begin with a blank.
        texts: those that get a text, which is the first word of an array.
        calls: names of the commands.
        shifts: True if positional parameters are set, by `shift` or `set`.
        runs: offset of a command that runs text which is not in the script, by `source` or `eval`; None without.
    """

    variables: dict[str, int] = field(default_factory=dict)
    replaced: set[str] = field(default_factory=set)
    glued: set[str] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)
    calls: set[str] = field(default_factory=set)
    shifts: bool = False
    runs: int | None = None


def changes_of(statements: Sequence[Statement], *, with_locals: bool) -> Changes:
    """Return what statements change; without local variables, what they change for others."""
    changes = Changes()
    for statement in statements:
        if isinstance(statement, Branch):
            continue
        for name in _set_by_arithmetic(statement.words):
            changes.variables[name] = statement.start
            changes.replaced.add(name)
        if isinstance(statement, Command):
            words = tuple(map(plain_text, statement.words))
            changes.calls.update(words[:1])
            changes.shifts = changes.shifts or sets_positional(words)
            changes.runs = statement.start if words[0] in FILE_READERS else changes.runs
            if words[:1] == ("eval",):
                changes.runs = changes.runs if all(words) else statement.start
                changes.shifts = changes.shifts or bool({"shift", "set"} & {*" ".join(words[1:]).split()})
                names = _EVALUATED.findall(" ".join(words[1:]))
                changes.variables |= dict.fromkeys(names, statement.start)
                changes.replaced.update(names)
        elif with_locals or not statement.is_local:
            changes.variables[statement.name] = statement.start
            if not statement.is_array:
                changes.texts.add(statement.name)
            if not _appends(statement):
                changes.replaced.add(statement.name)
            elif not _begins_with_blank(statement):
                changes.glued.add(statement.name)
    return changes


#: Commands that run what stands in a file.
FILE_READERS = frozenset({"source", "."})


def sets_positional(words: Sequence[str]) -> bool:
    """Return True if a command changes `$1`, `$2`, ..., as `shift` and `set -- words` do."""
    if words[:1] != ("set",):
        return words[:1] == ("shift",)
    takes_name = False
    for word in words[1:]:
        if takes_name:
            takes_name = False
        elif word[:1] in ("-", "+") and word not in ("-", "--"):
            takes_name = word.endswith("o")
        else:
            return True
    return False


def plain_text(word: Word) -> str:
    """Return the text of a word without expansions; empty for others."""
    texts = [part.text for part in word if isinstance(part, Text)]
    return "".join(texts) if len(texts) == len(word) else ""


def _appends(assignment: Assignment) -> bool:
    """Return True if the old value stays in front: `A+=x`, `A="$A x"`, `A=("${A[@]}" x)`."""
    if assignment.appends:
        return True
    first = next(iter(_parts(assignment)), None)
    if not isinstance(first, Parameter) or first.name != assignment.name or first.operator:
        return False
    return first.subscript == ("@" if assignment.is_array else "")


def _begins_with_blank(assignment: Assignment) -> bool:
    """Return True if a blank, or the end of a word of an array, stands before what is appended."""
    parts = _parts(assignment)
    added = parts[0 if assignment.appends else 1 :]
    return assignment.is_array or not added or (isinstance(added[0], Text) and added[0].text[0] in " \t\n")


def _parts(assignment: Assignment) -> list[Text | Parameter | Arithmetic | Opaque]:
    """Return the parts of the first word that are not empty."""
    return [part for word in assignment.words[:1] for part in word if not isinstance(part, Text) or part.text]


def _set_by_arithmetic(words: Sequence[Word]) -> Iterator[str]:
    """Yield the variables that `$((A = 1))` sets inside words."""
    for word in words:
        for part in word:
            if isinstance(part, Arithmetic):
                yield from assigned_names(part.expression)
            elif isinstance(part, Parameter) and part.operand:
                yield from _set_by_arithmetic([part.operand])
