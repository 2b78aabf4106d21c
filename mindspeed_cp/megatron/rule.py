"""Rule: valid values of a setting of Megatron or MindSpeed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mindspeed_cp.errors import ConfigError


@dataclass(frozen=True)
class Rule:
    """Valid values of a field of TransformerConfig or of an argument, and the reason why the others do not work."""

    setting: str
    works: Callable[[Any], bool]
    valid: str
    instead: str
    when: Callable[[Any], bool] = lambda config: True

    def problem(self, config: Any) -> str | None:
        """Return what is wrong with the setting, or None; a setting that this Megatron lacks is valid."""
        if not hasattr(config, self.setting) or not self.when(config):
            return None
        value = getattr(config, self.setting)
        if self.works(value):
            return None
        return f"{self.setting} is {value!r}; valid with planned attention: {self.valid} ({self.instead})"

    def check(self, config: Any) -> None:
        """Raise ConfigError if the setting has an invalid value."""
        problem = self.problem(config)
        if problem is not None:
            raise ConfigError(problem)
