"""What Ascend's fused attention refuses, told without torch: when settings are read, and again by the backend."""

from __future__ import annotations

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan import AttentionConfig

#: Query heads, and width of a head, that the operator takes at most.
MOST_HEADS, WIDEST = 256, 768


def check_limits(attention: AttentionConfig, lowering: str) -> None:
    """Raise ConfigError, naming setting, value, valid values and alternative, for what the operator does not do.

    Args:
        attention: what one layer computes on one tensor-parallel rank.
        lowering: "tnd" or "masks", see :class:`mindspeed_cp.ops.attention.npu.NpuAttention`.
    """
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
