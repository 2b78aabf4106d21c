"""The nouns of a parsed shell script: words before expansion, and pieces of text after it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

Span: TypeAlias = "tuple[int, int]"  # start and end offset in the script


@dataclass(frozen=True)
class Text:
    """Text that stands in the script letter by letter from `start` on."""

    text: str
    start: int
    quoted: bool


@dataclass(frozen=True)
class Parameter:
    """`$name`, `${name[subscript]}` or `${name<operator>operand}`.

    Attributes:
        name: name, digit or special parameter.
        span: place in the script.
        quoted: True inside double quotes, where the value is not split into words.
        subscript: "@", "*", a number, or an empty text without brackets.
        operator: ":-", "-", ":=", "=", ":+", "+", ":?", "?", or an empty text.
        operand: word behind the operator.
    """

    name: str
    span: Span
    quoted: bool
    subscript: str = ""
    operator: str = ""
    operand: Word = ()


@dataclass(frozen=True)
class Arithmetic:
    """`$((expression))`."""

    expression: str
    span: Span
    quoted: bool


@dataclass(frozen=True)
class Opaque:
    """What only a running shell can tell, such as `$(hostname)`."""

    span: Span
    quoted: bool


Word: TypeAlias = "tuple[Text | Parameter | Arithmetic | Opaque, ...]"


@dataclass(frozen=True)
class Assignment:
    """`name=word`, `name+=word` or `name=(words)`.

    Attributes:
        name: variable.
        words: one word, or the words of an array.
        is_array: True for an array.
        appends: True for `+=`.
        start: offset in the script.
        is_local: True if it ends with the function around it.
    """

    name: str
    words: tuple[Word, ...]
    is_array: bool
    appends: bool
    start: int
    is_local: bool = False


@dataclass(frozen=True)
class Command:
    """A simple command."""

    words: tuple[Word, ...]
    start: int


@dataclass(frozen=True)
class Branch:
    """A border of commands that may not run: "enter" a branch, the "next" branch of the same choice, or "leave".

    Attributes:
        border: "enter", "next" or "leave".
        complete: with "leave": True if one of the branches runs in any case, as with `else`.
        kind: with "enter": "loop", "function", or an empty text for others.
        name: with "enter": name of the function.
        stop: with "enter" of a loop or function: number of the statement behind its last.
    """

    border: str
    complete: bool = False
    kind: str = ""
    name: str = ""
    stop: int = 0


Statement: TypeAlias = "Assignment | Command | Branch"


@dataclass(frozen=True)
class Unknown:
    """The cause why a value is not known before the script runs.

    Attributes:
        name: variable, as in the script: "$1", "CP".
        line: 1-based line.
        cause: such as "is not set in the script".
        texts: values that it may have, as far as the script tells.
        is_variable: True if a value given for the name from outside makes it known.
    """

    name: str
    line: int
    cause: str
    texts: tuple[str, ...] = ()
    is_variable: bool = True

    def __str__(self) -> str:
        return f"{self.name} (line {self.line}) {self.cause}"


@dataclass(frozen=True)
class Piece:
    """Text of a word after expansion, and its way from the script.

    Attributes:
        text: the text; of an unknown value, what the script writes for it.
        span: place in the script; as long as the text if it stands there letter by letter.
        references: spans of the references (`$name`) through which it came, innermost first.
        unknown: cause why the text is not known, or None.
        quoted: True if it is not split into words: inside quotes of a default, or an unknown value that is one word.
        from_default: line of the default (`${name:-default}`) from which the text comes, or None.
        before_file: line that runs text from elsewhere (`source file`), after which the variable may have another
            value; or None.
    """

    text: str
    span: Span
    references: tuple[Span, ...] = ()
    unknown: Unknown | None = None
    quoted: bool = False
    from_default: int | None = None
    before_file: int | None = None

    def part(self, start: int, stop: int) -> Piece:
        """Return letters start .. stop-1."""
        first, last = self.span
        literal = last - first == len(self.text)
        return replace(self, text=self.text[start:stop], span=(first + start, first + stop) if literal else self.span)

    def through(self, reference: Span) -> Piece:
        """Return the same piece, reached through one more reference."""
        return replace(self, references=(*self.references, reference))

    @property
    def sites(self) -> tuple[Span, ...]:
        """Spans that stand for this piece in the script, from the text itself to the outermost reference."""
        return (self.span, *self.references)


Field: TypeAlias = "tuple[Piece, ...]"


def field_text(pieces: Field) -> str:
    """Return the text of a word after expansion."""
    return "".join(piece.text for piece in pieces)
