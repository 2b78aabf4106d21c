"""Settings files: YAML with the line of every key, and `section.key=value` overrides.

PyYAML reads YAML 1.1, in which `1e-3` is text, `1:30` is 90 and a repeated key silently replaces the first. This reader
takes the numbers and truth values of YAML 1.2 (core schema), and refuses repeated keys and numbers such as `010`, which
the two versions read differently.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.schema.messages import SettingError, format_value

MAX_FILE_BYTES = 2**17  # PyYAML takes a second for it; no settings file has a tenth
MAX_DIGITS = 40  # of an integer; Python writes none of more than 4,300, in whatever base it was read
MAX_ALIASES = 30  # *name: a page of them can stand for billions of values, so many for 60,000 at most

_Made = TypeVar("_Made")


_TAG = "tag:yaml.org,2002:"
_DECIMAL = re.compile(r"[-+]?[0-9]+")


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2: what is no number, truth value or null of it is text."""

    aliases = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return the next node; refuse many aliases."""
        if self.check_event(yaml.AliasEvent):
            self.aliases += 1
            if self.aliases > MAX_ALIASES:
                problem = f"more than {MAX_ALIASES} aliases (*name); write the values themselves"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Return an integer: 12, 0o14, 0xC; refuse 010, and what has more than MAX_DIGITS."""
        text = str(self.construct_scalar(node))
        digits = text.lstrip("-+")
        if len(digits) > MAX_DIGITS:
            raise yaml.MarkedYAMLError(
                problem=f"a number of more than {MAX_DIGITS} digits", problem_mark=node.start_mark
            )
        if not _DECIMAL.fullmatch(text):
            return int(text, 0)
        if digits[0] == "0" < digits[1:]:
            problem = f"{text} has a leading 0: write {int(text)}, 0o10 for octal numbers, or quotes around text"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return int(text)


_Loader.yaml_implicit_resolvers = {
    first: kept
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    if (kept := [(tag, pattern) for tag, pattern in resolvers if tag.removeprefix(_TAG) in ("null", "merge")])
}
for _name, _pattern, _first in (
    ("bool", "true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
):
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(f"(?:{_pattern})$"), list(_first))
_Loader.add_constructor(_TAG + "int", _Loader.construct_yaml_int)


@dataclass(frozen=True)
class SettingsFile:
    """The content of a YAML file with overrides.

    Attributes:
        name: path of the file, for errors.
        data: its values.
        lines: for every dotted key its 1-based line, or the command-line option that gave the value.
    """

    name: str
    data: dict[str, Any]
    lines: Mapping[str, int | str] = field(default_factory=dict)

    def location(self, key: str) -> str:
        """Return `file:line` of the innermost section or key on the way to `key` that the file has, or `file`."""
        names = key.split(".")
        for size in range(len(names), 0, -1):
            line = self.lines.get(".".join(names[:size]))
            if line is not None:
                return line if isinstance(line, str) else f"{self.name}:{line}"
        return self.name

    def is_override(self, key: str) -> bool:
        """Return True if the value of `key` comes from the command line."""
        return isinstance(self.lines.get(key), str)


def read_settings_file(path: str | Path) -> SettingsFile:
    """Read a YAML mapping; raise ConfigError if the file is missing, unreadable, not YAML or not a mapping."""
    name = str(path)
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        text = content.decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"{name}: no such file; give the path of a YAML settings file, for example configs/quickstart.yaml"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL byte
        reason = (
            "it is not UTF-8 text"
            if isinstance(error, UnicodeDecodeError)
            else getattr(error, "strerror", None) or error
        )
        raise ConfigError(f"{name}: cannot be read: {reason}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{name}: is larger than any settings file, {MAX_FILE_BYTES:,} bytes; give another one")
    return parse_settings(text, name)


def parse_settings(text: str, name: str) -> SettingsFile:
    """Parse YAML text; errors refer to it as `name`."""
    lines: dict[str, int | str] = {}
    data = _load(text, name, lines)
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(f"{name}:1: must be a mapping of sections to keys, not {_kind(data)}")
    return SettingsFile(name, data, lines)


def apply_overrides(base: SettingsFile, overrides: Iterable[str]) -> SettingsFile:
    """Return `base` with each `section.key=value` applied; values are YAML: `true`, `3`, `1e-3`, `null`, `[1, 2]`."""
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not all(name.strip() for name in key.split(".")):
            raise ConfigError(f"--set {text!r}: must be KEY=VALUE, a key of the file (section.key in a section)")
        base = with_value(base, key, _load(value, f"--set {text!r}", {}))
    return base


def with_value(base: SettingsFile, key: str, value: Any, option: str = "--set") -> SettingsFile:
    """Return `base` with another value of a dotted key, which errors attribute to a command-line option."""
    data, lines = copy.deepcopy(base.data), dict(base.lines)
    names = [name.strip() for name in key.split(".")]
    section: Any = data
    for depth, name in enumerate(names[:-1]):
        if section.get(name) is None:
            section[name] = {}
        section = section[name]
        if not isinstance(section, dict):
            raise ConfigError(
                f"{option} {key}={format_value(value)}: {'.'.join(names[: depth + 1])} is a value, not a section"
            )
    section[names[-1]] = value
    for depth in range(len(names)):
        lines[".".join(names[: depth + 1])] = option
    return SettingsFile(base.name, data, lines)


def with_file_location(file: SettingsFile, prefix: str, make: Callable[[], _Made]) -> _Made:
    """Call `make`; add the location of the key in the file to an error about a key.

    Args:
        file: source of the values.
        prefix: section of the keys that `make` reads, with a dot, or an empty text.
        make: reads the values.
    """
    try:
        return make()
    except SettingError as error:
        error = error.with_prefix(prefix)
        raise ConfigError(f"{file.location(error.key)}: {error}") from None


def _load(text: str, name: str, lines: dict[str, int | str]) -> Any:
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _index(node, "", name, lines)
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        location = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark is not None else name
        problem = " ".join(filter(None, (error.context, error.problem))).replace("\n", " ")
        raise ConfigError(f"{location}: not valid YAML: {problem}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"{name}:{line}: not valid YAML: the character U+{error.character:04X} is not allowed"
        ) from None
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError(f"{name}: not valid YAML: nested too deeply, or refers to itself") from None
    except (ValueError, LookupError, AttributeError) as error:  # 2026-13-45, and what PyYAML makes of !!bool x
        raise ConfigError(f"{name}: not valid YAML: {type(error).__name__}: {error}") from None


def _index(node: yaml.Node, prefix: str, name: str, lines: dict[str, int | str]) -> None:
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


def _kind(value: Any) -> str:
    return {list: "a list", str: "text", bool: "true or false"}.get(type(value), "a number")
