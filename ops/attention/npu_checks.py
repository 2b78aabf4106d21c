"""What Ascend's fused attention refuses, said when the configuration is read."""

from __future__ import annotations

import torch

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.npu_limits import check_limits
from mindspeed_cp.plan import AttentionConfig

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_option(name: str, value: object, valid: tuple[str, ...]) -> None:
    """Raise ConfigError unless an option of the backend has one of these values."""
    if value not in valid:
        raise ConfigError(f"npu.{name} is {value!r}; valid: {', '.join(valid)}")


def check_attention(attention: AttentionConfig, dtype: torch.dtype, lowering: str) -> None:
    """Raise ConfigError, naming setting, value, valid values and alternative, for what the operator does not do."""
    if dtype not in DTYPES:
        valid = ", ".join(str(one)[6:] for one in DTYPES)
        raise ConfigError(f"dtype is {dtype}; the npu backend supports {valid}; or use backend 'cpu'")
    check_limits(attention, lowering)
