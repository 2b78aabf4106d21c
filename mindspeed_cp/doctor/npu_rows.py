"""All rows of an NPU: the checks of the operator, and the variants of the npu backend that make the profile."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindspeed_cp.device.npu_profile import NpuProfile, read_profile
from mindspeed_cp.device.select import load_npu, npu_identity
from mindspeed_cp.doctor.guarded import ROW_SECONDS, Failure, GuardedCall, run_guarded
from mindspeed_cp.doctor.habit_cases import HABIT_CASES, HabitCase
from mindspeed_cp.doctor.habits import habit_calls, make_profile, profile_row
from mindspeed_cp.doctor.operator import OperatorCase, check, failed_check
from mindspeed_cp.errors import ConfigError


def check_npu(
    cases: Sequence[tuple[str, OperatorCase]],
    seed: int,
    row_seconds: float | None = None,
    habits: Sequence[HabitCase] = HABIT_CASES,
) -> tuple[list[dict[str, Any]], NpuProfile]:
    """Run all rows in a process of their own.

    Args:
        cases: type and case of each check of the operator.
        seed: seed of the inputs.
        row_seconds: limit of a row; None: ROW_SECONDS.
        habits: rows of the profile.

    Returns:
        The rows of the checks, see :func:`mindspeed_cp.doctor.operator.check`, and the profile. A row that raised, hung
        or ended its process failed, and says so.
    """
    rows = habit_calls(seed, habits)
    calls = [GuardedCall(check, ("npu", dtype, case, seed), case.name) for dtype, case in cases]
    calls += [call for *_, call in rows]
    results = run_guarded(calls, open_npu, ROW_SECONDS if row_seconds is None else row_seconds)
    checks = [
        failed_check("npu", dtype, case, result.error) if isinstance(result, Failure) else result
        for (dtype, case), result in zip(cases, results, strict=False)
    ]
    measured = zip(rows, results[len(cases) :], strict=True)
    profile_rows = [profile_row(case, dtype, result) for (case, dtype, _), result in measured]
    return checks, make_profile(profile_rows, npu_identity())


def open_npu() -> None:
    """Open the first NPU, in the process of the rows."""
    load_npu("--device npu", "--device cpu").set_device(0)


def check_profile_path(path: Path) -> None:
    """Raise ConfigError unless a profile can be written to a path: before minutes of work."""
    if not path.parent.is_dir():
        raise ConfigError(f"--npu-profile {path}: there is no folder {path.parent}; make it, or give another one")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--npu-profile {path}: the folder {path.parent} cannot be written; give another one")
    if not path.exists():
        return
    try:
        read_profile(str(path))
    except ConfigError:
        raise ConfigError(
            f"--npu-profile {path}: there is another file, which is no sound profile; remove it, or give another name"
        ) from None


def write_profile(profile: dict[str, Any], path: Path) -> None:
    """Write the content of a profile; a file that is there is replaced as a whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(profile, indent=1) + "\n", "utf-8")
    temporary.replace(path)
