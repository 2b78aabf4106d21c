"""Which operators of a training run fused on an NPU, and how they come into Megatron's model and optimizer."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron import megatron_imports
from mindspeed_cp.ops.fused import OPERATORS, missing_operators
from mindspeed_cp.train import optimizer_state

with megatron_imports():
    from mindspeed_cp.megatron.adaptors.fused import FusedNorm, use_fused_rotary
    from mindspeed_cp.megatron.adaptors.local import LocalNorm
    from mindspeed_cp.megatron.patches.swiglu import fused_swiglu

#: What the operators compute, for people.
_WORDS = {"rms_norm": "RMSNorm", "rotary_mul": "rotary positions", "swiglu": "SwiGLU", "adamw": "AdamW"}


@dataclass(frozen=True)
class FusedOperators:
    """The fused operators of a training.

    Attributes:
        used: names of those that run, keys of mindspeed_cp.ops.fused.OPERATORS.
        missing: operators of torch-npu by the names of those that the model would use and this torch-npu lacks.
        device: device type of the ranks.
    """

    used: tuple[str, ...] = ()
    missing: tuple[tuple[str, str], ...] = ()
    device: str = "cpu"

    @property
    def norm(self) -> type[LocalNorm]:
        """What builds the norms, for local_spec."""
        return FusedNorm if "rms_norm" in self.used else LocalNorm

    def use_in_config(self, config: Any) -> None:
        """Let MLPs of Megatron's config call the function for SwiGLU that `applied` replaces."""
        config.bias_activation_fusion = config.bias_activation_fusion or "swiglu" in self.used

    def use_in_model(self, gpt: nn.Module) -> None:
        """Rotate by the fused operator in an installed model."""
        if "rotary_mul" in self.used:
            use_fused_rotary(gpt)

    def use_in_optimizer(self, optimizer: Any) -> None:
        """Let torch's AdamW inside of Megatron's optimizer update by the fused operator, or not, whatever a checkpoint
        said."""
        optimizer_state.set_fused(optimizer, "adamw" in self.used)

    def applied(self) -> AbstractContextManager[None]:
        """Return a block within which the model may be run."""
        return fused_swiglu() if "swiglu" in self.used else nullcontext()

    def note(self) -> str | None:
        """Return one line that says which operators are fused, for runs on an NPU; None on other devices."""
        if self.device != "npu":
            return None
        names = ", ".join(_WORDS[name] for name in self.used) or "none"
        lacking = ", ".join(f"{_WORDS[name]} ({operator})" for name, operator in self.missing)
        return f"fused operators: {names}" + (f"; this torch-npu lacks those for {lacking}" if lacking else "")


def choose_fused_operators(settings: Settings, device: torch.device) -> FusedOperators:
    """Return the fused operators of a training on `device`, as train.fused_operators says.

    Raises:
        ConfigError: train.fused_operators is true, and torch-npu lacks an operator that the model would use.
    """
    setting = settings.train.fused_operators
    if device.type != "npu" or setting is False:
        return FusedOperators(device=device.type)
    wanted, missing = _wanted(settings), missing_operators()
    lacking = tuple((name, missing[name]) for name in wanted if name in missing)
    if setting is True and lacking:
        names = ", ".join(f"{operator} ({_WORDS[name]})" for name, operator in lacking)
        raise ConfigError(
            f"train.fused_operators = true: this torch-npu has no {names}; use auto, which leaves these out, or a "
            "newer torch-npu"
        )
    return FusedOperators(tuple(name for name in wanted if name not in missing), lacking, device.type)


def _wanted(settings: Settings) -> tuple[str, ...]:
    """Return the names of the fused operators that the model and its optimizer have a use for."""
    model = settings.model
    has_use = {
        "rms_norm": model.normalization == "RMSNorm",
        "rotary_mul": model.position_embedding_type == "rope",
        "swiglu": model.swiglu,
        "adamw": True,
    }
    return tuple(name for name in OPERATORS if has_use[name])
