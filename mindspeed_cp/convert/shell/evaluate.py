"""The commands of a script with the values that its variables have where they stand.

Nothing is run. A variable whose value depends on a branch, a command or the environment has no value here but the
cause why, which stays in every word that uses it.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from mindspeed_cp.convert.shell.arithmetic import Unsolved, solve
from mindspeed_cp.convert.shell.branches import BLANK, BLANKS, NOWHERE, Choice, Value, merge_values
from mindspeed_cp.convert.shell.parser import parse_script
from mindspeed_cp.convert.shell.words import (
    Arithmetic,
    Assignment,
    Branch,
    Command,
    Field,
    Opaque,
    Parameter,
    Piece,
    Span,
    Text,
    Unknown,
    Word,
    field_text,
)
from mindspeed_cp.errors import ConfigError, shortened

MAX_PIECES = 50_000  # that expansions may make; a launch script makes some hundreds
MAX_LETTERS = 5_000_000

_SHOWN = 30  # letters of an expression in a message


@dataclass(frozen=True)
class ScriptCommand:
    """A simple command after expansion.

    Attributes:
        fields: its words.
        start: offset in the script.
        line: 1-based line.
    """

    fields: tuple[Field, ...]
    start: int
    line: int


def read_script(source: str, name: str, defined: Mapping[str, str] | None = None) -> Iterator[ScriptCommand]:
    """Yield the commands of a script, with their words expanded.

    Args:
        source: text of the script.
        name: its name in errors.
        defined: values of variables, which take precedence over those that the script gives.

    Raises:
        ConfigError: a quote or a bracket is not closed, or the words become very many.
    """
    reader = _Evaluator(source, name, defined or {})
    for statement in parse_script(source, name):
        if isinstance(statement, Assignment):
            reader.assign(statement)
        elif isinstance(statement, Branch):
            reader.branch(statement)
        else:
            yield reader.command(statement)


class _Evaluator:
    def __init__(self, source: str, name: str, defined: Mapping[str, str]) -> None:
        self.source, self.name = source, name
        self.defined = frozenset(defined)
        self.values: dict[str, Value] = {key: (Piece(text, NOWHERE, (NOWHERE,)),) for key, text in defined.items()}
        self.choices: list[Choice] = []
        self.pieces = self.letters = 0
        self.line_ends = [match.start() for match in re.finditer("\n", source)]

    def line(self, offset: int) -> int:
        return bisect_left(self.line_ends, offset) + 1

    def command(self, command: Command) -> ScriptCommand:
        fields = [entry for word in command.words for entry in self.split(word)]
        return ScriptCommand(tuple(fields), command.start, self.line(command.start))

    def assign(self, assignment: Assignment) -> None:
        name = assignment.name
        if name in self.defined:
            return
        value: Value
        if assignment.is_array:
            value = [entry for word in assignment.words for entry in self.split(word)]
        else:
            value = self.joined(assignment.words[0])
        if assignment.appends:
            old = self.values.get(name, [] if assignment.is_array else ())
            if isinstance(old, list) or isinstance(value, list):
                fields = value if isinstance(value, list) else [value]
                value = [*(old if isinstance(old, list) else [old] * bool(old)), *fields]
            else:
                value = (*old, *value)
            self.count(value if not isinstance(value, list) else tuple(piece for entry in value for piece in entry))
        self.set(name, value, self.line(assignment.start))

    def set(self, name: str, value: Value | None, line: int) -> None:
        if self.choices:
            choice = self.choices[-1]
            choice.before.setdefault(name, self.values.get(name))
            choice.lines[name] = line
        if value is None:
            self.values.pop(name, None)
        else:
            self.values[name] = value

    def branch(self, branch: Branch) -> None:
        if branch.border == "enter":
            self.choices.append(Choice())
            return
        choice = self.choices[-1]
        for name in choice.before:
            choice.values.setdefault(name, []).append(self.values.get(name))
        self._restore(choice)
        choice.branches += 1
        if branch.border == "leave":
            self.choices.pop()
            for name, values in choice.values.items():
                if not branch.complete or len(values) < choice.branches:
                    values.append(self.values.get(name))  # a branch that leaves it as it is
                self.set(name, self.merged(name, values, choice.lines[name]), choice.lines[name])

    def _restore(self, choice: Choice) -> None:
        for name, value in choice.before.items():
            if value is None:
                self.values.pop(name, None)
            else:
                self.values[name] = value
        choice.before = {}

    def merged(self, name: str, values: list[Value | None], line: int) -> Value | None:
        """Return the value of a variable after branches that end with these."""
        for value in values:
            self.count(tuple(piece for entry in value for piece in entry) if isinstance(value, list) else value or ())
        return merge_values(name, values, line)

    def joined(self, word: Word) -> Field:
        """Return the pieces of a word that is not split, as in an assignment."""
        pieces: list[Piece] = []
        for part in word:
            value = self.part(part)
            if isinstance(value, list):
                for number, entry in enumerate(value):
                    pieces += [BLANK] * bool(number) + list(entry)
            else:
                pieces += value
        return self.count(tuple(replace(piece, quoted=False) if piece.unknown is None else piece for piece in pieces))

    def operand(self, word: Word) -> Field:
        """Return the pieces of a default, of which those in quotes are not split."""
        pieces = []
        for part in word:
            quoted = part.quoted
            pieces += [replace(piece, quoted=piece.quoted or quoted) for piece in self.joined((part,))]
        return tuple(pieces)

    def split(self, word: Word) -> list[Field]:
        """Return the words that a word becomes: values outside of quotes are split at blanks."""
        fields: list[Field] = []
        pieces: list[Piece] = []
        begun = False
        if len(word) == 2 and isinstance(word[1], Parameter) and self.part(word[1]) == [] and word[1].subscript == "@":
            return []  # "${name[@]}" of an empty array
        for part in word:
            value = self.part(part)
            if isinstance(part, Text):
                pieces += value if not isinstance(value, list) else ()
                begun = True
                continue
            elements = value if isinstance(value, list) else [value]
            quoted = part.quoted
            star = isinstance(part, Parameter) and part.subscript == "*" and quoted
            for number, element in enumerate(elements):
                if number and not star:
                    if begun or pieces:
                        fields.append(tuple(pieces))
                    pieces, begun = [], quoted
                elif number:
                    pieces.append(BLANK)
                if quoted:
                    pieces += element
                    begun = begun or not isinstance(value, list) or bool(element)
                    continue
                for piece in element:
                    begun = self._split_piece(piece, pieces, fields, begun)
        if begun or pieces:
            fields.append(tuple(pieces))
        for entry in fields:
            self.count(entry)
        return fields

    @staticmethod
    def _split_piece(piece: Piece, pieces: list[Piece], fields: list[Field], begun: bool) -> bool:
        """Add a piece to `pieces`, and to `fields` every word that ends in it."""
        if piece.unknown is not None or piece.quoted:
            pieces.append(piece)
            return begun
        position = 0
        for blank in [*BLANKS.finditer(piece.text), None]:
            stop = blank.start() if blank else len(piece.text)
            if stop > position:
                pieces.append(piece.part(position, stop))
            if blank:
                if pieces or begun:
                    fields.append(tuple(pieces))
                    pieces.clear()
                    begun = False
                position = blank.end()
        return begun

    def part(self, part: Text | Parameter | Arithmetic | Opaque) -> Value:
        """Return the value of a part of a word."""
        if isinstance(part, Text):
            return (Piece(part.text, (part.start, part.start + len(part.text))),) if part.text else ()
        if isinstance(part, Parameter):
            return self.parameter(part)
        start, stop = part.span
        text = self.source[start:stop]
        if isinstance(part, Arithmetic):
            try:
                return (Piece(str(solve(part.expression, self.number)), part.span),)
            except Unsolved as error:
                cause = f"needs {error}, which is not known" if str(error) else "is not computed"
        else:
            cause = "is known only when the script runs"
        name = shortened(" ".join(text.split()), _SHOWN)
        return self.unknown(Unknown(name, self.line(start), cause), part.span, part.quoted)

    def number(self, name: str) -> str | None:
        value = self.values.get(name)
        if value is None or isinstance(value, list) or any(piece.unknown for piece in value):
            return None
        return field_text(value)

    def unknown(self, unknown: Unknown, span: Span, quoted: bool) -> Field:
        return (Piece(self.source[span[0] : span[1]], span, unknown=unknown, quoted=quoted),)

    def parameter(self, part: Parameter) -> Value:
        start = part.span[0]
        value: Value | None = self.values.get(part.name)
        if isinstance(value, list) and part.subscript not in ("@", "*"):
            index = int(part.subscript or 0)
            value = value[index] if index < len(value) else None
        elif part.subscript.isdigit() and value is not None and int(part.subscript) > 0:
            value = None
        empty = value is not None and not value
        if part.operator:
            missing = value is None or (empty and part.operator.startswith(":"))
            if part.operator.endswith("+"):
                return () if missing else self._referred(self.operand(part.operand), part.span)
            if missing:
                line = self.line(start)
                default = self.operand(part.operand)
                default = tuple(replace(piece, from_default=piece.from_default or line) for piece in default)
                if part.operator.endswith("=") and part.name.isidentifier():
                    self.set(part.name, tuple(replace(piece, quoted=False) for piece in default), line)
                return self._referred(default, part.span)
        if value is None and part.name in self.values:  # an element that the array lacks
            return ()
        if value is None:
            name = f"${part.name}" if not part.name.isidentifier() else part.name
            many = part.name in ("@", "*")
            unknown = Unknown(name, self.line(start), "is not set in the script")
            return self.unknown(unknown, part.span, part.quoted and not many)
        if isinstance(value, list):
            return [self._referred(entry, part.span) for entry in value]
        return self._referred(value, part.span)

    def _referred(self, value: Field, span: Span) -> Field:
        return self.count(tuple(piece.through(span) for piece in value))

    def count(self, value: Field) -> Field:
        """Count the pieces that were made, and refuse a script that makes very many."""
        self.pieces += len(value)
        self.letters += sum(len(piece.text) + len(piece.references) for piece in value)
        if self.pieces > MAX_PIECES or self.letters > MAX_LETTERS:
            raise ConfigError(
                f"{self.name}: its variables expand to more text than a launch script has; give the flags behind --"
            )
        return value
