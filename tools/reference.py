"""Reference of the settings: every key with its default, meaning and valid values, as YAML made from the sections.

`make docs-tables` writes it to configs/reference.yaml; a test compares that file with the sections.
"""

from __future__ import annotations

import inspect
import textwrap

from pydantic.fields import FieldInfo

from mindspeed_cp.algorithms import AlgorithmOption
from mindspeed_cp.config.settings import Settings
from mindspeed_cp.config.suite import SuiteSettings, options_by_name
from mindspeed_cp.schema.base import Section
from mindspeed_cp.schema.messages import describe_valid_values, format_value

_HEAD = """\
# Every key of the settings, with its default: a file with none of these lines means the same.
# Made from the schema by `make docs-tables`.
"""


def reference_yaml() -> str:
    """Return the text of configs/reference.yaml."""
    parts = [_HEAD]
    for name, info in Settings.model_fields.items():
        kind = info.annotation
        assert isinstance(kind, type) and issubclass(kind, Section), f"Settings.{name} is not a section"
        parts.append(_section(name, kind))
    return "\n".join(parts)


def _section(name: str, kind: type[Section]) -> str:
    lines = [*_comment(inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0], ""), f"{name}:"]
    for key, info in kind.model_fields.items():
        lines += _comment(f"{info.description} ({describe_valid_values(info)})", "  ")
        lines.append(f"  {key}: {_scalar(info)}")
    if kind is SuiteSettings:
        lines += ["", *_comment("Options of the algorithms; null: the default of the algorithm.", "  ")]
        for name, options in options_by_name().items():
            lines += _comment(
                f"{_describe_option(options)} ({next(iter(options.values())).valid_values()} or null)", "  "
            )
            lines.append(f"  {name}: null")
    return "\n".join(lines) + "\n"


def _describe_option(by_algorithm: dict[str, AlgorithmOption]) -> str:
    """Return the text of the reference for an option: its meaning and default in the algorithms that have it."""
    groups: dict[tuple[str, str], list[str]] = {}
    for algorithm, option in by_algorithm.items():
        default = "" if option.default is None else f"; null: {format_value(option.default).strip(chr(34))}"
        source = "; in a training: from the sections model and train" if option.from_model else ""
        groups.setdefault((option.description.rstrip("."), default + source), []).append(algorithm)
    return "; ".join(f"{', '.join(names)}: {text}{default}" for (text, default), names in groups.items())


def _comment(text: str, indent: str) -> list[str]:
    return [f"{indent}# {line}" for line in textwrap.wrap(" ".join(text.split()), 116 - len(indent))]


def _scalar(info: FieldInfo) -> str:
    value = info.get_default(call_default_factory=True)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)
