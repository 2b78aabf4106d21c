"""The flags of a launch: tokens with their place in the script, and flags with their values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mindspeed_cp.convert.shell.words import Field, Unknown, field_text
from mindspeed_cp.errors import ConfigError

MANY = -1  # arity of a flag that takes all words up to the next flag


@dataclass(frozen=True)
class Token:
    """A word of the command line.

    Attributes:
        text: the word; of a value that is not known, what the script writes for it.
        line: 1-based line of the script where it stands or is referred to; None without a script.
        pieces: its text and how it came there from the script; empty without a script.
    """

    text: str
    line: int | None = None
    pieces: Field = ()

    @property
    def unknowns(self) -> tuple[Unknown, ...]:
        """The causes why the word is not known; empty for a known word."""
        return tuple(piece.unknown for piece in self.pieces if piece.unknown is not None)

    @property
    def default_line(self) -> int | None:
        """Line of the default from which the word comes, as in ${CP:-2}; None for other words."""
        return next((piece.from_default for piece in self.pieces if piece.from_default is not None), None)

    @property
    def file_line(self) -> int | None:
        """Line of `source file` behind which the word's text may be another one; None for other words."""
        return next((piece.before_file for piece in self.pieces if piece.before_file is not None), None)

    @property
    def is_flag(self) -> bool:
        """True if the word begins with two dashes, which stand in the script."""
        known = not self.pieces or self.pieces[0].unknown is None
        return known and self.text.startswith("--") and len(self.text) > 2

    @classmethod
    def from_field(cls, pieces: Field, line: int) -> Token:
        """Return the token of a word after expansion."""
        return cls(field_text(pieces), line, pieces)


@dataclass(frozen=True)
class Flag:
    """A flag with its values.

    Attributes:
        name: with its dashes.
        values: words behind it, or the text behind `=`.
        tokens: its words as they stand; the first is the name or begins with it.
        rest: words behind it that are not its own.
    """

    name: str
    values: tuple[str, ...]
    tokens: tuple[Token, ...]
    rest: tuple[Token, ...] = ()

    @property
    def text(self) -> str:
        """The flag and its values, as on the command line."""
        return " ".join(token.text for token in self.tokens)

    @property
    def line(self) -> int | None:
        """Line of the script; None without a script."""
        return self.tokens[0].line

    @property
    def unknowns(self) -> tuple[Unknown, ...]:
        """The causes why a value is not known."""
        return tuple(unknown for token in self.tokens for unknown in token.unknowns)


def read_flags(tokens: Sequence[Token], arities: Mapping[str, int]) -> tuple[list[Token], list[Flag]]:
    """Return the words before the first flag, and the flags.

    Args:
        tokens: words behind the name of the training script.
        arities: number of values of each flag that is converted; other flags take all words up to the next flag.

    Raises:
        ConfigError: a flag that is converted lacks a value.
    """
    words: list[Token] = []
    flags: list[Flag] = []
    rests: list[list[Token]] = []
    position = 0
    while position < len(tokens):
        token = tokens[position]
        position += 1
        if not token.is_flag:
            (rests[-1] if rests else words).append(token)
            continue
        name, equals, value = token.text.partition("=")
        arity = arities.get(name, MANY)
        end = position
        limit = len(tokens) if arity == MANY else min(len(tokens), position + arity)
        while not equals and end < limit and not tokens[end].is_flag and tokens[end].text != "--":
            end += 1
        values = tokens[position:end]
        if name in arities and not equals and len(values) < abs(arity):
            raise ConfigError(f"{flag_location(token.line)}{name}: has no value; give one, or leave the flag out")
        texts = (value,) if equals else tuple(entry.text for entry in values)
        flags.append(Flag(name, texts, (token, *values)))
        rests.append([])
        position = end
    return words, [replace(flag, rest=tuple(rest)) for flag, rest in zip(flags, rests, strict=True)]


def flag_location(line: int | None) -> str:
    """Return "line 12: ", or an empty text without a script."""
    return "" if line is None else f"line {line}: "


def word_tokens(words: Iterable[str]) -> tuple[Token, ...]:
    """Return tokens of words that were given on the command line."""
    return tuple(map(Token, words))
