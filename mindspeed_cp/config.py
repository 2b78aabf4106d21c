"""The settings: every switch, its default, its checks.

One YAML file has the sections of `Settings`.  The section `context_parallel_suite` can also stand alone, or inside
Megatron's own YAML (`SuiteSettings.from_yaml`).  Whatever is wrong is a `ConfigError` of one line with the dotted key,
its value and the valid values; nothing is guessed, rounded or ignored.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from mindspeed_cp.config_checks import check
from mindspeed_cp.config_errors import unknown_key
from mindspeed_cp.config_file import in_file, override, read_settings_file
from mindspeed_cp.config_sections import (
    CheckpointSettings,
    DataSettings,
    ModelSettings,
    OutputSettings,
    Section,
    TrainSettings,
)
from mindspeed_cp.config_suite import ALSO_READ, SuiteSettings
from mindspeed_cp.plan import AUTO, algorithm_options

__all__ = ["Settings", "SuiteSettings", "load_settings"]


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
            also = ALSO_READ if name == "context_parallel_suite" else ()
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

    @property
    def plan_options(self) -> dict[str, Any]:
        """Options of build_plan: the suite's, and for an algorithm that costs linear layers the sizes of the model."""
        suite = self.context_parallel_suite
        sizes = {
            "hidden_size": self.model.hidden_size,
            "ffn_hidden_size": self.model.ffn_width,
            "tensor_model_parallel_size": self.train.tensor_model_parallel_size,
            "sequence_parallel": self.train.sequence_parallel,
        }
        known = sizes if suite.algorithm == AUTO else algorithm_options(suite.algorithm)
        return {**{name: value for name, value in sizes.items() if name in known}, **suite.options}


def load_settings(path: str | Path, overrides: Iterable[str] = ()) -> Settings:
    """Read a settings file, lay `section.key=value` overrides over it, check everything.

    Raises ConfigError, one line: `file:line: section.key = value: what is valid` (for an override, `--set: ...`).
    """
    file = override(read_settings_file(path), overrides)
    return in_file(file, "", lambda: Settings(**file.data))
