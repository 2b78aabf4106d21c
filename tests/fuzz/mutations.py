"""Random damage to texts, bytes and JSON values; the same for the same generator."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

TEXTS = (
    "", " ", "\n", "\0", "\ud800", "\U0001f600", "é", "$\\frac$", "%s", "{}", "~", "~nobody/x", "..", "/", "null", "true", "nan", "-inf",
    "[", "]", "{", "}", "[[[[", ":", ": ", "- ", "? ", "&a ", "*a", "<<: *a", "!!bool x", "!!timestamp x", "!!int ''", "!!binary x",
    "!!python/object:os.system x", "|\n", "%YAML 9.9\n", "---\n", "'", '"', '"\\ud800"', "#", "\t", ",", "=", "x" * 5000, "9" * 400,
    "1:" * 60 + "1", "2026-13-45", "\x1b[31m", "[" * 300, "{a: " * 120,
)  # fmt: skip
NUMBERS = (
    "0", "-1", "1", "2", "3", "7", "1e400", "-1e-400", "1e9", "2147483648", "9223372036854775808", "0x10",
    "1_0", ".5", "1.5", "nan",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 0.5, -0.0, 1e300, 2**31, 2**63, 10**400, float("nan"), float("inf"), "", "x", "\ud800", "x" * 5000,
    [], {}, [[]], [1, "x"], {"a": 1}, {"": {"": []}}, [0] * 1000,
)  # fmt: skip

DEEP = "a list in a list in a list"  # stands for it until there is a text: json writes none so deep


def text(generator: random.Random, whole: str) -> str:
    """A text with one to four places changed: cut, doubled, moved, or with something hostile put in."""
    for _ in range(generator.randint(1, 4)):
        begin = generator.randint(0, len(whole))
        end = min(len(whole), begin + generator.choice((1, 1, 3, 10, 100)))
        part = whole[begin:end]
        what = generator.randrange(5)
        if what == 0:
            part = ""
        elif what == 1:
            part *= generator.choice((2, 5))
        elif what == 2:
            part = generator.choice(TEXTS)
        elif what == 3:
            part = generator.choice(NUMBERS)
        else:
            other = generator.randint(0, len(whole))
            part = whole[other : other + 20]
        whole = whole[:begin] + part + whole[end:]
    return whole


def content(generator: random.Random, whole: bytes) -> bytes:
    """Bytes with some flipped, removed, doubled or added."""
    damaged = bytearray(whole)
    for _ in range(generator.randint(1, 4)):
        position, what = generator.randint(0, len(damaged)), generator.randrange(4)
        if what == 0 and position < len(damaged):
            damaged[position] ^= 1 << generator.randrange(8)
        elif what == 1:
            del damaged[position : position + generator.choice((1, 4, 1000))]
        elif what == 2:
            damaged[position:position] = damaged[position : position + generator.choice((1, 8, 100))]
        else:
            damaged[position:position] = generator.randbytes(generator.choice((1, 2, 8)))
    return bytes(damaged)


def json_text(generator: random.Random, whole: Any) -> str:
    """The text of JSON values of which one or two are replaced, removed or buried deep."""
    depth = generator.choice((3, 200, 5000, 100_000))
    return json.dumps(_value(generator, whole)).replace(json.dumps(DEEP), "[" * depth + "0" + "]" * depth)


def _value(generator: random.Random, whole: Any) -> Any:
    whole = copy.deepcopy(whole)
    for _ in range(generator.randint(1, 2)):
        holder, key = whole, None
        while True:
            inner = holder if key is None else holder[key]
            if not isinstance(inner, (dict, list)) or not inner or (key is not None and generator.random() < 0.2):
                break
            holder, key = inner, generator.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        if key is None:
            return copy.deepcopy(generator.choice(VALUES))
        what = generator.randrange(6)
        if what == 0:
            del holder[key]
        elif what == 1:
            holder[key] = DEEP
        else:
            holder[key] = copy.deepcopy(generator.choice(VALUES))
    return whole
