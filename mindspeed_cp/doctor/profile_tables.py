"""Tables of a profile: its rows, and what settings take by it."""

from __future__ import annotations

import math

from mindspeed_cp.device.npu_profile import NpuProfile, ProfileRow
from mindspeed_cp.device.npu_variants import VARIANTS, Need, choose_variants
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.report.text import Table


def profile_tables(profile: NpuProfile) -> list[Table]:
    """Return the rows of a profile, and the variants that attention takes by it."""
    rows = tuple(
        (
            f"{row.dtype}: {row.name}",
            f"npu_{row.option}: {row.variant}",
            ", ".join(row.templates) or "-",
            _largest(row),
            f"{row.limit:.0e}",
            "-" if row.seconds is None else f"{row.seconds * 1e3:.1f}",
            "ok" if row.ok else f"FAILED {row.error or ''}".strip(),
        )
        for row in profile.rows
    )
    head = ("shape", "variant", "templates that CANN's sources take", "difference", "limit", "ms", "")
    return [
        Table("Variants of the npu backend, largest difference to fp64", head, rows),
        Table("Taken with npu_profile (heads of 128)", ("attention", *VARIANTS), taken_by_profile(profile)),
    ]


def taken_by_profile(profile: NpuProfile) -> tuple[tuple[str, ...], ...]:
    """Return a row for each type, with and without ALiBi: the variants of heads of 128 with windows, eight query heads
    for a key head; or why there are none."""
    rows = []
    for dtype in dict.fromkeys(row.dtype for row in profile.rows):
        for alibi in (False, True):
            need = Need(dtype, alibi, window=True, widths=(128, 128), group=8, deterministic=False)
            name = f"{dtype}, ALiBi" if alibi else dtype
            try:
                chosen = choose_variants(profile, "FILE", need, {})
            except ConfigError:
                rows.append((name, "none passed", *("-" for _ in list(VARIANTS)[1:])))
                continue
            rows.append((name, *(chosen[option] if option != "alibi" or alibi else "-" for option in VARIANTS)))
    return tuple(rows)


def _largest(row: ProfileRow) -> str:
    if not row.differences:
        return "-"
    largest = max(math.inf if size is None else size for size in row.differences.values())
    return f"{largest:.1e}" if largest < math.inf else "not finite"
