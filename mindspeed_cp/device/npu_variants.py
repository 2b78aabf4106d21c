"""Which variant of the npu backend a profile of the doctor allows: the fastest that the device computes right.

Every option has a fast and a safe variant. The first of them in VARIANTS of which every row that concerns the attention
passed is taken, under npu_lowering tnd; where that fails, everything again under npu_lowering masks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from mindspeed_cp.device.npu_profile import REMEDY, NpuProfile, ProfileRow, read_profile
from mindspeed_cp.plan import AttentionConfig
from mindspeed_cp.schema.messages import bad_value

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
        problem = _problem(rows, "lowering", lowering, lowering, need)
        chosen = {"lowering": lowering}
        for option in ("alibi", "statistics", "key_gaps") if problem is None else ():
            if option == "alibi" and lowering == "masks" and need.alibi:
                problem = "npu_lowering masks has no ALiBi"
                break
            variant, problem = _best(rows, option, lowering, need, given)
            if problem is not None:
                break
            chosen[option] = variant
        if problem is None:
            return chosen, ""
        reasons.append(problem)
    return None, "; ".join(dict.fromkeys(reasons))


def _best(
    rows: list[ProfileRow], option: str, lowering: str, need: Need, given: Mapping[str, str]
) -> tuple[str, str | None]:
    """Return the first variant of an option that passed, and why there is none; an option that has no row under a
    lowering makes no difference there."""
    if not any(row.option == option and row.lowering == lowering for row in rows):
        return given.get(option, DEFAULTS[option]), None
    problems = {}
    for variant in _candidates(option, given):
        problems[variant] = _problem(rows, option, variant, lowering, need)
        if problems[variant] is None:
            return variant, None
    return "", "; ".join(problem for problem in problems.values() if problem)


def _problem(rows: list[ProfileRow], option: str, variant: str, lowering: str, need: Need) -> str | None:
    """Return why a variant cannot be taken, or None."""
    tried = [row for row in rows if (row.option, row.variant, row.lowering) == (option, variant, lowering)]
    failed = next((row for row in tried if not row.ok), None)
    if failed is not None:
        return f"npu_{option} {variant} failed, {failed.failure}"
    return None if tried else f"npu_{option} {variant} has no row in {need.dtype}"


def _candidates(option: str, given: Mapping[str, str]) -> tuple[str, ...]:
    return (given[option],) if option in given else VARIANTS[option]
