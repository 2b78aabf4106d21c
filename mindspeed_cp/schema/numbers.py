"""Checks of integers and of objects that the caller passes."""

from __future__ import annotations

import math

import numpy as np

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.schema.messages import short_repr

#: Upper limit of counts (heads, channels, rounds), so that products of two fit into 64 bits.
MAX_SIZE = 10**9


def is_int(value: object) -> bool:
    """Return True for Python and NumPy integers, False for bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def check_type(name: str, value: object, kinds: type | tuple[type, ...], valid: str = "") -> None:
    """Raise ConfigError unless the value is of one of these classes; `valid` describes them, if not by their names."""
    if not isinstance(value, kinds):
        names = valid or " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
        raise ConfigError(f"{name} is {short_repr(value)}; valid: {names}")


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def describe_divisors(ranks: int) -> str:
    """Return "a divisor of the 6 ranks: 1, 2, 3, 6"."""
    return f"a divisor of the {ranks} ranks: {', '.join(map(str, divisors(ranks)))}"


def check_count(
    name: str, value: object, least: int = 1, most: int | None = MAX_SIZE, what: str = "a whole number"
) -> int:
    """Return an integer of Python; raise ConfigError unless the value is one of Python or NumPy from `least` to `most`
    (None: no upper limit)."""
    if not is_int(value) or value < least or (most is not None and value > most):  # type: ignore[operator]
        limit = "" if most is None else f", at most {most}"
        raise ConfigError(f"{name} is {short_repr(value)}; valid: {what}, {least} or more{limit}")
    return int(value)  # type: ignore[call-overload]


def check_divisor(name: str, value: object, ranks: int) -> None:
    """Raise ConfigError unless the value is a divisor of the number of ranks."""
    if not is_int(value) or value < 1 or ranks % value:  # type: ignore[operator]
        raise ConfigError(f"{name} is {short_repr(value)}; valid: {describe_divisors(ranks)}")
