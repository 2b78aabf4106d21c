"""The file in which `mindspeed-cp doctor --npu-profile FILE` says which variants of the npu backend a device computes
right; settings name it as `npu_profile`.

The doctor runs each variant on several shapes, one row for each, and compares it with the fp64 reference. A file is
valid for one kind of device with one torch-npu and one CANN. Which variants settings take by it: `npu_variants.py`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.schema.base import NonNegativeFloat, PositiveInt, Section
from mindspeed_cp.schema.messages import bad_value

#: Number of the format; another one is refused.
PROFILE_FORMAT = 2

#: How to make a file, for errors.
REMEDY = "run `mindspeed-cp doctor --device npu --npu-profile {}` on this machine again"

DtypeName = Literal["fp32", "fp16", "bf16"]
Option = Literal["lowering", "alibi", "statistics", "key_gaps"]


class Condition(Section):
    """Which attention a row concerns: all that has what the row has.

    Attributes:
        alibi, window, deterministic: true: only attention with ALiBi, with a window, under deterministic algorithms.
        widths: [head_dim, head_dim_v] of the only attention that the row concerns; null: any.
        min_group: smallest number of query heads for a key head.
    """

    alibi: bool = False
    window: bool = False
    deterministic: bool = False
    widths: Annotated[list[PositiveInt], Field(min_length=2, max_length=2)] | None = None
    min_group: PositiveInt = 1


class ProfileRow(Section):
    """One variant on one shape in one type.

    Attributes:
        name: shape and variant, for people.
        option, variant: the option of the npu backend that the row is about, and its value.
        lowering: npu_lowering of the row's calls.
        dtype: type of queries, keys and values.
        condition: the attention that the row concerns.
        differences: largest difference to fp64 of out, lse, dq, dk and dv, relative to the largest value of the
            reference or 1; null: not finite.
        limit: largest difference that passes.
        seconds: time of forward and backward; null: none was measured.
        ok: True if the row passed.
        error: why there are no differences, or null.
    """

    name: str
    option: Option
    variant: str
    lowering: Literal["tnd", "masks"]
    dtype: DtypeName
    condition: Condition
    differences: dict[str, NonNegativeFloat | None]
    limit: NonNegativeFloat
    seconds: NonNegativeFloat | None
    ok: bool
    error: str | None

    @property
    def failure(self) -> str:
        """What went wrong in a row that failed."""
        if self.error is not None:
            return f"{self.name} ({self.dtype}): {self.error}"
        name, worst = max(
            self.differences.items(), key=lambda item: math.inf if item[1] is None else item[1], default=("out", None)
        )
        size = "is not finite" if worst is None else f"differs from fp64 by {worst:.1e}, limit {self.limit:.0e}"
        return f"{self.name} ({self.dtype}): {name} {size}"


class NpuProfile(Section):
    """Content of the file.

    Attributes:
        format: PROFILE_FORMAT.
        device: name of the device.
        torch_npu, cann: versions; cann is null where torch-npu finds none.
        rows: results.
    """

    format: Literal[2]
    device: str
    torch_npu: str
    cann: str | None
    rows: Annotated[list[ProfileRow], Field(min_length=1)]


def read_profile(path: str) -> NpuProfile:
    """Read a file of the doctor.

    Raises:
        SettingError: the file cannot be read, is damaged, or is no profile; one line that names `npu_profile`.
    """
    remedy = REMEDY.format(path)
    try:
        content = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise bad_value("npu_profile", path, f"cannot be read ({error.strerror}); {remedy}") from None
    except (ValueError, RecursionError) as error:
        text = " ".join(str(error).split())[:120]
        raise bad_value("npu_profile", path, f"is damaged, or no JSON ({text}); {remedy}") from None
    if not isinstance(content, dict) or content.get("format") != PROFILE_FORMAT:
        rule = f"is no profile of this version (a JSON object with format: {PROFILE_FORMAT}); {remedy}"
        raise bad_value("npu_profile", path, rule)
    try:
        profile = NpuProfile(**content)
    except ConfigError as error:
        raise bad_value("npu_profile", path, f"is damaged ({error}); {remedy}") from None
    for row in profile.rows:
        if row.ok and not _has_passed(row):
            rule = f"is damaged (row {row.name!r}, {row.dtype}, is ok with differences above its limit); {remedy}"
            raise bad_value("npu_profile", path, rule)
    return profile


def _has_passed(row: ProfileRow) -> bool:
    sizes = row.differences.values()
    return row.error is None and bool(sizes) and all(size is not None and size <= row.limit for size in sizes)


@dataclass(frozen=True)
class NpuIdentity:
    """What a profile belongs to.

    Attributes:
        device: name of the device.
        torch_npu, cann: versions; cann is None if unknown.
    """

    device: str
    torch_npu: str
    cann: str | None


def check_profile_device(profile: NpuProfile, path: str, identity: NpuIdentity) -> None:
    """Raise SettingError unless a profile is of this device.

    Args:
        profile: content of the file.
        path: its path, for the error.
        identity: this device and its versions.
    """
    for what, theirs, ours in (
        ("device", profile.device, identity.device),
        ("torch-npu", profile.torch_npu, identity.torch_npu),
        ("CANN", profile.cann, identity.cann),
    ):
        if theirs != ours:
            rule = f"is of {what} {theirs or 'unknown'}, and this machine has {ours or 'unknown'}"
            raise bad_value("npu_profile", path, f"{rule}; {REMEDY.format(path)}, or leave it out: npu_profile: null")
