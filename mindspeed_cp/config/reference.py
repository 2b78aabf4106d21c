"""Every key with its default, its meaning and its valid values, as a YAML file made from the schema.

    python -m mindspeed_cp.config_reference > configs/reference.yaml

A test compares that file with the schema, so the two cannot drift apart.
"""

from __future__ import annotations

import inspect
import textwrap

from pydantic.fields import FieldInfo

from mindspeed_cp.config import Settings
from mindspeed_cp.config_errors import describe
from mindspeed_cp.config_sections import Section

_HEAD = """\
# Every key of the settings, with its default: a file with none of these lines means the same.
# Made from the schema by: python -m mindspeed_cp.config_reference > configs/reference.yaml
"""


def reference_yaml() -> str:
    """The text of configs/reference.yaml."""
    parts = [_HEAD]
    for name, info in Settings.model_fields.items():
        kind = info.annotation
        assert isinstance(kind, type) and issubclass(kind, Section), f"Settings.{name} is not a section"
        parts.append(_section(name, kind))
    return "\n".join(parts)


def _section(name: str, kind: type[Section]) -> str:
    lines = [*_comment(inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0], ""), f"{name}:"]
    for key, info in kind.model_fields.items():
        lines += _comment(f"{info.description} ({describe(info)})", "  ")
        lines.append(f"  {key}: {_scalar(info)}")
    return "\n".join(lines) + "\n"


def _comment(text: str, indent: str) -> list[str]:
    return [f"{indent}# {line}" for line in textwrap.wrap(" ".join(text.split()), 116 - len(indent))]


def _scalar(info: FieldInfo) -> str:
    value = info.default
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    print(reference_yaml(), end="")
