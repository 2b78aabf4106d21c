"""Rows that a device may fail: each variant of the npu backend, on shapes for which CANN takes different kernels.

CANN has many kernels for a call of attention and takes one by its type, lengths and widths; a device or a release may
be wrong in one of them alone. The rows make the profile of a device, by which settings take the fastest variant that
passed (`mindspeed_cp/device/npu_profile.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_cp.device.npu_profile import DEFAULTS, Condition, NpuIdentity, NpuProfile, ProfileRow
from mindspeed_cp.doctor.guarded import Failure, GuardedCall
from mindspeed_cp.doctor.operator import DTYPES, OperatorCase, check, failed_check
from mindspeed_cp.plan import AttentionConfig
from mindspeed_cp.report.files import write_atomically

# By CANN's public sources, kernels change at these lengths; they divide by nothing where the shape allows it.
SHORT = [301, 97, 510]  # mean below 1,024
LONG = [1290, 801]  # mean from 1,024
EQUAL = [256, 256, 256]
MANY = [515, *(121 + i % 13 for i in range(61))]  # 8,244 rows
MASKED = [1031, 57]  # one matrix of 1,088 rows


@dataclass(frozen=True)
class CapabilityCase:
    """A variant of the npu backend on a shape.

    Attributes:
        option, variant: option of the npu backend that the row is about, and its value.
        case: documents, attention, plan, and the options of its calls.
        condition: the attention that the row concerns.
    """

    option: str
    variant: str
    case: OperatorCase
    condition: Condition = field(default_factory=Condition)

    @property
    def lowering(self) -> str:
        """npu_lowering of its calls."""
        return str(self.case.npu.get("lowering", "tnd"))


def _case(
    name: str,
    lengths: list[int],
    attention: AttentionConfig,
    *,
    option: str = "lowering",
    kv_lengths: list[int] | None = None,
    algorithm: str = "ring",
    ranks: int = 1,
    condition: Condition | None = None,
    **npu: str,
) -> CapabilityCase:
    """Return a case: `option` is what the row is about, `npu` the options that differ from the defaults."""
    case = OperatorCase(name, lengths, attention, kv_lengths, (algorithm, ranks), npu)
    return CapabilityCase(option, npu.get(option, DEFAULTS[option]), case, condition or Condition())


def _widths() -> Iterator[CapabilityCase]:
    for width, width_v in ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128)):
        heads, condition = (
            f"heads of {width}" + f" and {width_v}" * (width != width_v),
            Condition(widths=[width, width_v]),
        )
        for mean, lengths in (("mean below 1,024", [301, 97, 333]), ("mean from 1,024", LONG)):
            attention = AttentionConfig(1, head_dim=width, head_dim_v=width_v)
            yield _case(f"{heads}, {mean}", lengths, attention, condition=condition)


_PLAIN = AttentionConfig(2, 1, 64)
_ONE_HEAD = AttentionConfig(1, head_dim=64)
_TWO_HEADS = AttentionConfig(2, head_dim=128)
_WIDE = AttentionConfig(2, 1, 128)
_FULL = AttentionConfig(2, 1, 64, mask="full")
_GROUP_OF_4 = AttentionConfig(4, 1, 128)
_WINDOW = AttentionConfig(2, 1, 64, window=(37, 0))
_ALIBI = AttentionConfig(2, 1, 64, alibi=True)
_MASKS: dict[str, Any] = {"lowering": "masks"}
_GROUP: dict[str, Any] = {"condition": Condition(min_group=4)}
_BAND: dict[str, Any] = {"condition": Condition(window=True)}
_BITS: dict[str, Any] = {"condition": Condition(deterministic=True)}
_STATISTICS: dict[str, Any] = {"option": "statistics"}
_GAPS: dict[str, Any] = {"option": "key_gaps"}  # of the second document's keys, in one of the steps
_SLOPES: dict[str, Any] = {"option": "alibi", "condition": Condition(alibi=True)}

# fmt: off
CAPABILITY_CASES: tuple[CapabilityCase, ...] = (
    _case("equal lengths, D 128", EQUAL, _TWO_HEADS),
    _case("mean below 1,024", SHORT, _PLAIN),
    _case("mean from 1,024", LONG, _ONE_HEAD),
    _case("other keys than queries, mean below 1,024", [300, 133], _FULL, kv_lengths=[201, 401]),
    _case("other keys than queries, mean from 1,024", [1100, 1000], _FULL, kv_lengths=[1027, 1300]),
    _case("more than 8,192 rows", MANY, _PLAIN),
    _case("masks, rows that fit in one block", [29], _PLAIN, **_MASKS),
    _case("masks, short", [301, 97], _PLAIN, **_MASKS),
    _case("masks, from 1,024", MASKED, _ONE_HEAD, **_MASKS),
    _case("masks, from 1,024, D 96", MASKED, AttentionConfig(1, head_dim=96), **_MASKS),
    _case("masks, other keys than queries", [300, 133], _FULL, kv_lengths=[201, 401], **_MASKS),
    _case("group of 4, D 128, mean below 1,024", SHORT, _GROUP_OF_4, **_GROUP),
    _case("group of 4, D 128, mean from 1,024", LONG, _GROUP_OF_4, **_GROUP),
    _case("group of 4, D 128, masks", [301, 97], _GROUP_OF_4, **_GROUP, **_MASKS),
    _case("window, mean below 1,024", SHORT, _WINDOW, **_BAND),
    _case("window, mean from 1,024", LONG, AttentionConfig(1, head_dim=64, window=(400, 0)), **_BAND),
    _case("window, equal lengths", EQUAL, AttentionConfig(2, head_dim=128, window=(37, 0)), **_BAND),
    _case("window, masks", [301, 97], _WINDOW, **_BAND, **_MASKS),
    _case("deterministic, rows below 1,024", SHORT, _PLAIN, **_BITS),
    _case("deterministic, rows from 1,024", LONG, _ONE_HEAD, **_BITS),
    _case("deterministic, rows from 1,024, other keys", [1100, 800], _FULL, kv_lengths=[1027, 1100], **_BITS),
    _case("deterministic, masks", MASKED, _ONE_HEAD, **_BITS, **_MASKS),
    *_widths(),
    _case("ring of 3, (max, sum)", [601, 97], _PLAIN, ranks=3, **_STATISTICS),
    _case("ring of 3, (lse, 1)", [601, 97], _PLAIN, ranks=3, **_STATISTICS, statistics="lse"),
    _case("(lse, 1), mean from 1,024", LONG, _ONE_HEAD, **_STATISTICS, statistics="lse"),
    _case("ring of 3, masks, (max, sum)", [601, 97], _PLAIN, ranks=3, **_STATISTICS, **_MASKS),
    _case("ring of 3, masks, (lse, 1)", [601, 97], _PLAIN, ranks=3, **_STATISTICS, **_MASKS, statistics="lse"),
    _case("ring of 3, keys copied", [601, 97], _WIDE, ranks=3, **_GAPS),
    _case("ring of 3, key gaps", [601, 97], _WIDE, ranks=3, **_GAPS, key_gaps="skipped"),
    _case("ring of 4, many key gaps", [301, 97, 200], _PLAIN, ranks=4, **_GAPS, key_gaps="skipped"),
    _case("ALiBi, ring of 3, a call for each square", [603, 97], _ALIBI, ranks=3, **_SLOPES),
    _case("ALiBi, squares from 1,024", LONG, AttentionConfig(1, head_dim=64, alibi=True), **_SLOPES),
    _case("ALiBi, ring of 3, shared starts", [603, 97], _ALIBI, ranks=3, **_SLOPES, alibi="shared"),
    _case("ALiBi, 4 ranks, shared starts", [401, 297, 350], _ALIBI, algorithm="all_gather", ranks=4, **_SLOPES,
          alibi="shared"),
)
# fmt: on


def capability_calls() -> list[tuple[CapabilityCase, str, GuardedCall]]:
    """Return case, type and guarded call of every row, in an order in which references can be used again."""
    return [
        (case, dtype, GuardedCall(check, ("npu", dtype, case.case, case.condition.deterministic), case.case.name))
        for case in sorted(CAPABILITY_CASES, key=lambda case: repr(case.case.reference_key))
        for dtype in DTYPES
    ]


def profile_row(case: CapabilityCase, dtype: str, result: dict[str, Any] | Failure) -> ProfileRow:
    """Return the row of a result of :func:`mindspeed_cp.doctor.operator.check`, or of its failure."""
    if isinstance(result, Failure):
        result = failed_check("npu", dtype, case.case, result.error)
    differences = {name: size if size < float("inf") else None for name, size in result["differences"].items()}
    values: dict[str, Any] = {
        **{key: getattr(case, key) for key in ("option", "variant", "lowering", "condition")},
        **{key: result[key] for key in ("limit", "ok", "error")},
        **{"dtype": dtype, "differences": differences, "seconds": result["seconds"] or None},
    }
    return ProfileRow(name=case.case.name, **values)


def make_profile(rows: Sequence[ProfileRow], identity: NpuIdentity) -> NpuProfile:
    """Return the profile of rows and of the device that they were measured on."""
    return NpuProfile(format=2, rows=list(rows), **vars(identity))


def write_json(option: str, path: Path, content: dict[str, Any]) -> None:
    """Write a file of an option; one that is there is replaced as a whole.

    Raises:
        ConfigError: it cannot be written.
    """
    write_atomically(option, path, lambda new: new.write_text(json.dumps(content, indent=1) + "\n", "utf-8"))
