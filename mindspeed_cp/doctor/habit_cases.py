"""The shapes on which the doctor runs each variant of the npu backend, one for each way in which CANN computes a call.

Which templates a shape takes is in `cann_templates.py`; a test compares the rows with it. Lengths divide by nothing
where the shape does not need them to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mindspeed_cp.device.npu_profile import Condition
from mindspeed_cp.doctor.operator import OperatorCase
from mindspeed_cp.plan import AttentionConfig

ON_ONE_RANK: tuple[str, int, dict[str, Any]] = ("ring", 1, {})

SHORT = [301, 97, 510]  # mean below 1,024
LONG = [1290, 801]  # mean from 1,024
EQUAL = [256, 256, 256]
MANY = [515, *(121 + i % 13 for i in range(61))]  # 8,244 rows
MASKED = [1031, 57]  # one matrix of 1,088 rows


@dataclass(frozen=True)
class HabitCase:
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


def _shape(
    name: str,
    lengths: list[int],
    attention: AttentionConfig,
    kv_lengths: list[int] | None = None,
    plan: tuple[str, int, dict[str, Any]] = ON_ONE_RANK,
    **npu: str,
) -> OperatorCase:
    return OperatorCase(name, lengths, attention, kv_lengths, plan, npu)


def _widths() -> list[HabitCase]:
    rows = []
    for width, width_v in ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128)):
        heads = f"heads of {width}" + f" and {width_v}" * (width != width_v)
        for mean, lengths in (("mean below 1,024", [301, 97, 333]), ("mean from 1,024", [1290, 801])):
            case = _shape(f"{heads}, {mean}", lengths, AttentionConfig(1, head_dim=width, head_dim_v=width_v))
            rows.append(HabitCase("lowering", "tnd", case, Condition(widths=[width, width_v])))
    return rows


_PLAIN = AttentionConfig(2, 1, 64)
_ONE_HEAD = AttentionConfig(1, head_dim=64)
_WIDE = AttentionConfig(2, 1, 128)
_FULL = AttentionConfig(2, 1, 64, mask="full")
_GROUP_OF_4 = AttentionConfig(4, 1, 128)
_RING: tuple[str, int, dict[str, Any]] = ("ring", 3, {})

_TND = [
    _shape("equal lengths, D 128", EQUAL, AttentionConfig(2, head_dim=128)),
    _shape("mean below 1,024", SHORT, _PLAIN),
    _shape("mean from 1,024", LONG, _ONE_HEAD),
    _shape("other keys than queries, mean below 1,024", [300, 133], _FULL, [201, 401]),
    _shape("other keys than queries, mean from 1,024", [1100, 1000], _FULL, [1027, 1300]),
    _shape("more than 8,192 rows", MANY, _PLAIN),
]

_MASKS = [
    _shape("masks, rows that fit in one block", [29], _PLAIN, lowering="masks"),
    _shape("masks, short", [301, 97], _PLAIN, lowering="masks"),
    _shape("masks, from 1,024", MASKED, _ONE_HEAD, lowering="masks"),
    _shape("masks, from 1,024, D 96", MASKED, AttentionConfig(1, head_dim=96), lowering="masks"),
    _shape("masks, other keys than queries", [300, 133], _FULL, [201, 401], lowering="masks"),
]

_OF_SOME: list[tuple[Condition, list[OperatorCase]]] = [
    (
        Condition(min_group=4),
        [
            _shape("group of 4, D 128, mean below 1,024", SHORT, _GROUP_OF_4),
            _shape("group of 4, D 128, mean from 1,024", LONG, _GROUP_OF_4),
            _shape("group of 4, D 128, masks", [301, 97], _GROUP_OF_4, lowering="masks"),
        ],
    ),
    (
        Condition(window=True),
        [
            _shape("window, mean below 1,024", SHORT, AttentionConfig(2, 1, 64, window=(37, 0))),
            _shape("window, mean from 1,024", LONG, AttentionConfig(1, head_dim=64, window=(400, 0))),
            _shape("window, equal lengths", EQUAL, AttentionConfig(2, head_dim=128, window=(37, 0))),
            _shape("window, masks", [301, 97], AttentionConfig(2, 1, 64, window=(37, 0)), lowering="masks"),
        ],
    ),
    (
        Condition(deterministic=True),
        [
            _shape("deterministic, rows below 1,024", SHORT, _PLAIN),
            _shape("deterministic, rows from 1,024", LONG, _ONE_HEAD),
            _shape("deterministic, rows from 1,024, other keys", [1100, 800], _FULL, [1027, 1100]),
            _shape("deterministic, masks", MASKED, _ONE_HEAD, lowering="masks"),
        ],
    ),
]

_VARIANTS = [
    ("statistics", "max_sum", _shape("ring of 3, (max, sum)", [601, 97], _PLAIN, plan=_RING)),
    ("statistics", "lse", _shape("ring of 3, (lse, 1)", [601, 97], _PLAIN, plan=_RING, statistics="lse")),
    ("statistics", "lse", _shape("(lse, 1), mean from 1,024", LONG, _ONE_HEAD, statistics="lse")),
    ("statistics", "max_sum", _shape("ring of 3, masks, (max, sum)", [601, 97], _PLAIN, plan=_RING, lowering="masks")),
    (
        "statistics",
        "lse",
        _shape("ring of 3, masks, (lse, 1)", [601, 97], _PLAIN, plan=_RING, lowering="masks", statistics="lse"),
    ),
    # the second document's keys have a gap before them in one of the steps
    ("key_gaps", "copied", _shape("ring of 3, keys copied", [601, 97], _WIDE, plan=_RING)),
    ("key_gaps", "skipped", _shape("ring of 3, key gaps", [601, 97], _WIDE, plan=_RING, key_gaps="skipped")),
    (
        "key_gaps",
        "skipped",
        _shape("ring of 4, many key gaps", [301, 97, 200], _PLAIN, plan=("ring", 4, {}), key_gaps="skipped"),
    ),
]

_ALIBI = AttentionConfig(2, 1, 64, alibi=True)
_ALIBI_VARIANTS = [
    ("split", _shape("ALiBi, ring of 3, a call for each square", [603, 97], _ALIBI, plan=_RING)),
    ("split", _shape("ALiBi, squares from 1,024", LONG, AttentionConfig(1, head_dim=64, alibi=True))),
    ("shared", _shape("ALiBi, ring of 3, shared starts", [603, 97], _ALIBI, plan=_RING, alibi="shared")),
    (
        "shared",
        _shape("ALiBi, 4 ranks, shared starts", [401, 297, 350], _ALIBI, plan=("all_gather", 4, {}), alibi="shared"),
    ),
]

HABIT_CASES: tuple[HabitCase, ...] = (
    *(HabitCase("lowering", "tnd", case) for case in _TND),
    *(HabitCase("lowering", "masks", case) for case in _MASKS),
    *(
        HabitCase("lowering", str(case.npu.get("lowering", "tnd")), case, condition)
        for condition, cases in _OF_SOME
        for case in cases
    ),
    *_widths(),
    *(HabitCase(option, variant, case) for option, variant, case in _VARIANTS),
    *(HabitCase("alibi", variant, case, Condition(alibi=True)) for variant, case in _ALIBI_VARIANTS),
)
