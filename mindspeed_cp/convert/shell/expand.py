"""Words of a script with the values that variables have: expansion without running anything."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace

from mindspeed_cp.convert.shell.arithmetic import Unsolved, assigned_names, solve
from mindspeed_cp.convert.shell.branches import BLANK, BLANKS, NOWHERE, Value
from mindspeed_cp.convert.shell.words import (
    Arithmetic,
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


class Expander:
    """Expands words.

    Attributes:
        source: text of the script.
        name: its name in errors.
        defined: names whose values the user gave, which the script does not change.
        values: values of variables.
        arguments: cause why `$1`, `$2`, ... are not those of the script; empty where they are.
    """

    def __init__(self, source: str, name: str, defined: Mapping[str, str]) -> None:
        self.source, self.name = source, name
        self.defined = frozenset(defined)
        self.values: dict[str, Value] = {key: (Piece(text, NOWHERE, (NOWHERE,)),) for key, text in defined.items()}
        self.arguments = ""
        self._pieces = self._letters = 0
        self._line_ends = [match.start() for match in re.finditer("\n", source)]

    def line(self, offset: int) -> int:
        """Return the 1-based line of an offset."""
        return bisect_left(self._line_ends, offset) + 1

    def set(self, name: str, value: Value | None, line: int) -> None:
        """Set a variable; None: unset it."""
        if value is None:
            self.values.pop(name, None)
        else:
            self.values[name] = value

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
        return self.count(tuple(replace(piece, quoted=False) for piece in pieces))

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
            quoted, many = part.quoted, _is_many(part)
            star = isinstance(part, Parameter) and part.subscript == "*" and quoted
            for number, element in enumerate(elements):
                if number and not star:
                    if begun or pieces:
                        fields.append(tuple(pieces))
                    pieces, begun = [], quoted
                elif number:
                    pieces.append(BLANK)
                if quoted:
                    pieces += element if many else _as_one_word(element)
                    begun = begun or not isinstance(value, list) or bool(element)
                    continue
                for piece in element:
                    splits = isinstance(value, list) and piece.unknown is not None
                    piece = replace(piece, quoted=False) if splits else piece
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
            return self._parameter(part)
        if isinstance(part, Arithmetic):
            return self._arithmetic(part)
        return self._unknown(part.span, part.quoted, "is known only when the script runs")

    def _arithmetic(self, part: Arithmetic) -> Field:
        """Return the value of `$((expression))`; variables that it sets are not known from here on."""
        read: list[Piece] = []

        def value_of(name: str) -> str | None:
            value = self.values.get(name)
            if value is None or isinstance(value, list) or any(piece.unknown for piece in value):
                return None
            read.extend(value)
            return field_text(value)

        try:
            text = str(solve(part.expression, value_of))
        except Unsolved as error:
            cause = f"needs {error}, which is not known" if str(error) else "is not computed"
            value = self._unknown(part.span, part.quoted, cause)
            for name in assigned_names(part.expression):
                if name not in self.defined:
                    self.set(name, value, self.line(part.span[0]))
            return value
        default = next((piece.from_default for piece in read if piece.from_default), None)
        file = next((piece.before_file for piece in read if piece.before_file), None)
        return (Piece(text, part.span, from_default=default, before_file=file),)

    def _unknown(self, span: Span, quoted: bool, cause: str) -> Field:
        """Return what the script writes at a place, as a text that is not known."""
        text = self.source[slice(*span)]
        name = shortened(" ".join(text.split()), _SHOWN)
        unknown = Unknown(name, self.line(span[0]), cause, is_variable=False)
        return (Piece(text, span, unknown=unknown, quoted=quoted),)

    def _parameter(self, part: Parameter) -> Value:
        start = part.span[0]
        if self.arguments and _is_argument(part.name):
            return self._unset(part, self.arguments, is_variable=False)
        value: Value | None = self.values.get(part.name)
        if part.name in self.defined and part.subscript in ("@", "*") and value is not None:
            value = _split_defined(value)
        if isinstance(value, list) and part.subscript not in ("@", "*"):
            index = int(part.subscript or 0)
            value = value[index] if index < len(value) else None
        elif part.subscript.isdigit() and value is not None and int(part.subscript) > 0:
            value = None
        empty = value is not None and not value
        if part.operator and not part.operator.endswith("?"):
            missing = value is None or (empty and part.operator.startswith(":"))
            if part.operator.endswith("+"):
                if value is None or not _is_set(value, part.operator):
                    return () if value is not None and missing else self._optional(part)
                return self._referred(self.operand(part.operand), part.span)
            if missing:
                line = self.line(start)
                default = self.operand(part.operand)
                default = tuple(replace(piece, from_default=piece.from_default or line) for piece in default)
                if part.operator.endswith("=") and part.name.isidentifier():
                    self.set(part.name, tuple(replace(piece, quoted=False) for piece in default), line)
                return self._referred(default, part.span)
        if value is None and part.name in self.values and not part.operator:  # an element that the array lacks
            return ()
        if value is None or (empty and part.operator == ":?"):
            return self._unset(part, "is not set in the script")
        if isinstance(value, list):
            return [self._referred(entry, part.span) for entry in value]
        return self._referred(value, part.span)

    def _optional(self, part: Parameter) -> Field:
        """Return `${name:+word}` of a variable that may be set or not as a text that is not known."""
        word = field_text(self.operand(part.operand))
        unknown = Unknown(part.name, self.line(part.span[0]), "may be set or not", (word,) if word else ())
        return (Piece(self.source[slice(*part.span)], part.span, unknown=unknown, quoted=part.quoted),)

    def _unset(self, part: Parameter, cause: str, is_variable: bool = True) -> Field:
        """Return the reference to a variable as a text that is not known."""
        name = f"${part.name}" if not part.name.isidentifier() else part.name
        unknown = Unknown(name, self.line(part.span[0]), cause, is_variable=is_variable)
        quoted = part.quoted and not _is_many(part)
        return (Piece(self.source[slice(*part.span)], part.span, unknown=unknown, quoted=quoted),)

    def _referred(self, value: Field, span: Span) -> Field:
        return self.count(tuple(piece.through(span) for piece in value))

    def count(self, value: Field) -> Field:
        """Count the pieces that were made, and refuse a script that makes very many."""
        self._pieces += len(value)
        self._letters += sum(len(piece.text) + len(piece.references) for piece in value)
        if self._pieces > MAX_PIECES or self._letters > MAX_LETTERS:
            raise ConfigError(
                f"{self.name}: its variables expand to more text than a launch script has; give the flags behind --"
            )
        return value


def _as_one_word(pieces: Field) -> Field:
    return tuple(replace(piece, quoted=True) if piece.unknown else piece for piece in pieces)


def _is_many(part: Text | Parameter | Arithmetic | Opaque) -> bool:
    """Return True for `$@`, `$*` and all words of an array, which are several words even in quotes."""
    return isinstance(part, Parameter) and (part.name in ("@", "*") or part.subscript in ("@", "*"))


def _is_argument(name: str) -> bool:
    """Return True for `$1`, `$2`, ..., `$@`, `$*` and `$#`."""
    return (name.isdigit() and name != "0") or name in ("@", "*", "#")


def _is_set(value: Value, operator: str) -> bool:
    """Return True if a variable is set for sure; with a colon in the operator, to a text that is not empty."""
    fields = value if isinstance(value, list) else [value]
    pieces = [piece for entry in fields for piece in entry]
    if any(piece.unknown for piece in pieces):
        return any(piece.text for piece in pieces if not piece.unknown)
    return bool(pieces) or not operator.startswith(":")


def _split_defined(value: Value) -> Value:
    """Return the words of a value that the user gave for an array."""
    if isinstance(value, list):
        return value
    return [(Piece(word, NOWHERE, (NOWHERE,)),) for word in field_text(value).split()]
