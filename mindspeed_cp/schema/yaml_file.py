"""Settings files: YAML with the line of every key, and `section.key=value` overrides laid over it.

PyYAML reads YAML 1.1, in which `1e-3` is text and a repeated key silently wins over the first.  Both surprise people
who write training settings, so this reader takes YAML 1.2 numbers and refuses repeated keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from mindspeed_cp.config_errors import SettingError
from mindspeed_cp.errors import ConfigError

_Made = TypeVar("_Made")


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 floats (`1e-3`, `5E6`); everything else as YAML 1.1 has it."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag != "tag:yaml.org,2002:float"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
    ),
    list("-+0123456789."),
)


@dataclass(frozen=True)
class SettingsFile:
    """What a YAML file says, and where: `lines["train.lr"]` is the 1-based line of that key."""

    name: str
    data: dict[str, Any]
    lines: Mapping[str, int] = field(default_factory=dict)

    def where(self, key: str) -> str:
        """`file:line` of the nearest enclosing key that the file has, or `file` alone."""
        parts = key.split(".")
        for size in range(len(parts), 0, -1):
            line = self.lines.get(".".join(parts[:size]))
            if line is not None:
                return f"{self.name}:{line}" if line > 0 else "--set"
        return self.name


def read_settings_file(path: str | Path) -> SettingsFile:
    """Read a YAML mapping.  ConfigError with the place if it is missing, unreadable, not YAML or not a mapping."""
    name = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"{name}: no such file; give the path of a YAML settings file, for example configs/quickstart.yaml"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{name}: cannot be read: {reason}") from None
    return parse_settings(text, name)


def parse_settings(text: str, name: str) -> SettingsFile:
    """Parse YAML text; `name` is what errors call it."""
    lines: dict[str, int] = {}
    data = _load(text, name, lines)
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(f"{name}:1: must be a mapping of sections to keys, not {_kind(data)}")
    return SettingsFile(name, data, lines)


def override(base: SettingsFile, overrides: Iterable[str]) -> SettingsFile:
    """`base` with each `section.key=value` laid over it; the value is YAML: `true`, `3`, `1e-3`, `null`, `[1, 2]`."""
    data = _copy(base.data)
    lines = dict(base.lines)
    for text in overrides:
        key, equals, value = text.partition("=")
        parts = [part.strip() for part in key.split(".")]
        if not equals or not all(parts):
            raise ConfigError(f"--set {text!r}: must be KEY=VALUE with a dotted key, for example --set train.lr=0.001")
        target: Any = data
        for depth, part in enumerate(parts[:-1]):
            if target.get(part) is None:
                target[part] = {}
            target = target[part]
            if not isinstance(target, dict):
                raise ConfigError(f"--set {text!r}: {'.'.join(parts[: depth + 1])} is a value, not a section")
        target[parts[-1]] = _load(value, f"--set {text!r}", {})
        for depth in range(len(parts)):
            lines[".".join(parts[: depth + 1])] = 0
    return SettingsFile(base.name, data, lines)


def in_file(file: SettingsFile, prefix: str, make: Callable[[], _Made]) -> _Made:
    """Call `make`; an error of it about a key is told with the place of that key in the file.

    Args:
        file: where the values come from.
        prefix: the section of the keys that `make` knows, with a dot, or nothing.
        make: reads the values.
    """
    try:
        return make()
    except SettingError as error:
        error = error.inside(prefix)
        raise ConfigError(f"{file.where(error.key)}: {error}{_other_end(file, error)}") from None


def _other_end(file: SettingsFile, error: SettingError) -> str:
    """Where the key stands that the wrong one does not agree with, and how the command line changes the file's."""
    if error.other is None:
        return ""
    stands = ""
    if error.other in file.lines:
        stands = f"; {error.other} {'stands in' if file.lines[error.other] else 'is from'} {file.where(error.other)}"
    given = [key for key in (error.key, error.other) if file.lines.get(key) == 0]  # by --set
    cure = next((key for key in (error.other, error.key) if key not in given and key in error.agreeing), None)
    if len(given) != 1 or cure is None:
        return stands
    return f"{stands}; on the command line: --set {cure}={error.agreeing[cure]}"


def _load(text: str, name: str, lines: dict[str, int]) -> Any:
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _index(node, "", name, lines)
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark is not None else name
        problem = " ".join(filter(None, (error.context, error.problem))).replace("\n", " ")
        raise ConfigError(f"{at}: not valid YAML: {problem}") from None
    except yaml.reader.ReaderError as error:
        at = f"{name}:{text.count(chr(10), 0, error.position) + 1}"
        raise ConfigError(f"{at}: not valid YAML: the character U+{error.character:04X} is not allowed") from None
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError(f"{name}: not valid YAML: nested too deeply, or refers to itself") from None
    except ValueError as error:  # a date such as 2026-13-45
        raise ConfigError(f"{name}: not valid YAML: {error}") from None


def _index(node: yaml.Node, prefix: str, name: str, lines: dict[str, int]) -> None:
    """Fill `lines`; refuse keys that are not text and keys given twice."""
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.tag == "tag:yaml.org,2002:merge":
            continue
        if key.tag != "tag:yaml.org,2002:str":
            shown = repr(key.value) if isinstance(key, yaml.ScalarNode) else "that is a list or a mapping"
            raise ConfigError(f"{name}:{line}: the key {shown} must be text; put it in quotes if it is meant as a name")
        if key.value in seen:
            raise ConfigError(
                f"{name}:{line}: {prefix}{key.value} is given twice (first in line {seen[key.value]}); keep one of them"
            )
        seen[key.value] = line
        lines[prefix + key.value] = line
        _index(value, f"{prefix}{key.value}.", name, lines)


def _copy(value: Any) -> Any:
    return {key: _copy(item) for key, item in value.items()} if isinstance(value, dict) else value


def _kind(value: Any) -> str:
    return {list: "a list", str: "text", bool: "true or false"}.get(type(value), "a number")
