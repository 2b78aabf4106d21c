"""Profiles of a device that was never measured, made row by row."""

from __future__ import annotations

from typing import Any

from mindspeed_cp.device.npu_profile import Condition, NpuProfile, ProfileRow

DTYPES = ("fp32", "fp16", "bf16")


def row(option: str, variant: str, ok: bool = True, dtype: str = "bf16", lowering: str = "", **condition: Any) -> ProfileRow:  # fmt: skip
    """Return a row that passed or failed."""
    values: dict[str, Any] = {
        "name": f"{variant} on a shape",
        "option": option,
        "variant": variant,
        "lowering": lowering or (variant if option == "lowering" else "tnd"),
        "dtype": dtype,
        "condition": Condition(**condition),
        "differences": {"out": 1e-3 if ok else 0.5},
        "limit": 0.02,
        "seconds": 0.001,
        "ok": ok,
        "error": None,
    }
    return ProfileRow(**values)


def profile(*failed: tuple[str, str], dtypes: tuple[str, ...] = DTYPES, more: tuple[ProfileRow, ...] = ()) -> NpuProfile:  # fmt: skip
    """Return a profile with a row for each variant under both lowerings, in every type, and more rows.

    Args:
        failed: (option, variant) that failed; "tnd" before an option: only there.
        dtypes: types.
        more: further rows.
    """
    rows = []
    for dtype in dtypes:
        rows += [row("lowering", variant, ("lowering", variant) not in failed, dtype) for variant in ("tnd", "masks")]
        for variant in ("shared", "split"):
            rows.append(row("alibi", variant, ("alibi", variant) not in failed, dtype, alibi=True))
        for variant in ("lse", "max_sum"):
            for lowering in ("tnd", "masks"):
                rows.append(row("statistics", variant, ("statistics", variant) not in failed, dtype, lowering))
        for variant in ("skipped", "copied"):
            rows.append(row("key_gaps", variant, ("key_gaps", variant) not in failed, dtype))
    return NpuProfile(format=2, device="Ascend910B1", torch_npu="2.13.0", cann="9.0.0", rows=[*rows, *more])
