"""Options of an algorithm, read from the signature and the docstring of its builder.

The keyword-only arguments of a builder declare its options: the annotation gives type and limits, the default value the
default, and the line in the docstring's ``Args`` section the description::

    def build_direct(documents, kv_documents, topology, attention, *,
                     prefetch: Annotated[int, AtLeast(1, "rounds")] = 1,
                     layout: LayoutName = "zigzag") -> Plan:
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.schema.numbers import MAX_SIZE, describe_divisors, is_int

#: Positional arguments of every builder.
PROBLEM = ("documents", "kv_documents", "topology", "attention")


@dataclass(frozen=True)
class AtLeast:
    """Lower limit of an integer option; `unit` is a plural noun."""

    value: int
    unit: str = ""


@dataclass(frozen=True)
class DividesRanks:
    """The option is a divisor of the number of ranks."""


@dataclass(frozen=True)
class FromModel:
    """A training takes the value of the option from the sizes of its model."""


@dataclass(frozen=True)
class AlgorithmOption:
    """One option of an algorithm.

    Attributes:
        name: keyword argument of the builder.
        type: bool, int, float or str.
        default: value if the option is not given.
        choices: valid values; empty if there is no list of them.
        optional: True if None is valid.
        description: line of the builder's docstring.
        minimum: smallest valid integer; None without a lower limit.
        unit: plural noun of what an integer counts; may be empty.
        divides_ranks: the option is a divisor of the number of ranks.
        from_model: a training takes the value from the sizes of its model.
    """

    name: str
    type: type
    default: Any
    choices: tuple[Any, ...]
    optional: bool
    description: str
    minimum: int | None = None
    unit: str = ""
    divides_ranks: bool = False
    from_model: bool = False

    def valid_values(self, ranks: int | None = None) -> str:
        """Return the valid values as text; None: for any number of ranks."""
        if self.choices:
            return f"one of {', '.join(map(str, self.choices))}"
        if self.divides_ranks:
            return "a divisor of the ranks" if ranks is None else describe_divisors(ranks)
        number = f"a whole number of {self.unit}" if self.unit else "an integer"
        limit = "" if self.minimum is None else f" >= {self.minimum}"
        return {int: number + limit, float: f"a number{limit}", bool: "true or false"}.get(self.type, "text")

    def with_words(self, value: Any) -> Any:
        """Return a value, true and false as on and off where these are choices: YAML reads a bare off as false."""
        word = {True: "on", False: "off"}[value] if isinstance(value, bool) else None
        return word if word in self.choices else value

    def problem(self, value: object, ranks: int | None = None) -> str | None:
        """Return the valid values on this number of ranks if `value` is none of them, else None; without a number, if
        it is valid on no number of ranks."""
        number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
        valid = {int: is_int(value), float: number}.get(self.type, isinstance(value, self.type))
        if valid and self.choices:
            valid = value in self.choices
        if valid and self.type in (int, float):
            valid = (self.minimum is None or value >= self.minimum) and abs(value) <= MAX_SIZE  # type: ignore
            too_large = not valid and abs(value) > MAX_SIZE  # type: ignore
            if too_large:
                return f"{self.valid_values(ranks)}, at most {MAX_SIZE}"
        if valid and self.divides_ranks and ranks is not None:
            valid = ranks % value == 0  # type: ignore
        return None if valid or (value is None and self.optional) else self.valid_values(ranks)


def read_options(builder: Callable[..., Any]) -> dict[str, AlgorithmOption]:
    """Return the options that a builder declares, by name.

    Raises:
        ConfigError: the signature is not that of a builder, or an option has no type, default or description.
    """
    where = f"builder {getattr(builder, '__name__', builder)!r}"
    parameters = list(inspect.signature(builder).parameters.values())
    if tuple(parameter.name for parameter in parameters[: len(PROBLEM)]) != PROBLEM:
        raise ConfigError(
            f"{where}: valid: first arguments {', '.join(PROBLEM)}, then options as keyword-only arguments"
        )
    hints = typing.get_type_hints(builder, include_extras=True)
    descriptions = _descriptions(inspect.getdoc(builder) or "")
    options = {}
    for parameter in parameters[len(PROBLEM) :]:
        name = parameter.name
        if parameter.kind is not parameter.KEYWORD_ONLY or parameter.default is parameter.empty or name not in hints:
            raise ConfigError(f"{where}: option {name!r}: valid: a keyword-only argument with a type and a default")
        if name not in descriptions:
            raise ConfigError(f"{where}: option {name!r} has no line in the docstring's Args; valid: '{name}: text'")
        kind, choices, optional, limits = _read_type(where, name, hints[name])
        least = next((limit for limit in limits if isinstance(limit, AtLeast)), None)
        divides_ranks = any(isinstance(limit, DividesRanks) for limit in limits)
        options[name] = AlgorithmOption(
            name, kind, parameter.default, choices, optional, descriptions[name],
            minimum=least.value if least is not None else 1 if divides_ranks else None,
            unit="" if least is None else least.unit,
            divides_ranks=divides_ranks,
            from_model=any(isinstance(limit, FromModel) for limit in limits),
        )  # fmt: skip
    return options


def _read_type(where: str, name: str, hint: Any) -> tuple[type, tuple[Any, ...], bool, tuple[Any, ...]]:
    """Return type, choices, whether None is valid, and limits of an annotation."""
    limits: tuple[Any, ...] = ()
    optional = False
    while typing.get_origin(hint) in (typing.Annotated, typing.Union, types.UnionType):
        # In either order: Python 3.10 puts Optional around what is annotated and has the default None.
        if typing.get_origin(hint) is typing.Annotated:
            hint, *extras = typing.get_args(hint)
            limits += tuple(extras)
            continue
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        optional = optional or len(members) < len(typing.get_args(hint))
        hint = members[0] if len(members) == 1 else None
    choices: tuple[Any, ...] = ()
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        hint = type(choices[0])
    if hint not in (bool, int, float, str):
        raise ConfigError(
            f"{where}: option {name!r}: valid types: bool, int, float, str, Literal[...], each also | None"
        )
    return hint, choices, optional, limits


def _descriptions(docstring: str) -> dict[str, str]:
    """Return the text for each argument in the Args section of a docstring, on one line."""
    section = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)*)", docstring, re.MULTILINE)
    entries: dict[str, str] = {}
    names: list[str] = []
    for line in section.group(1).splitlines() if section else []:
        entry = re.match(r" {4}(\w+(?:, \w+)*): (.*)", line)
        if entry:
            names = entry.group(1).split(", ")
            entries |= dict.fromkeys(names, entry.group(2).strip())
        elif line.strip():
            entries |= {name: f"{entries[name]} {line.strip()}" for name in names}
    return entries
