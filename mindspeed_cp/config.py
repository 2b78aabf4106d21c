"""The settings: every switch, its default, its checks.

One YAML file has the sections of `Settings`.  The section `context_parallel_suite` can also stand alone, or inside
Megatron's own YAML (`SuiteSettings.from_yaml`).  Whatever is wrong is a `ConfigError` of one line with the dotted key,
its value and the valid values; nothing is guessed, rounded or ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, field_validator, model_validator

from mindspeed_cp.config_checks import check
from mindspeed_cp.config_errors import SettingError, bad_value, meant, unknown_key
from mindspeed_cp.config_file import SettingsFile, override, read_settings_file
from mindspeed_cp.config_sections import (
    CheckpointSettings,
    Count,
    DataSettings,
    ModelSettings,
    OutputSettings,
    Positive,
    Section,
    TrainSettings,
)
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan import ALGORITHMS, ALIASES, algorithm_name

__all__ = ["Settings", "SuiteSettings", "load_settings"]

LATER_ALGORITHMS = (
    *("double_ring", "ulysses", "hybrid", "all_gather", "direct", "hierarchical", "auto"),
    *("a2a", "a2a+p2p", "allgather"),
    *("ulysses_cp_algo", "hybrid_cp_algo", "kvallgather_cp_algo", "adaptive_cp_algo", "hybrid_adaptive_cp_algo"),
)
LATER_KEYS = ("hierarchical_context_parallel_sizes", "max_seqlen_per_dp_cp_rank", "hybrid_context_parallel")

_Made = TypeVar("_Made")


class SuiteSettings(Section):
    """How attention is split over the context: the section `context_parallel_suite`."""

    context_parallel_size: Count = Field(default=1, description="ranks that share the context of one row")
    algorithm: str = Field(
        default="ring", description="ring (zig-zag); also called p2p or megatron_cp_algo, and the key also cp_comm_type"
    )
    backend: Literal["auto", "cpu"] = Field(
        default="auto", description="implementation of the attention operator; auto: the device's"
    )
    timeout_seconds: Positive = Field(default=600.0, description="how long a rank waits for another before it gives up")
    verify_plans: bool = Field(
        default=False, description="prove every plan before it runs, in the thread that makes it"
    )

    @model_validator(mode="before")
    @classmethod
    def _names_of_megatron(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for key in LATER_KEYS:
            if values.get(key) is not None:
                raise bad_value(key, values[key], "Megatron's key, but nothing in this version uses it; remove it")
        values = {key: value for key, value in values.items() if key not in LATER_KEYS}
        if "cp_comm_type" not in values:
            return values
        other = values.pop("cp_comm_type")
        name = _algorithm("cp_comm_type", other)
        if "algorithm" in values and _algorithm("algorithm", values["algorithm"]) != name:
            raise bad_value("cp_comm_type", other, f"differs from algorithm = {values['algorithm']}; give only one")
        return {**values, "algorithm": name}

    @field_validator("algorithm", mode="before")
    @classmethod
    def _known_algorithm(cls, value: Any) -> str:
        return _algorithm("algorithm", value)

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: Iterable[str] = ()) -> SuiteSettings:
        """From a YAML file that is this section, or that has it as `context_parallel_suite:` (ours, or Megatron's own).

        Where Megatron's section `model_parallel` gives context_parallel_size, it holds here too; two different sizes
        are an error.  Raises ConfigError, one line.
        """
        file = override(read_settings_file(path), overrides)
        name = "context_parallel_suite"
        if name not in file.data:
            also = (*cls.model_fields, "cp_comm_type", *LATER_KEYS)
            strange = [key for key in file.data if key not in also]
            if strange:
                where = file.where(strange[0])
                raise ConfigError(f"{where}: no section {name}, and {strange[0]} is not one of its keys")
            return _in_file(file, "", lambda: cls(**file.data))
        section = {} if file.data[name] is None else file.data[name]
        if not isinstance(section, dict):
            keys = ", ".join(cls.model_fields)
            raise ConfigError(f"{file.where(name)}: {name}: must be a section with the keys {keys}")
        outer = _outer_size(file)
        if section.setdefault("context_parallel_size", outer or 1) != (outer or section["context_parallel_size"]):
            key = f"{name}.context_parallel_size"
            rule = f"differs from model_parallel.context_parallel_size = {outer}; give the same, or only one"
            raise ConfigError(f"{file.where(key)}: {bad_value(key, section['context_parallel_size'], rule)}")
        return _in_file(file, f"{name}.", lambda: cls(**section))


class Settings(Section):
    """Everything a training run needs."""

    model: ModelSettings = Field(default_factory=ModelSettings)
    data: DataSettings = Field(default_factory=DataSettings)
    train: TrainSettings = Field(default_factory=TrainSettings)
    checkpoint: CheckpointSettings = Field(default_factory=CheckpointSettings)
    output: OutputSettings = Field(default_factory=OutputSettings)
    context_parallel_suite: SuiteSettings = Field(default_factory=SuiteSettings)

    @model_validator(mode="before")
    @classmethod
    def _keys(cls, values: Any) -> Any:
        """Empty sections are sections; a key in the wrong section is told where it belongs."""
        if not isinstance(values, dict):
            return values
        sections: dict[str, Any] = {name: info.annotation for name, info in cls.model_fields.items()}
        for name, section in values.items():
            if name not in sections:
                raise unknown_key(cls, name, name, sections)
            also = ("cp_comm_type", *LATER_KEYS) if name == "context_parallel_suite" else ()
            for key in section if isinstance(section, dict) else ():
                if key not in sections[name].model_fields and key not in also:
                    raise unknown_key(sections[name], f"{name}.{key}", key, sections)
        return {name: {} if section is None else section for name, section in values.items()}

    @model_validator(mode="after")
    def _fits_together(self) -> Settings:
        check(self)
        return self

    @property
    def model_parallel_size(self) -> int:
        """Ranks of one replica: tensor * pipeline * context."""
        train = self.train
        model = train.tensor_model_parallel_size * train.pipeline_model_parallel_size
        return model * self.context_parallel_suite.context_parallel_size


def load_settings(path: str | Path, overrides: Iterable[str] = ()) -> Settings:
    """Read a settings file, lay `section.key=value` overrides over it, check everything.

    Raises ConfigError, one line: `file:line: section.key = value: what is valid` (for an override, `--set: ...`).
    """
    file = override(read_settings_file(path), overrides)
    return _in_file(file, "", lambda: Settings(**file.data))


def _algorithm(key: str, value: Any) -> str:
    """The project's name of an algorithm of this version, given under any of its names."""
    names = [*ALGORITHMS, *ALIASES]
    valid = ", ".join(names)
    if isinstance(value, list):
        raise bad_value(key, value, f"one algorithm per layer is not in this version; give one of {valid}")
    if isinstance(value, str) and value in names:
        return algorithm_name(value)
    if value in LATER_ALGORITHMS:
        raise bad_value(key, value, f"is not in this version; valid: {valid}")
    near = meant(value, names) if isinstance(value, str) else None
    raise bad_value(key, value, f"unknown algorithm; {f'did you mean {near}? ' if near else ''}valid: {valid}")


def _outer_size(file: SettingsFile) -> int | None:
    """context_parallel_size of Megatron's own section, if the file has one."""
    parallel = file.data.get("model_parallel")
    return parallel.get("context_parallel_size") if isinstance(parallel, dict) else None


def _in_file(file: SettingsFile, prefix: str, make: Callable[[], _Made]) -> _Made:
    """Call `make`; an error of it is told with the place in the file."""
    try:
        return make()
    except SettingError as error:
        raise ConfigError(f"{file.where(prefix + error.key)}: {prefix}{error}") from None
