"""A rank's file of a traced step as it is read: whatever of it is used later is checked here, so that a damaged file is
one line with its path, and not the error of some figure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mindspeed_cp.config_base import LARGE
from mindspeed_cp.config_errors import bad_value, show
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout.documents import MAX_TOKENS
from mindspeed_cp.plan import ALGORITHMS, MOST_RANKS, algorithm_options

#: No time in microseconds, and no number of bytes or messages, is larger in earnest: sums of them stay finite.
MOST = 10**18


class _Kind(NamedTuple):
    """What a value must be, in words, and whether one is it."""

    words: str
    holds: Callable[[Any], bool]


def _whole(least: int, most: int) -> _Kind:
    return _Kind(f"a whole number from {least} to {most:,}", lambda x: type(x) is int and least <= x <= most)


def _number(least: int) -> _Kind:
    return _Kind(f"a number from {least:g} to {MOST:g}", lambda x: type(x) in (int, float) and least <= x <= MOST)


def _all(values: Any, kind: _Kind) -> bool:
    return isinstance(values, list) and len(values) > 0 and all(map(kind.holds, values))


_TEXT = _Kind("text", lambda x: isinstance(x, str))
_TRUTH = _Kind("true or false", lambda x: isinstance(x, bool))
_LIST = _Kind("a list", lambda x: isinstance(x, list))
_OBJECT = _Kind("an object", lambda x: isinstance(x, dict))
_LENGTHS = _Kind("lengths", lambda x: x == [] or (_all(x, _whole(0, MAX_TOKENS)) and sum(x) <= MAX_TOKENS))
_OF_LAYER = _whole(0, LARGE), _number(1), _whole(1, LARGE), _number(0), _number(0)
_PLAN = _Kind(
    "an algorithm and its options",
    lambda x: (
        isinstance(x, list)
        and len(x) == 2
        and isinstance(x[0], str)
        and x[0] in ALGORITHMS
        and isinstance(x[1], dict)
        and set(x[1]) <= set(algorithm_options(x[0]))
        and all(isinstance(value, (int, str)) for value in x[1].values())
    ),
)
_LAYER = _Kind(
    "a layer",
    lambda x: (
        isinstance(x, list) and len(x) == len(_OF_LAYER) and all(kind.holds(x[i]) for i, kind in enumerate(_OF_LAYER))
    ),
)

_ABOUT = {
    "step": _whole(1, LARGE),
    "first_of_start": _TRUTH,
    "rank": _whole(0, MOST_RANKS - 1),
    "ranks": _whole(1, MOST_RANKS),
    "replica": _whole(0, MOST_RANKS - 1),
    "replicas": _whole(1, MOST_RANKS),
    "device": _TEXT,
    "documents": _Kind("a list of micro-batches, each the lengths of its documents", lambda x: _all(x, _LENGTHS)),
    "plans": _Kind("a list of [algorithm, options], one for each micro-batch", lambda x: _all(x, _PLAN)),
    "attentions": _Kind("a list of objects", lambda x: _all(x, _OBJECT)),
    "layers": _Kind(
        "a list of [number of its attention, FLOPs of a token, hidden size, FLOPs of the projections before attention, "
        "after it]",
        lambda x: _all(x, _LAYER),
    ),
    "bytes_per_element": _Kind("2 or 4", lambda x: type(x) is int and x in (2, 4)),
    "gradient_bytes": _number(0),
    "settings": _OBJECT,
}
_PHASE = {"ph": _Kind('"X" or "M"', lambda x: x in ("X", "M"))}
_EVENT = {
    "tid": _whole(0, LARGE),
    "name": _TEXT,
    "cat": _TEXT,
    "ts": _number(-MOST),
    "dur": _number(0),
    "args": _OBJECT,
}
_THREAD = {"tid": _whole(0, LARGE), "args": _OBJECT}
_MESSAGE = {"sends": _TRUTH, "bytes": _number(0), "messages": _number(0)}


def read_trace_file(path: Path, name: str, version: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the file is about, and its complete events, each with the name of its thread.

    Args:
        path: of the file.
        name: of what it is about, in its "otherData".
        version: that it must have.

    Raises:
        ConfigError: it cannot be read, is damaged, or is of another version.
    """
    try:
        return _read(path, name, version)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except RecursionError:
        raise damaged(path, "it is nested too deeply") from None


def damaged(path: Path, what: str) -> ConfigError:
    """The error of a file in which something is wrong."""
    return ConfigError(f"{path}: is no trace of a step, or a damaged one: {what}; remove it, and trace again")


def _read(path: Path, name: str, version: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    whole = _parsed(path)
    try:
        _check("", {"": whole}, {"": _OBJECT})
        _check("", whole, {"otherData": _OBJECT, "traceEvents": _LIST})
        _check("otherData.", whole["otherData"], {name: _OBJECT})
        about = whole["otherData"][name]
        at = f"otherData.{name}."
        _check(at, about, {"version": _Kind("a whole number", lambda x: type(x) is int)})
        if about["version"] == version:
            _check(at, about, _ABOUT)
            return about, _events(whole["traceEvents"])
    except ConfigError as error:
        raise damaged(path, str(error)) from None
    raise ConfigError(
        f"{path}: is of version {about['version']} of these traces, this program reads {version}; trace again"
    )


def _parsed(path: Path) -> Any:
    """The file's JSON; without NaN, and without what is no text in UTF-8."""
    try:
        text = path.read_text(encoding="utf-8")
        whole = json.loads(text, parse_constant=_no_number)
        if "\\ud" in text.lower():  # halves of characters; json takes them alone too
            json.dumps(whole, ensure_ascii=False).encode()
    except UnicodeError:
        raise damaged(path, "it is not text in UTF-8") from None
    except json.JSONDecodeError as error:
        raise damaged(path, f"no JSON at line {error.lineno}, column {error.colno}: {error.msg}") from None
    except ValueError as error:  # NaN, or more digits than Python reads, of which it says more than one needs
        raise damaged(path, str(error).partition(";")[0]) from None
    return whole


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number of JSON")


def _events(events: list[Any]) -> list[dict[str, Any]]:
    """The complete ones."""
    found, threads = [], {}
    for number, event in enumerate(events):
        at = f"traceEvents[{number}]"
        _check("", {at: event}, {at: _OBJECT})
        _check(f"{at}.", event, _PHASE)
        if event["ph"] == "X":
            _check(f"{at}.", event, _EVENT)
            if "sends" in event["args"]:
                _check(f"{at}.args.", event["args"], _MESSAGE)
            found.append((at, event))
        elif event.get("name") == "thread_name":
            _check(f"{at}.", event, _THREAD)
            _check(f"{at}.args.", event["args"], {"name": _TEXT})
            threads[event["tid"]] = event["args"]["name"]
    for at, event in found:
        if event["tid"] not in threads:
            raise bad_value(f"{at}.tid", event["tid"], f"must be that of a thread with a name: {show([*threads])}")
    return [{**event, "thread": threads[event["tid"]]} for _, event in found]


def _check(at: str, values: Mapping[str, Any], kinds: Mapping[str, _Kind]) -> None:
    """Raise ConfigError unless all these keys are there, and each is of its kind."""
    for key, kind in kinds.items():
        if key not in values:
            raise ConfigError(f"{at}{key} is missing; it must be {kind.words}")
        if not kind.holds(values[key]):
            raise bad_value(f"{at}{key}" or "all of it", values[key], f"must be {kind.words}")
