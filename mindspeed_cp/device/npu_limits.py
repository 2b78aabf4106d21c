"""Limits of Ascend's fused attention, checked without torch when settings are read, and again by the backend."""

from __future__ import annotations

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan import AttentionConfig

#: Maximum number of query heads, and maximum head dimension, of the operator.
MAX_HEADS, NPU_MAX_HEAD_DIM = 256, 768


def check_npu_limits(attention: AttentionConfig, lowering: str) -> None:
    """Raise ConfigError with setting, value, valid values and alternative if the operator does not support the
    attention.

    Args:
        attention: configuration of a layer on one tensor-parallel rank.
        lowering: "tnd" or "masks", see :class:`mindspeed_cp.ops.attention.npu.backend.NpuAttention`.
    """
    if attention.heads > MAX_HEADS:
        raise ConfigError(
            f"attention.heads is {attention.heads}; valid for the npu backend: {MAX_HEADS} on a tensor-parallel rank "
            "at most; use more tensor-parallel ranks"
        )
    for name in ("head_dim", "head_dim_v"):
        if getattr(attention, name) > NPU_MAX_HEAD_DIM:
            raise ConfigError(
                f"attention.{name} is {getattr(attention, name)}; valid for the npu backend: 1 to "
                f"{NPU_MAX_HEAD_DIM}; use more and narrower heads"
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
