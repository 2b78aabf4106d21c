"""Schema of a rank's file of a traced step.

Everything that is used later is checked here, so that a damaged file gives one line with its path.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from mindspeed_cp.algorithms import ALGORITHMS, algorithm_options
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout.documents import MAX_TOKENS
from mindspeed_cp.plan import RANK_LIMIT
from mindspeed_cp.schema.base import SETTING_LIMIT
from mindspeed_cp.schema.messages import bad_value, format_value

#: No time in microseconds, and no number of bytes or messages, is larger in earnest: sums of them stay finite.
NUMBER_LIMIT = 10**18


def _check_total(lengths: list[int]) -> list[int]:
    if sum(lengths) > MAX_TOKENS:
        raise ValueError(f"documents have at most {MAX_TOKENS:,} tokens")
    return lengths


def _check_plan(plan: tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    algorithm, options = plan
    if algorithm not in ALGORITHMS or not set(options) <= set(algorithm_options(algorithm)):
        raise ValueError("must be an algorithm and its options")
    return plan


Count: TypeAlias = Annotated[int, Field(ge=0, le=SETTING_LIMIT)]
Rank: TypeAlias = Annotated[int, Field(ge=0, lt=RANK_LIMIT)]
RankCount: TypeAlias = Annotated[int, Field(ge=1, le=RANK_LIMIT)]
Number: TypeAlias = Annotated[int | float, Field(ge=-NUMBER_LIMIT, le=NUMBER_LIMIT)]
Amount: TypeAlias = Annotated[int | float, Field(ge=0, le=NUMBER_LIMIT)]
Lengths: TypeAlias = Annotated[list[Annotated[int, Field(ge=0, le=MAX_TOKENS)]], AfterValidator(_check_total)]
PlanArguments: TypeAlias = Annotated[
    tuple[str, dict[str, bool | int | str]], Field(strict=False), AfterValidator(_check_plan)
]
#: Number of the attention, FLOPs of a token, hidden size, FLOPs of the projections before attention and after it.
Layer: TypeAlias = Annotated[
    tuple[Count, Annotated[Amount, Field(ge=1)], Annotated[Count, Field(ge=1)], Amount, Amount], Field(strict=False)
]


class _Schema(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class _Version(_Schema):
    version: int


class _File(_Schema):
    otherData: dict[str, Any]
    traceEvents: list[Any]


class _Metadata(_Schema):
    step: Annotated[Count, Field(ge=1)]
    first_of_start: bool
    rank: Rank
    ranks: RankCount
    replica: Rank
    replicas: RankCount
    pool: Annotated[tuple[RankCount, RankCount] | None, Field(strict=False)] = None
    device: str
    documents: Annotated[list[Lengths], Field(min_length=1)]
    parents: list[list[int] | None] | None = None
    plans: Annotated[list[PlanArguments], Field(min_length=1)]
    attentions: Annotated[list[dict[str, Any]], Field(min_length=1)]
    layers: Annotated[list[Layer], Field(min_length=1)]
    bytes_per_element: Literal[2, 4]
    gradient_bytes: Amount
    settings: dict[str, Any]


class _Phase(_Schema):
    ph: Literal["X", "M"]


class _Event(_Schema):
    tid: Count
    name: str
    cat: str
    ts: Number
    dur: Amount
    args: dict[str, Any]


class _Message(_Schema):
    sends: bool
    bytes: Amount
    messages: Amount


class _ThreadName(_Schema):
    name: str


class _Thread(_Schema):
    tid: Count
    args: _ThreadName


def read_trace_file(path: Path, name: str, version: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the metadata of a file and its complete events, each with the name of its thread.

    Args:
        path: the file.
        name: key of the metadata in "otherData".
        version: required version.

    Raises:
        ConfigError: the file cannot be read, is damaged, or has another version.
    """
    try:
        content = _parse_json(path)
        _check(_File, content, "")
        metadata = content["otherData"].get(name)
        location = f"otherData.{name}"
        _check(_Version, metadata, location)
        if metadata["version"] == version:
            _check(_Metadata, metadata, location)
            return metadata, _complete_events(content["traceEvents"])
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except RecursionError:
        raise damaged_file_error(path, "it is nested too deeply") from None
    except (ConfigError, ValueError) as error:
        raise damaged_file_error(path, str(error)) from None
    raise ConfigError(
        f"{path}: is of version {metadata['version']} of these traces, this program reads {version}; trace again"
    )


def damaged_file_error(path: Path, problem: str) -> ConfigError:
    """Return the error for a damaged file."""
    return ConfigError(f"{path}: not a valid step trace: {problem}; remove it, and trace again")


def _parse_json(path: Path) -> Any:
    """Return the JSON of a file; raise ValueError with one line for NaN and for text that is not UTF-8."""
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text, parse_constant=_refuse_constant)
        if "\\ud" in text.lower():  # halves of characters; json takes them alone too
            json.dumps(content, ensure_ascii=False).encode()
    except UnicodeError:
        raise ValueError("it is not text in UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON at line {error.lineno}, column {error.colno}: {error.msg}") from None
    except ValueError as error:  # NaN, or more digits than Python reads, of which it says more than one needs
        raise ValueError(str(error).partition(";")[0]) from None
    return content


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a number of JSON")


def _complete_events(events: list[Any]) -> list[dict[str, Any]]:
    complete, threads = [], {}
    for number, event in enumerate(events):
        location = f"traceEvents[{number}]"
        _check(_Phase, event, location)
        if event["ph"] == "X":
            _check(_Event, event, location)
            if "sends" in event["args"]:
                _check(_Message, event["args"], f"{location}.args")
            complete.append((location, event))
        elif event.get("name") == "thread_name":
            _check(_Thread, event, location)
            threads[event["tid"]] = event["args"]["name"]
    for location, event in complete:
        if event["tid"] not in threads:
            rule = f"must be that of a thread with a name: {format_value([*threads])}"
            raise bad_value(f"{location}.tid", event["tid"], rule)
    return [{**event, "thread": threads[event["tid"]]} for _, event in complete]


def _check(schema: type[_Schema], value: Any, location: str) -> None:
    """Raise ConfigError with the location of the first invalid value."""
    try:
        schema.model_validate(value)
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        keys = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in details["loc"])
        rule = details["msg"].removeprefix("Value error, ")
        key = f"{location}{keys}".lstrip(".") or "all of it"
        raise bad_value(key, details["input"], rule[0].lower() + rule[1:]) from None
