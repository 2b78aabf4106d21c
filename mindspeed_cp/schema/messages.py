"""One-line errors of settings: the dotted key, its value, the valid values, the keys nearest to an unknown one."""

from __future__ import annotations

import difflib
import json
import reprlib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.schema.unsupported import SUITE_KEYS

_SCALARS = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
_PLURALS = {int: "integers", float: "numbers", str: "texts"}
_VALUE_LIMIT = 80  # characters
_KEY_LIMIT = 20  # keys that an error lists
_MAX_BITS = 128  # of an integer that a message shows: Python writes none of more than 4,300 digits


class _ShortRepr(reprlib.Repr):
    """Of values that are no JSON: it looks at the first items of a list alone."""

    def repr_int(self, x: int, level: int) -> str:
        return f"<an integer of {x.bit_length():,} bits>" if x.bit_length() > _MAX_BITS else repr(x)


_REPR = _ShortRepr()
_REPR.maxstring = _REPR.maxother = _VALUE_LIMIT
_BOUNDS = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))


class SettingError(ConfigError):
    """A ConfigError about a dotted key, by which the reader of a file finds the line."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(text)
        self.key = key

    def with_prefix(self, prefix: str) -> SettingError:
        """Return the same error with `prefix`, the section and a dot, before the key."""
        return SettingError(f"{prefix}{self.key}", f"{prefix}{self}")


def format_value(value: Any) -> str:
    """Return a value as YAML and JSON write it, on one line, cut at 80 characters; only so much of it is written."""
    text = ""
    try:
        for part in json.JSONEncoder(ensure_ascii=False).iterencode(value):
            text += part
            if len(text) > _VALUE_LIMIT:
                break
    except (TypeError, ValueError, RecursionError):
        text = short_repr(value)
    return text if len(text) <= _VALUE_LIMIT else text[: _VALUE_LIMIT - 3] + "..."


def short_repr(value: object) -> str:
    """Return a value as Python writes it, on one line; of a long list the first items, of a long text both ends."""
    return _REPR.repr(value).replace("\n", " ")


def bad_value(key: str, value: Any, rule: str) -> SettingError:
    """Return the error `key = value: rule`."""
    return SettingError(key, f"{key} = {format_value(value)}: {rule}")


def closest_names(name: str, candidates: typing.Iterable[str]) -> list[str]:
    """Return up to three candidates that resemble `name`; the nearest comes first."""
    return difflib.get_close_matches(name, list(candidates), n=3, cutoff=0.6)


def did_you_mean(names: typing.Sequence[str], prefix: str = "") -> str:
    """Return "did you mean a, b or c? " for the given names, each after `prefix`; empty without names."""
    if not names:
        return ""
    *others, last = [prefix + name for name in names]
    return f"did you mean {', '.join(others)}{' or ' if others else ''}{last}? "


def describe_valid_values(info: FieldInfo) -> str:
    """Return the valid values of a field: "an integer >= 1", "one of RMSNorm, LayerNorm", "a number > 0 or null"."""
    return _describe_type(info.annotation, _bounds(info.metadata))


def _bounds(metadata: typing.Iterable[Any]) -> str:
    bounds = []
    for entry in metadata:
        for part in entry.metadata if isinstance(entry, FieldInfo) else [entry]:
            bounds += [f"{sign} {_number(getattr(part, name))}" for name, sign in _BOUNDS if hasattr(part, name)]
    return " and ".join(bounds)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) and abs(value) < 10**6 else f"{value:g}".replace("e+0", "e")


def _describe_type(annotation: Any, bounds: str) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        kinds = [_describe_type(a, bounds) for a in arguments if a is not type(None)]
        return " or ".join(kinds + ["null"] * (type(None) in arguments))
    if origin is typing.Annotated:
        return _describe_type(arguments[0], _bounds(arguments[1:]) or bounds)
    if origin is Literal:
        words = [format_value(a) if isinstance(a, bool) else str(a) for a in arguments]
        return ("one of " if len(words) > 1 else "") + ", ".join(words)
    if origin is list:
        return f"a list of {_PLURALS.get(arguments[0], 'sections')}"
    text = _SCALARS.get(
        annotation,
        "a section" if isinstance(annotation, type) and issubclass(annotation, BaseModel) else str(annotation),
    )
    return f"{text} {bounds}".strip() if annotation in (int, float) else text


def to_setting_error(model: type[BaseModel], error: ValidationError) -> SettingError:
    """Return the most useful of the errors that pydantic found: an unknown key first, as it may explain the others."""
    first = min(error.errors(include_url=False), key=lambda details: details["type"] != "extra_forbidden")
    location = [str(name) for name in first["loc"]]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, SettingError):  # raised by a section or by a check: it lacks only the section's name
        sections = location[:-1] if location and location[-1] == cause.key else location
        return cause.with_prefix("".join(f"{section}." for section in sections))
    key = ".".join(location)
    if first["type"] == "extra_forbidden":
        return unknown_key(model, key, location[-1])
    info = model.model_fields.get(location[0]) if location else None
    key = ".".join(name for name in location if name == location[0] or name.isdigit())  # without the types of a union
    if first["type"] == "missing":
        return SettingError(key, f"{key}: is missing; it must be {describe_valid_values(info) if info else 'given'}")
    if info is None:
        return SettingError(key, f"{key or model.__name__}: {first['msg']}")
    if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
        keys = list_keys(_key_names(info.annotation))
        return bad_value(key, first["input"], f"must be a section; {keys}")
    return bad_value(key, first["input"], f"must be {describe_valid_values(info)}")


def unknown_key(
    model: type[BaseModel], key: str, name: str, sections: Mapping[str, type[BaseModel]] | None = None
) -> SettingError:
    """Return the error `key: unknown key`, with the nearest keys of the section or the section that has the key.

    Args:
        model: the section.
        key: dotted key.
        name: its last part.
        sections: all sections by name.
    """
    if name in SUITE_KEYS:
        return SettingError(key, f"{key}: is Megatron's, and not in this version; {SUITE_KEYS[name]}; remove the key")
    keys = _key_names(model)
    near = closest_names(name, keys)
    for section, kind in (sections or {}).items():
        section_keys = _key_names(kind)
        names = [name] if name in section_keys else [] if near else closest_names(name, section_keys)
        if names and kind is not model:
            return SettingError(key, f"{key}: unknown key; {did_you_mean(names, section + '.').strip()}")
    hint = did_you_mean(near, key[: len(key) - len(name)])
    return SettingError(key, f"{key}: unknown key; {hint}{list_keys(keys)}")


def list_keys(keys: Sequence[str]) -> str:
    """Return "valid: a, b" of few keys; of more, how to list them."""
    if len(keys) <= _KEY_LIMIT:
        return f"valid: {', '.join(keys)}"
    return f"valid: {len(keys)} keys, which configs/reference.yaml lists"


def _key_names(model: type[BaseModel]) -> tuple[str, ...]:
    key_names = getattr(model, "key_names", None)
    return tuple(model.model_fields) if key_names is None else key_names()


def name_ranks(ranks: Sequence[int], singular: str = "", plural: str = "") -> str:
    """Return "rank 3" or "ranks 0, 1 and 9 more", with the verb that fits behind it if it is given."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    noun, verb = ("rank", singular) if len(ranks) == 1 else ("ranks", plural)
    return f"{noun} {shown} {verb}".rstrip()
