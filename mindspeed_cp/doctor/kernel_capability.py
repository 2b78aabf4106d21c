"""Rows that a device may fail: each variant of the npu backend, on shapes for which CANN takes different kernels.

CANN has many kernels for a call of attention and takes one by its type, lengths and widths; a device or a release may be
wrong in one of them alone. The rows make the profile of a device, by which settings take the fastest variant that
passed (`mindspeed_cp/device/npu_variants.py`).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_cp.device.npu_profile import Condition, NpuIdentity, NpuProfile, ProfileRow, read_profile
from mindspeed_cp.device.npu_variants import VARIANTS, Need, choose_variants
from mindspeed_cp.doctor.guarded import Failure, GuardedCall
from mindspeed_cp.doctor.operator import DTYPES, MAX_DIFFERENCE, OperatorCase, plan_of
from mindspeed_cp.doctor.reference import RESULT_NAMES, reference_inputs, reference_results, relative_difference
from mindspeed_cp.engine import attend_in_process
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents
from mindspeed_cp.ops.attention.npu.backend import NpuAttention
from mindspeed_cp.ops.attention.npu.fused_operator import FusedOperator, TorchNpuOperator
from mindspeed_cp.plan import AttentionConfig, Plan
from mindspeed_cp.report.files import write_atomically

ON_ONE_RANK: tuple[str, int, dict[str, Any]] = ("ring", 1, {})

# By CANN's public sources, kernels change at these lengths; they divide by nothing where the shape does not need them to.
SHORT = [301, 97, 510]  # mean below 1,024
LONG = [1290, 801]  # mean from 1,024
EQUAL = [256, 256, 256]
MANY = [515, *(121 + i % 13 for i in range(61))]  # 8,244 rows
MASKED = [1031, 57]  # one matrix of 1,088 rows

#: Error of a deterministic row whose second run gave other bits.
_OTHER_BITS = "two runs under deterministic algorithms have other bits in {}"


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


def _shape(
    name: str,
    lengths: list[int],
    attention: AttentionConfig,
    kv_lengths: list[int] | None = None,
    plan: tuple[str, int, dict[str, Any]] = ON_ONE_RANK,
    **npu: str,
) -> OperatorCase:
    return OperatorCase(name, lengths, attention, kv_lengths, plan, npu)


def _widths() -> list[CapabilityCase]:
    rows = []
    for width, width_v in ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128)):
        heads = f"heads of {width}" + f" and {width_v}" * (width != width_v)
        for mean, lengths in (("mean below 1,024", [301, 97, 333]), ("mean from 1,024", [1290, 801])):
            case = _shape(f"{heads}, {mean}", lengths, AttentionConfig(1, head_dim=width, head_dim_v=width_v))
            rows.append(CapabilityCase("lowering", "tnd", case, Condition(widths=[width, width_v])))
    return rows


_PLAIN = AttentionConfig(2, 1, 64)
_ONE_HEAD = AttentionConfig(1, head_dim=64)
_WIDE = AttentionConfig(2, 1, 128)
_FULL = AttentionConfig(2, 1, 64, mask="full")
_GROUP_OF_4 = AttentionConfig(4, 1, 128)
_ALIBI = AttentionConfig(2, 1, 64, alibi=True)
_RING: tuple[str, int, dict[str, Any]] = ("ring", 3, {})

#: Shapes of each lowering by the attention that they concern.
_LOWERINGS: list[tuple[Condition, list[OperatorCase]]] = [
    (
        Condition(),
        [
            _shape("equal lengths, D 128", EQUAL, AttentionConfig(2, head_dim=128)),
            _shape("mean below 1,024", SHORT, _PLAIN),
            _shape("mean from 1,024", LONG, _ONE_HEAD),
            _shape("other keys than queries, mean below 1,024", [300, 133], _FULL, [201, 401]),
            _shape("other keys than queries, mean from 1,024", [1100, 1000], _FULL, [1027, 1300]),
            _shape("more than 8,192 rows", MANY, _PLAIN),
            _shape("masks, rows that fit in one block", [29], _PLAIN, lowering="masks"),
            _shape("masks, short", [301, 97], _PLAIN, lowering="masks"),
            _shape("masks, from 1,024", MASKED, _ONE_HEAD, lowering="masks"),
            _shape("masks, from 1,024, D 96", MASKED, AttentionConfig(1, head_dim=96), lowering="masks"),
            _shape("masks, other keys than queries", [300, 133], _FULL, [201, 401], lowering="masks"),
        ],
    ),
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

_ALIBI_VARIANTS = [
    ("split", _shape("ALiBi, ring of 3, a call for each square", [603, 97], _ALIBI, plan=_RING)),
    ("split", _shape("ALiBi, squares from 1,024", LONG, AttentionConfig(1, head_dim=64, alibi=True))),
    ("shared", _shape("ALiBi, ring of 3, shared starts", [603, 97], _ALIBI, plan=_RING, alibi="shared")),
    (
        "shared",
        _shape("ALiBi, 4 ranks, shared starts", [401, 297, 350], _ALIBI, plan=("all_gather", 4, {}), alibi="shared"),
    ),
]

CAPABILITY_CASES: tuple[CapabilityCase, ...] = (
    *(
        CapabilityCase("lowering", str(case.npu.get("lowering", "tnd")), case, condition)
        for condition, cases in _LOWERINGS
        for case in cases
    ),
    *_widths(),
    *(CapabilityCase(option, variant, case) for option, variant, case in _VARIANTS),
    *(CapabilityCase("alibi", variant, case, Condition(alibi=True)) for variant, case in _ALIBI_VARIANTS),
)


def capability_calls(
    seed: int = 0, cases: Sequence[CapabilityCase] = CAPABILITY_CASES
) -> list[tuple[CapabilityCase, str, GuardedCall]]:
    """Return case, type and guarded call of every row, in an order in which references can be used again."""
    return [
        (case, dtype, GuardedCall(measure_capability, (case, dtype, seed), case.case.name))
        for case in sorted(cases, key=lambda case: repr(case.case.reference_key(seed)))
        for dtype in DTYPES
    ]


def measure_capability(
    case: CapabilityCase, dtype: str, seed: int, operator: FusedOperator | None = None
) -> dict[str, Any]:
    """Run forward and backward of a case twice and compare the first with the fp64 reference.

    Args:
        case: the case.
        dtype: "fp32", "fp16" or "bf16".
        seed: seed of the inputs.
        operator: the fused operators, for tensors on the CPU; None: those of torch_npu, on the NPU.

    Returns:
        {"differences", "seconds", "error"} of a ProfileRow: the seconds are those of the second run, whose kernels are
        loaded.
    """
    device = "npu" if operator is None else "cpu"
    key = case.case.reference_key(seed)
    rows = [x.to(device, DTYPES[dtype], copy=True) for x in reference_inputs(key)]
    backend = NpuAttention(**case.case.npu, operator=TorchNpuOperator() if operator is None else operator)
    plan = plan_of(case.case, Documents(case.case.lengths), Documents(case.case.kv_rows))
    with deterministic_algorithms(case.condition.deterministic):
        first = _run(plan, rows, backend)
        start = time.perf_counter()
        second = _run(plan, rows, backend)
        seconds = time.perf_counter() - start
    reference = reference_results(key)
    differences = {name: relative_difference(first[name], reference[name]) for name in RESULT_NAMES}
    other_bits = [name for name in RESULT_NAMES if not torch.equal(first[name], second[name])]
    error = _OTHER_BITS.format(", ".join(other_bits)) if case.condition.deterministic and other_bits else None
    return {
        "differences": {name: size if size < float("inf") else None for name, size in differences.items()},
        "seconds": seconds,
        "error": error,
    }


def _run(plan: Plan, rows: Sequence[Tensor], backend: NpuAttention) -> dict[str, Tensor]:
    """Return the results of forward and backward, on the host."""
    q, k, v, dout = rows
    results = vars(attend_in_process(plan, q, k, v, dout, backend))
    return {name: x.cpu() for name, x in results.items() if x is not None}


@contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Let torch use deterministic algorithms alone within the block, if enabled.

    torch.use_deterministic_algorithms does the same, and imports the compiler: seconds.
    """
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error" if enabled else "default")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def profile_row(case: CapabilityCase, dtype: str, result: dict[str, Any] | Failure) -> ProfileRow:
    """Return the row of a result of :func:`measure_capability`, or of its failure."""
    limit = MAX_DIFFERENCE[dtype]
    if isinstance(result, Failure):
        result = {"differences": {}, "seconds": None, "error": result.error}
    sizes = result["differences"].values()
    values: dict[str, Any] = {
        "name": case.case.name,
        "option": case.option,
        "variant": case.variant,
        "lowering": case.lowering,
        "dtype": dtype,
        "condition": case.condition,
        "limit": limit,
        "ok": result["error"] is None and all(size is not None and size <= limit for size in sizes),
    }
    return ProfileRow(**values, **result)


def make_profile(rows: Sequence[ProfileRow], identity: NpuIdentity) -> NpuProfile:
    """Return the profile of rows and of the device that they were measured on."""
    return NpuProfile(format=2, rows=list(rows), **vars(identity))


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


def write_json(option: str, path: Path, content: dict[str, Any]) -> None:
    """Write a file of an option; one that is there is replaced as a whole.

    Raises:
        ConfigError: it cannot be written.
    """
    write_atomically(option, path, lambda new: new.write_text(json.dumps(content, indent=1) + "\n", "utf-8"))
