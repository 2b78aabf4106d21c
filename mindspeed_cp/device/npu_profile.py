"""The file in which `mindspeed-cp doctor --npu-profile FILE` says which variants of the npu backend a device computes
right, and the variants that settings take by it (`npu_profile`): the fastest that passed.

The doctor runs each variant on several shapes, one row for each, and compares it with the fp64 reference. A file is
valid for one kind of device with one torch-npu and one CANN. Every option has a fast and a safe variant. The first of
them in VARIANTS of which every row that concerns the attention passed is taken, under npu_lowering tnd; where that
fails, everything again under npu_lowering masks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan import AttentionConfig
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


#: Variants of each option, the fastest first and the safest last.
VARIANTS: dict[str, tuple[str, ...]] = {
    "lowering": ("tnd", "masks"),
    "alibi": ("shared", "split"),
    "statistics": ("lse", "max_sum"),
    "key_gaps": ("skipped", "copied"),
}

#: Variants without a profile: what MindSpeed, or CANN's own tests, run.
DEFAULTS = {"lowering": "tnd", "alibi": "split", "statistics": "max_sum", "key_gaps": "copied"}


@dataclass(frozen=True)
class Need:
    """What a layer's attention asks of the operator.

    Attributes:
        dtype: "fp32", "fp16" or "bf16".
        alibi, window: True if it has these.
        widths: head_dim and head_dim_v.
        group: query heads for a key head.
        deterministic: True under torch.use_deterministic_algorithms.
    """

    dtype: str
    alibi: bool
    window: bool
    widths: tuple[int, int]
    group: int
    deterministic: bool

    @classmethod
    def of_attention(cls, attention: AttentionConfig, dtype: str, deterministic: bool) -> Need:
        """Return what an attention needs."""
        return cls(
            dtype=dtype,
            alibi=attention.slopes is not None,
            window=attention.window is not None,
            widths=(attention.head_dim, attention.head_dim_v),
            group=attention.heads // attention.kv_heads,
            deterministic=deterministic,
        )


@cache
def profile_of_process(path: str) -> NpuProfile:
    """Return the content of a file, which a process reads once: its choice stays the same while it runs."""
    return read_profile(path)


@cache
def profile_variants(path: str, need: Need, given: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """Return the variants that the profile of a file allows; see :func:`choose_variants`."""
    return choose_variants(profile_of_process(path), path, need, dict(given))


def choose_variants(profile: NpuProfile, path: str, need: Need, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variant of each option of VARIANTS.

    Args:
        profile: content of the file.
        path: its path, for errors.
        need: what the attention asks of the operator.
        given: variants that settings name; each is taken if it passed.

    Raises:
        SettingError: no variant of an option passed, or one that settings name did not.
    """
    rows = [row for row in profile.rows if concerns(row, need)]
    chosen, reasons = _choose(rows, need, given)
    if chosen is not None:
        return chosen
    for option, variant in given.items():
        if _choose(rows, need, {option: variant})[0] is None and _choose(rows, need, {})[0] is not None:
            others = ", ".join(other for other in VARIANTS[option] if other != variant)
            rule = f"failed in npu_profile {path}: {reasons}; use {others}, or null, which takes what passed"
            raise bad_value(f"npu_{option}", variant, rule)
    rule = (
        f"leaves no safe way to compute attention in {need.dtype} on this device: {reasons}; use another type "
        f"(train.bf16), mend CANN or torch-npu and {REMEDY.format(path)}, or use train.device: cpu"
    )
    raise bad_value("npu_profile", path, rule)


def concerns(row: ProfileRow, need: Need) -> bool:
    """Return True if a row says something about an attention."""
    condition = row.condition
    return (
        row.dtype == need.dtype
        and (need.alibi or not condition.alibi)
        and (need.window or not condition.window)
        and (need.deterministic or not condition.deterministic)
        and (condition.widths is None or tuple(condition.widths) == need.widths)
        and need.group >= condition.min_group
    )


def _choose(rows: list[ProfileRow], need: Need, given: Mapping[str, str]) -> tuple[dict[str, str] | None, str]:
    """Return the variants, or None and why there are none."""
    reasons = []
    for lowering in _candidates("lowering", given):
        chosen: dict[str, str] = {}
        for option in VARIANTS:
            candidates = (lowering,) if option == "lowering" else _candidates(option, given)
            if option == "alibi" and lowering == "masks" and need.alibi:
                problems = ["npu_lowering masks has no ALiBi"]
            elif option != "lowering" and not any((x.option, x.lowering) == (option, lowering) for x in rows):
                chosen[option] = given.get(option, DEFAULTS[option])  # makes no difference under this lowering
                continue
            else:
                problems = [_problem(rows, option, lowering, need, variant) for variant in candidates]
            if all(problems):
                reasons += problems
                break
            chosen[option] = candidates[problems.index("")]
        if len(chosen) == len(VARIANTS):
            return chosen, ""
    return None, "; ".join(dict.fromkeys(reasons))


def _candidates(option: str, given: Mapping[str, str]) -> tuple[str, ...]:
    return (given[option],) if option in given else VARIANTS[option]


def _problem(rows: list[ProfileRow], option: str, lowering: str, need: Need, variant: str) -> str:
    """Return why a variant cannot be taken, or ""."""
    tried = [row for row in rows if (row.option, row.variant, row.lowering) == (option, variant, lowering)]
    failed = next((row for row in tried if not row.ok), None)
    if failed is not None:
        return f"npu_{option} {variant} failed, {failed.failure}"
    return "" if tried else f"npu_{option} {variant} has no row in {need.dtype}"


# Limits of Ascend's fused attention, checked without torch when settings are read, and again by the backend.


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
