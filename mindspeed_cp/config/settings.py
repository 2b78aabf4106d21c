"""The settings of a training run: all sections and the rules between them, from YAML or from Python.

One YAML file has the sections of `Settings`. The section `context_parallel_suite` can also stand alone, or inside
Megatron's own YAML (`SuiteSettings.from_yaml`). Every error is a `ConfigError` of one line with the dotted key, its
value and the valid values; no value is guessed, rounded or ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import model_validator

from mindspeed_cp.config.candidates import SUITE_SECTION
from mindspeed_cp.config.rules import check
from mindspeed_cp.config.sections import Sections
from mindspeed_cp.config.suite import import_modules
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.schema.yaml_file import (
    SettingsFile,
    apply_overrides,
    read_settings_file,
    with_file_location,
    with_value,
)

#: Settings of a short training, for commands without a settings file.
QUICKSTART = Path(__file__).parent / "quickstart.yaml"


class Settings(Sections):
    """Everything a training run needs; sections that do not fit together raise ConfigError."""

    _fits_together = model_validator(mode="after")(check)


def load_settings(
    path: str | Path, overrides: Iterable[str] = (), notify: Callable[[str], None] | None = None
) -> Settings:
    """Read a settings file, apply overrides, check everything.

    Args:
        path: a YAML file.
        overrides: each `section.key=value`, or `key=value` if one section alone has the key.
        notify: called with one line about a value of the file that an override made invalid and that was adapted.

    Raises:
        ConfigError: one line, `file:line: section.key = value: what is valid`; for an override `--set: ...`.
    """
    file = read_settings_file(path)
    return make_settings(override_settings(file, overrides) if overrides else file, notify)


def override_settings(file: SettingsFile, overrides: Iterable[str]) -> SettingsFile:
    """Apply overrides, whose keys may lack their section if one section alone has the key.

    The modules of `algorithm_modules` are imported first, so that options of their algorithms are such keys.
    """
    overrides = list(overrides)
    modules = (text for text in overrides if text.partition("=")[0].strip().endswith("algorithm_modules"))
    with_modules = apply_overrides(file, map(_with_section, modules))
    section = with_modules.data.get(SUITE_SECTION)
    if isinstance(section, dict):
        names = section.get("algorithm_modules")
        with_file_location(with_modules, f"{SUITE_SECTION}.", lambda: import_modules(names))
    return apply_overrides(file, map(_with_section, overrides))


def make_settings(file: SettingsFile, notify: Callable[[str], None] | None = None) -> Settings:
    """Check the values of a file; see :func:`load_settings`."""
    file, note = _clamp_warmup(file)
    settings = with_file_location(file, "", lambda: Settings(**file.data))
    if note and notify is not None:
        notify(note)
    return settings


def _with_section(override: str) -> str:
    key, equals, _ = override.partition("=")
    key = key.strip()
    if not key or not equals or "." in key or key in Settings.model_fields:
        return override
    kinds: dict[str, Any] = {name: info.annotation for name, info in Settings.model_fields.items()}
    sections = [name for name, kind in kinds.items() if key in kind.key_names()]
    if len(sections) > 1:
        names = " or ".join(f"{section}.{key}" for section in sections)
        raise ConfigError(f"--set {override!r}: several sections have the key {key}; give {names}")
    return f"{sections[0]}.{override}" if sections else override


def _clamp_warmup(file: SettingsFile) -> tuple[SettingsFile, str | None]:
    """Shorten the warm-up of the file where an override makes the run shorter than it; return a note that says so."""
    train = file.data.get("train")
    length_key = "lr_decay_iters" if isinstance(train, dict) and train.get("lr_decay_iters") else "train_iters"
    if not file.is_override(f"train.{length_key}") or file.is_override("train.lr_warmup_iters"):
        return file, None
    assert isinstance(train, dict)
    steps, warmup = train[length_key], train.get("lr_warmup_iters")
    if type(steps) is not int or type(warmup) is not int or not 0 < steps <= warmup:
        return file, None
    note = f"train.lr_warmup_iters = {steps - 1} instead of {warmup}: train.{length_key} is {steps}"
    lines = dict(file.lines)
    return replace(with_value(file, "train.lr_warmup_iters", steps - 1), lines=lines), note
