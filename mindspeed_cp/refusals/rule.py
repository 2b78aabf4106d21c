"""Rule: valid values of one setting of Megatron, and conditions that several rules have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mindspeed_cp.errors import ConfigError


@dataclass(frozen=True)
class Rule:
    """Valid values of a field of TransformerConfig or of an argument, and the reason why the others do not work.

    Attributes:
        setting: name of the field or argument.
        works: True for a valid value.
        valid: the valid values, as text.
        instead: why the others do not work, and what to use instead.
        when: condition on the other settings; the rule is for settings that meet it.
        case: the condition in words; empty if there is none.
    """

    setting: str
    works: Callable[[Any], bool]
    valid: str
    instead: str
    when: Callable[[Any], bool] = lambda config: True
    case: str = ""

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


def is_off(value: Any) -> bool:
    """Return True for False, None, 0 and what is empty."""
    return not value


def is_latent(config: Any) -> bool:
    """Return True for multi-latent attention."""
    return bool(config.multi_latent_attention)


def is_split(config: Any) -> bool:
    """Return True if a micro-batch's tokens are on several ranks."""
    return config.context_parallel_size > 1 or bool(config.sequence_parallel)


def has_experts(config: Any) -> bool:
    """Return True for a model with experts."""
    return bool(config.num_moe_experts)
