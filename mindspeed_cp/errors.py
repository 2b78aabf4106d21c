"""Errors that users catch.  Each message is one line: the fault, its value, the valid values, and the alternative."""

from __future__ import annotations

import re
from pathlib import Path

MESSAGE_LIMIT = 2000  # characters of a message; a longer one loses its middle
WORD_LIMIT = 300  # characters without a space, as of a value or a path
_LONG_WORD = re.compile(rf"\S{{{WORD_LIMIT + 1},}}")


def shortened(text: str, limit: int = 80) -> str:
    """Return a text of at most `limit` characters: its beginning and its end, where it is longer."""
    if len(text) <= limit:
        return text
    end = (limit - 3) // 3
    return f"{text[: limit - 3 - end]}...{text[len(text) - end :]}"


#: A checkout and a source distribution have docs/ and configs/ beside it; a wheel has some of their files inside.
_PACKAGE = Path(__file__).resolve().parent
_FILE = re.compile(r"\b(?:docs/\w+\.md|configs/(reference|quickstart)\.yaml)")


def files_at_hand(text: str) -> str:
    """Return a text about files of the repository with names under which its reader has them."""
    if (_PACKAGE.parent / "docs" / "start.md").is_file():
        return text
    return _FILE.sub(
        lambda name: (
            str(_PACKAGE / "config" / f"{name[1]}.yaml") if name[1] else f"{name[0]} of the source distribution"
        ),
        text,
    )


#: How to get a package that is the user's own to choose (docs/versions.md).
INSTALL = {
    "torch": "pip install 'torch>=2.7', or the release of your accelerator; without it: plan, simulate, convert, and "
    "report of finished runs",
    "megatron": "pip install megatron-core, or the release that you use",
    "psutil": "pip install psutil",
    "einops": "pip install einops",
}


def missing_package(error: ImportError) -> str | None:
    """Return one line about a package that is not installed, and how to get it; None if it is not one of INSTALL."""
    package = (error.name or "").split(".")[0]
    if not isinstance(error, ModuleNotFoundError) or package not in INSTALL:
        return None
    return f"{package} is not installed: {INSTALL[package]}"


class _Bounded(Exception):
    """An error whose message stays readable whatever text from outside stands in it."""

    def __init__(self, text: str = "") -> None:
        text = _LONG_WORD.sub(lambda word: shortened(word[0], WORD_LIMIT), text)
        super().__init__(shortened(files_at_hand(text), MESSAGE_LIMIT))


class ConfigError(_Bounded, ValueError):
    """Invalid setting, argument or batch; raised when it is read, before anything runs."""


class PlanError(_Bounded, ValueError):
    """Wrong plan: it would not compute exact attention, or would not run.  Names the rank, step and tile or message."""


class PeerError(_Bounded, RuntimeError):
    """A peer died or did not answer in time.  Names the peer, the step and the operation that waited for it."""


class DivergenceError(_Bounded, RuntimeError):
    """The loss or the gradient of a step is not finite, or the loss is a spike, and the run's policy is to stop.  Names
    the step, the rank and the layer."""


class OperatorError(_Bounded, RuntimeError):
    """The attention operator of a device refused a call, for example because a library is too old, or a device makes no
    calls any more.  Names the call or the step, the cause and the remedy."""


class CorruptionError(_Bounded, RuntimeError):
    """A rank holds or computed wrong numbers: replicas differ, or attention is not what the reference computes.  Names
    the rank and the place."""
