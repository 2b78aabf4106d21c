"""The flags of a launch with their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mindspeed_cp.errors import ConfigError

MANY = -1  # arity of a flag that takes all words up to the next flag
ANY = -2  # the same, or no word at all


@dataclass(frozen=True)
class Flag:
    """A flag with its values.

    Attributes:
        name: with its dashes.
        values: words behind it, or the text behind `=`.
        words: the flag as it stands; the first word is the name or begins with it.
        rest: words behind it that are not its own.
    """

    name: str
    values: tuple[str, ...]
    words: tuple[str, ...]
    rest: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The flag and its values, as on the command line."""
        return " ".join(self.words)


def is_flag(word: str) -> bool:
    """Return True if a word begins with two dashes and a name."""
    return word.startswith("--") and len(word) > 2


def read_flags(words: Sequence[str], arities: Mapping[str, int]) -> tuple[list[str], list[Flag]]:
    """Return the words before the first flag, and the flags.

    Args:
        words: words behind the name of the training script.
        arities: number of values of each flag that is converted; other flags take all words up to the next flag.

    Raises:
        ConfigError: a flag that is converted lacks a value.
    """
    before: list[str] = []
    flags: list[Flag] = []
    rests: list[list[str]] = []
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not is_flag(word):
            (rests[-1] if rests else before).append(word)
            continue
        name, equals, value = word.partition("=")
        arity = arities.get(name, ANY)
        end = position
        limit = len(words) if arity < 0 else min(len(words), position + arity)
        while not equals and end < limit and not is_flag(words[end]) and words[end] != "--":
            end += 1
        values = tuple(words[position:end])
        if not equals and len(values) < (1 if arity == MANY else arity):
            raise ConfigError(f"{name}: has no value; give one, or leave the flag out")
        flags.append(Flag(name, (value,) if equals else values, (word, *values)))
        rests.append([])
        position = end
    return before, [replace(flag, rest=tuple(rest)) for flag, rest in zip(flags, rests, strict=True)]
