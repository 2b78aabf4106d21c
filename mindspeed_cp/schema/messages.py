"""One line for whatever pydantic finds wrong: the dotted key, its value, the valid values, the key probably meant."""

from __future__ import annotations

import difflib
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from mindspeed_cp.errors import ConfigError

_SCALARS = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
_PLURALS = {int: "integers", float: "numbers", str: "texts"}
_OTHER_WORDS = {
    "num_layers": ("layers", "n_layers", "n_layer", "num_hidden_layers"),
    "num_attention_heads": ("heads", "num_heads", "n_heads"),
    "num_query_groups": ("kv_heads", "num_kv_heads", "num_key_value_heads"),
    "hidden_size": ("d_model", "dim", "width"),
    "seq_length": ("context", "context_length", "max_seq_len", "max_seq_length", "sequence_length", "block_size"),
    "corpus": ("dataset", "data_path", "path"),
    "train_iters": ("steps", "max_steps", "num_steps", "iterations", "iters"),
    "global_batch_size": ("batch_size", "batch"),
    "lr": ("learning_rate", "max_lr"),
    "lr_warmup_iters": ("warmup", "warmup_steps", "warmup_iters"),
    "clip_grad": ("grad_clip", "max_grad_norm", "gradient_clip"),
    "context_parallel_size": ("cp", "cp_size", "context_parallel"),
    "algorithm": ("context_parallel_algo", "cp_algo", "cp_algorithm"),
    "ulysses_degree": ("ulysses_degree_in_cp", "ulysses_size"),
    "nodes": ("nnodes", "num_nodes"),
    "tensor_model_parallel_size": ("tp", "tp_size", "tensor_parallel_size"),
    "folder": ("dir", "directory", "output_dir", "save"),
}
_BOUNDS = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))


class SettingError(ConfigError):
    """A ConfigError that remembers its key, so that the reader of a file can say in which line that key stands.

    Attributes:
        key: dotted.
        other: of the same section, a key that it does not agree with.
        agreeing: for either of the two the value with which they would agree, by key.
    """

    def __init__(
        self, key: str, text: str, other: str | None = None, agreeing: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(text)
        self.key, self.other, self.agreeing = key, other, agreeing or {}

    def inside(self, sections: str) -> SettingError:
        """The same error about the keys of a section, named with it."""
        other = None if self.other is None else f"{sections}{self.other}"
        agreeing = {f"{sections}{key}": value for key, value in self.agreeing.items()}
        return SettingError(f"{sections}{self.key}", f"{sections}{self}", other, agreeing)


def show(value: Any) -> str:
    """A value as YAML and JSON write it, on one line, cut at 80 characters."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value).replace("\n", " ")
    return text if len(text) <= 80 else text[:77] + "..."


def bad_value(
    key: str, value: Any, rule: str, other: str | None = None, agreeing: Mapping[str, Any] | None = None
) -> SettingError:
    """`key = value: rule`; of `other` and `agreeing` see :class:`SettingError`."""
    return SettingError(key, f"{key} = {show(value)}: {rule}", other, agreeing)


def meant(name: str, candidates: typing.Iterable[str]) -> str | None:
    """The candidate that `name` is probably a slip of the pen, or another project's word, for."""
    names = list(candidates)
    for candidate in names:
        if name in _OTHER_WORDS.get(candidate, ()):
            return candidate
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return close[0] if close else None


def describe(info: FieldInfo) -> str:
    """The valid values of a field: "an integer >= 1", "one of RMSNorm, LayerNorm", "a number > 0 or null"."""
    return _describe_type(info.annotation, _bounds(info.metadata))


def _bounds(metadata: typing.Iterable[Any]) -> str:
    found = []
    for entry in metadata:
        for part in entry.metadata if isinstance(entry, FieldInfo) else [entry]:
            found += [f"{sign} {_number(getattr(part, name))}" for name, sign in _BOUNDS if hasattr(part, name)]
    return " and ".join(found)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) and abs(value) < 10**6 else f"{value:g}".replace("e+0", "e")


def _describe_type(annotation: Any, bounds: str) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        parts = [_describe_type(a, bounds) for a in arguments if a is not type(None)]
        return " or ".join(parts + ["null"] * (type(None) in arguments))
    if origin is typing.Annotated:
        return _describe_type(arguments[0], _bounds(arguments[1:]) or bounds)
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(str(a) for a in arguments)
    if origin is list:
        return f"a list of {_PLURALS[arguments[0]]}"
    text = _SCALARS.get(
        annotation,
        "a section" if isinstance(annotation, type) and issubclass(annotation, BaseModel) else str(annotation),
    )
    return f"{text} {bounds}".strip() if annotation in (int, float) else text


def one_line(model: type[BaseModel], error: ValidationError) -> SettingError:
    """The most useful of the errors that pydantic found: an unknown key first, for it may explain the others."""
    details = sorted(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
    first = details[0]
    location = [str(part) for part in first["loc"]]
    cause = first.get("ctx", {}).get("error")
    if isinstance(
        cause, SettingError
    ):  # found by a section's own __init__ or by a check: its line is complete but for the section's name
        sections = location[:-1] if location and location[-1] == cause.key else location
        return cause.inside("".join(f"{section}." for section in sections))
    key = ".".join(location)
    if first["type"] == "extra_forbidden":
        return unknown_key(model, key, location[-1])
    info = model.model_fields.get(location[0]) if location else None
    if first["type"] == "missing":
        return SettingError(key, f"{key}: is missing; it must be {describe(info) if info else 'given'}")
    if info is None:
        return SettingError(key, f"{key or model.__name__}: {first['msg']}")
    if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
        return bad_value(
            key, first["input"], f"must be a section with the keys {', '.join(info.annotation.model_fields)}"
        )
    return bad_value(key, first["input"], f"must be {describe(info)}")


def unknown_key(
    model: type[BaseModel], key: str, name: str, elsewhere: Mapping[str, type[BaseModel]] | None = None
) -> SettingError:
    """`key: unknown key`, with the likeliest key of this section, or the section in which that key does stand."""
    keys = [*model.model_fields, *getattr(model, "also_read", ())]
    near = meant(name, keys)
    for section, other in (elsewhere or {}).items():
        word = name if name in other.model_fields else None if near else meant(name, other.model_fields)
        if other is not model and word:
            return SettingError(key, f"{key}: unknown key; did you mean {section}.{word}?")
    parent = key[: len(key) - len(name)]
    guess = f"did you mean {parent}{near}? " if near else ""
    return SettingError(key, f"{key}: unknown key; {guess}valid: {', '.join(keys)}")
