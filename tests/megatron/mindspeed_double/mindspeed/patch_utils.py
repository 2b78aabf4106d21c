"""Replaces attributes of Megatron, and of all modules that imported them under the same name."""

import importlib
import sys
from typing import Any

_ABSENT = object()
_REPLACED: list[tuple[Any, str, Any]] = []


def replace(name: str, new: Any) -> None:
    """Put `new` in the place of an attribute; a function whose name ends in "wrapper" is called with what it wraps."""
    words = name.split(".")
    owner = importlib.import_module(".".join(word for word in words[:-1] if word.islower()))
    for word in (word for word in words[:-1] if not word.islower()):
        owner = getattr(owner, word)
    old = getattr(owner, words[-1], None)
    value = new(old) if new.__name__.endswith("wrapper") else new
    _put(owner, words[-1], value)
    for module in list(sys.modules.values()):
        if old is not None and getattr(module, "__dict__", {}).get(words[-1]) is old:
            _put(module, words[-1], value)


def undo() -> None:
    while _REPLACED:
        owner, name, old = _REPLACED.pop()
        if old is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, old)


def _put(owner: Any, name: str, value: Any) -> None:
    _REPLACED.append((owner, name, vars(owner).get(name, _ABSENT)))
    setattr(owner, name, value)
