"""Errors between ranks, as JSON, never as pickles: to read one calls no constructor but of the errors listed here.

::

    ["error", "ConfigError", "text"]   ["os error", 2, "No such file or directory", "corpus.bin"]
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import DistError

from mindspeed_cp import errors

#: An error arrives as the first of its classes that is here; one of another class as a RuntimeError that names it.
_ERRORS: dict[str, type[BaseException]] = {
    kind.__name__: kind
    for kind in (
        errors.ConfigError,
        errors.PeerError,
        errors.DivergenceError,
        errors.CorruptionError,
        errors.OperatorError,
        errors.PlanError,
        DistError,
        torch.OutOfMemoryError,
        MemoryError,
        AssertionError,
        KeyError,
        TypeError,
        ValueError,
        RuntimeError,
    )
}


def encode_error(error: BaseException) -> list[Any]:
    """Return an error as JSON: a tag and what makes it up."""
    if isinstance(error, OSError) and error.errno is not None:
        filename = None if error.filename is None else str(error.filename)
        return ["os error", error.errno, str(error.strerror), filename]
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    for kind in type(error).__mro__:
        if kind in _ERRORS.values():
            return ["error", kind.__name__, text]
    return ["error", "RuntimeError", f"{type(error).__name__}: {text}"]


def decode_error(name: str, text: str) -> BaseException:
    """Return the error of the tag "error"."""
    return _ERRORS[name](text)


def decode_os_error(number: int, text: str, filename: str | None) -> OSError:
    """Return the error of the tag "os error"."""
    return OSError(number, text) if filename is None else OSError(number, text, filename)


def error_to_bytes(error: BaseException) -> bytes:
    """Return an error as bytes, which :func:`error_from_bytes` reads."""
    return json.dumps(encode_error(error), separators=(",", ":")).encode()


def error_from_bytes(content: bytes) -> BaseException:
    """Return the error of :func:`error_to_bytes`; raise ValueError for what no rank writes."""
    try:
        tag, *parts = json.loads(content)
        readers: dict[str, Callable[..., BaseException]] = {"error": decode_error, "os error": decode_os_error}
        return readers[tag](*parts)
    except (ValueError, TypeError, KeyError) as error:
        text = " ".join(str(error).split())[:200]
        raise ValueError(f"a message of another rank is not an error that ranks write ({text})") from None
