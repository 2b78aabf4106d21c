"""What Ascend's fused attention refuses, said when the configuration is read."""

from __future__ import annotations

import torch

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan import AttentionConfig

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

#: Query heads, and width of a head, that the operator takes at most.
MOST_HEADS, WIDEST = 256, 768


def check_option(name: str, value: object, valid: tuple[str, ...]) -> None:
    """Raise ConfigError unless an option of the backend has one of these values."""
    if value not in valid:
        raise ConfigError(f"npu.{name} is {value!r}; valid: {', '.join(valid)}")


def check_attention(attention: AttentionConfig, dtype: torch.dtype, lowering: str) -> None:
    """Raise ConfigError, naming setting, value, valid values and alternative, for what the operator does not do."""
    if dtype not in DTYPES:
        valid = ", ".join(str(one)[6:] for one in DTYPES)
        raise ConfigError(f"dtype is {dtype}; the npu backend supports {valid}; or use backend 'cpu'")
    if attention.heads > MOST_HEADS:
        raise ConfigError(
            f"attention.heads is {attention.heads}; valid for the npu backend: {MOST_HEADS} on a tensor-parallel rank "
            "at most; use more tensor-parallel ranks"
        )
    for name in ("head_dim", "head_dim_v"):
        if getattr(attention, name) > WIDEST:
            raise ConfigError(
                f"attention.{name} is {getattr(attention, name)}; valid for the npu backend: 1 to {WIDEST}; use more "
                "and narrower heads"
            )
    if attention.slopes is None:
        return
    if lowering == "masks":
        raise ConfigError(
            "attention.alibi is on and npu.lowering is 'masks', which has no positions for a bias; valid: npu.lowering "
            "'tnd', or alibi off"
        )
    if (attention.slopes < 0).any():
        raise ConfigError(
            f"attention.alibi has the slope {attention.slopes.min()}; valid for the npu backend: 0 and above; backend "
            "'cpu' takes any"
        )
