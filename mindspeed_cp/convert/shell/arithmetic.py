"""Whole-number expressions of a shell: `$((A * ${B} / 2))`."""

from __future__ import annotations

import re
from collections.abc import Callable

LIMIT = 2**63  # a shell's numbers have 64 bits
MAX_TOKENS = 100

_TOKEN = re.compile(r"\s*(?:([0-9]+)|\$?\{?([A-Za-z_]\w*)\}?|(\*\*|[-+*/%()]))", re.ASCII)
_STEP = re.compile(r"(?:\+\+|--)\s*[$A-Za-z_]|[\w}]\s*(?:\+\+|--)", re.ASCII)  # A++ or --A


class Unsolved(Exception):
    """An expression that is not known; its text is the name of the variable that is not, if there is one."""


def solve(expression: str, value_of: Callable[[str], str | None]) -> int:
    """Return the value of an expression.

    Args:
        expression: sums, products, quotients, remainders and brackets of whole numbers and variables.
        value_of: text of a variable, None if it is not known.

    Raises:
        Unsolved: a variable is not known, or the expression has something else in it.
    """
    if _STEP.search(expression):
        raise Unsolved
    tokens: list[tuple[str, str, str]] = []
    position, expression = 0, expression.strip()
    while position < len(expression):
        match = _TOKEN.match(expression, position)
        if match is None or len(tokens) == MAX_TOKENS:
            raise Unsolved
        tokens.append((match[1] or "", match[2] or "", match[3] or ""))
        position = match.end()
    solver = _Solver(tokens, value_of)
    result = solver.sum()
    if solver.tokens:
        raise Unsolved
    return result


class _Solver:
    def __init__(self, tokens: list[tuple[str, str, str]], value_of: Callable[[str], str | None]) -> None:
        self.tokens, self.value_of = tokens[::-1], value_of

    def sum(self) -> int:
        result = self._product()
        while (sign := self._operator("+", "-")) is not None:
            term = self._product()
            result = _checked(result + term if sign == "+" else result - term)
        return result

    def _product(self) -> int:
        result = self._term()
        while (sign := self._operator("*", "/", "%")) is not None:
            factor = self._term()
            if sign == "*":
                result = _checked(result * factor)
                continue
            if factor == 0:
                raise Unsolved
            quotient = abs(result) // abs(factor) * (1 if (result < 0) == (factor < 0) else -1)
            result = quotient if sign == "/" else result - quotient * factor
        return result

    def _term(self) -> int:
        if self._operator("-") is not None:
            return -self._term()
        if self._operator("(") is not None:
            result = self.sum()
            if self._operator(")") is None:
                raise Unsolved
            return result
        if not self.tokens:
            raise Unsolved
        number, name, _ = self.tokens.pop()
        text = number if number else self.value_of(name) if name else None
        if text is None or not re.fullmatch(r"\s*-?(0|[1-9][0-9]{0,18})\s*", text):  # 010 is octal
            raise Unsolved(name)
        return int(text)

    def _operator(self, *valid: str) -> str | None:
        if self.tokens and self.tokens[-1][2] in valid:
            return self.tokens.pop()[2]
        return None


def _checked(value: int) -> int:
    if abs(value) >= LIMIT:
        raise Unsolved
    return value


_ASSIGNED = re.compile(
    r"([A-Za-z_]\w*)(?:\[[^\]]*\])?\s*(?:(?:[-+*/%&|^]|<<|>>)?=(?!=)|\+\+|--)|(?:\+\+|--)\s*([A-Za-z_]\w*)", re.ASCII
)


def assigned_names(expression: str) -> tuple[str, ...]:
    """Return the variables that an expression sets, as `A = 1`, `A /= 2` and `A++` do."""
    return tuple(dict.fromkeys(match[1] or match[2] for match in _ASSIGNED.finditer(expression)))
