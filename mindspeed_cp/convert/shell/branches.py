"""Values of variables after branches of which only the running script knows which is taken."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TypeAlias

from mindspeed_cp.convert.shell.words import Field, Piece, Unknown, field_text

BLANKS = re.compile(r"[ \t\n]+")
NOWHERE = (0, 0)  # place of text that does not stand in the script
BLANK = Piece(" ", NOWHERE, (NOWHERE,))

#: A variable's value: one text, or the words of an array.
Value: TypeAlias = "Field | list[Field]"


@dataclass
class Choice:
    """The branches of one choice that were read so far.

    Attributes:
        before: values of the variables that the present branch changed, from before it; None: not set.
        values: for each variable that a branch changed, its value at the end of each of these branches.
        lines: for each such variable, the line of its last assignment.
        branches: number of branches that were read.
    """

    before: dict[str, Value | None] = field(default_factory=dict)
    values: dict[str, list[Value | None]] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    branches: int = 0


def merge_values(name: str, values: list[Value | None], line: int) -> Value | None:
    """Return the value of a variable after branches: what all have in common, and an unknown rest.

    Args:
        name: the variable.
        values: its values at the end of each branch.
        line: line of its last assignment.
    """
    texts = [_value_text(value) for value in values]
    if len(set(texts)) == 1:
        return next(filter(_is_doubted, values), values[0])
    known = [value for value in values if value is not None]
    lists = all(isinstance(value, list) for value in known)
    contents = [_contents(value, lists) for value in known]
    base, content = min(zip(known, contents, strict=True), key=lambda pair: len(pair[1]))
    if len(known) < len(values) or any(other[: len(content)] != content for other in contents):
        base, content = ([] if lists else ()), content[:0]
    ends = [other[len(content) :] for other in contents]
    rests = ((end if isinstance(end, str) else " ".join(end)).replace(f"${{{name}}}", "") for end in ends)
    rest = tuple(text for text in rests if text)
    unknown = Unknown(name, line, "is set in a branch of the script", rest)
    piece = Piece(f"${{{name}}}", NOWHERE, (NOWHERE,), unknown)
    if isinstance(base, list):
        return [*base, (piece,)]
    blank = (BLANK,) if base and all(BLANKS.match(text) for text in rest) else ()
    return (*base, *blank, piece)


def _is_doubted(value: Value | None) -> bool:
    """Return True if another value may count: that of the environment, or of a file."""
    fields = value if isinstance(value, list) else [value or ()]
    return any(piece.from_default or piece.before_file for entry in fields for piece in entry)


def _contents(value: Value, as_words: bool) -> str | tuple[str, ...]:
    """Return the words of an array, or a text."""
    return tuple(map(field_text, value)) if isinstance(value, list) and as_words else _value_text(value) or ""


def _value_text(value: Value | None) -> str | None:
    if value is None:
        return None
    return " ".join(map(field_text, value)) if isinstance(value, list) else field_text(value)
