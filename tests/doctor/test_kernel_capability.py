"""Rows of the profile over the stand-in's arithmetic on the CPU: what a fault breaks fails, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from mindspeed_cp.device.npu_profile import Need, NpuIdentity, ProfileRow, choose_variants
from mindspeed_cp.doctor.guarded import Failure
from mindspeed_cp.doctor.kernel_capability import (
    CAPABILITY_CASES,
    CapabilityCase,
    capability_calls,
    make_profile,
    profile_row,
)
from mindspeed_cp.doctor.operator import DTYPES, MAX_DIFFERENCE, check, failed_check, reference_inputs
from mindspeed_cp.engine import attend_in_process
from mindspeed_cp.ops.attention.npu.backend import NpuAttention
from mindspeed_cp.ops.attention.npu.fused_operator import DropoutState, FusedArguments
from tests.host_cann import oracle_faults as faults
from tests.ops.npu_oracle import OracleOperator

IDENTITY = NpuIdentity("a stand-in", "2.13.0", None)


@pytest.fixture
def fault() -> Iterator[Callable[[str | None], None]]:
    yield faults.set_fault
    faults.set_fault(None)


def quick(case: CapabilityCase) -> bool:
    """Return True for rows of little arithmetic, of which every variant has some."""
    scores = sum(length**2 for length in case.case.lengths) * case.case.attention.heads * case.case.attention.head_dim
    return scores < 7e7


def measured(dtype: str, *words: str) -> list[ProfileRow]:
    """Return the rows of quick cases, or of all those with these words in their names."""
    rows = []
    for case, type_name, _ in capability_calls():
        wanted = any(word in case.case.name for word in words) if words else quick(case)
        if type_name == dtype and wanted:
            result = check("npu", dtype, case.case, case.condition.deterministic, OracleOperator())
            rows.append(profile_row(case, dtype, result))
    return rows


def taken(rows: list[ProfileRow], *, alibi: bool = True) -> dict[str, str]:
    profile = make_profile(rows, IDENTITY)
    need = Need(rows[0].dtype, alibi, window=True, widths=(128, 128), group=8, deterministic=False)
    return choose_variants(profile, "doctor.json", need, {})


@pytest.mark.parametrize("dtype", ["bf16", *(pytest.param(x, marks=pytest.mark.thorough) for x in ("fp32", "fp16"))])
def test_without_a_fault_all_rows_pass_and_the_fast_variants_are_taken(
    dtype: str, request: pytest.FixtureRequest
) -> None:
    rows = measured(dtype, *([""] if request.config.getoption("thorough") else []))
    assert len(rows) > 20 and all(row.ok and row.error is None for row in rows), [row for row in rows if not row.ok]
    assert all(set(row.differences) == {"out", "lse", "dq", "dk", "dv"} for row in rows)
    assert all(row.seconds is not None and row.seconds > 0 for row in rows)
    fast = {"lowering": "tnd", "alibi": "shared", "statistics": "lse", "key_gaps": "skipped"}
    assert taken(rows) == fast and not torch.are_deterministic_algorithms_enabled()


VARIANTS = ("ALiBi, ring", "ring of 3", "equal lengths", "masks, short")


@pytest.mark.parametrize(
    ("name", "failed", "choice"),
    [
        (faults.STARTS_FIRST, {("alibi", "shared")}, {"alibi": "split"}),
        (faults.SUM_OF_ONE, {("statistics", "lse")}, {"statistics": "max_sum"}),
        (faults.GAPS, {("key_gaps", "skipped")}, {"key_gaps": "copied"}),
    ],
)
def test_a_fault_in_a_fast_variant_fails_its_rows_alone(
    name: str, failed: set[tuple[str, str]], choice: dict[str, str], fault: Callable[[str | None], None]
) -> None:
    fault(name)
    rows = measured("bf16", *VARIANTS)
    assert {(row.option, row.variant) for row in rows if not row.ok} == failed
    fast = {"lowering": "tnd", "alibi": "shared", "statistics": "lse", "key_gaps": "skipped"}
    assert taken(rows) == fast | choice


def test_a_fault_in_packed_calls_of_one_shape_leaves_masks(fault: Callable[[str | None], None]) -> None:
    fault(faults.EQUAL_LENGTHS)
    rows = measured("bf16", *VARIANTS)
    names = {row.name for row in rows if not row.ok and row.option == "lowering"}
    assert names == {"equal lengths, D 128", "window, equal lengths"}
    assert taken(rows, alibi=False)["lowering"] == "masks"


def test_other_bits_fail_deterministic_rows_alone(fault: Callable[[str | None], None]) -> None:
    fault(faults.OTHER_BITS)
    rows = measured("bf16", "deterministic, rows below", "mean below 1,024")
    assert [row.name for row in rows if not row.ok] == ["deterministic, rows below 1,024"]
    [row] = [row for row in rows if not row.ok]
    assert row.error == "two runs under deterministic algorithms have other bits in dq"
    assert max(size or 0 for size in row.differences.values()) <= MAX_DIFFERENCE["bf16"]


def test_a_row_without_a_result_says_why() -> None:
    case = CAPABILITY_CASES[0]
    row = profile_row(case, "fp16", Failure("gave no result within 60 s"))
    assert not row.ok and row.failure == f"{case.case.name} (fp16): gave no result within 60 s"
    infinite = {"differences": {"out": 0.0, "dq": float("inf")}, "error": None}
    row = profile_row(case, "fp16", failed_check("npu", "fp16", case.case, "") | infinite)
    assert not row.ok and row.failure == f"{case.case.name} (fp16): dq is not finite"


class CallsWithoutArithmetic:
    """Fused operators that keep the calls of the backend; results are zeros."""

    def __init__(self) -> None:
        self.calls: list[FusedArguments] = []

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, arguments: FusedArguments
    ) -> tuple[Tensor, Tensor, Tensor, DropoutState]:
        self.calls.append(arguments)
        statistics = torch.ones(*q.shape[:-1], 8)
        if arguments.layout == "BSND":
            statistics = statistics.transpose(1, 2)
        return q.new_zeros(*q.shape[:-1], v.shape[-1]), statistics, statistics, (0, 0, 0)

    def backward(self, q: Tensor, k: Tensor, v: Tensor, *more: object) -> tuple[Tensor, Tensor, Tensor]:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    def update(self, *parts: object) -> tuple[Tensor, ...]:
        raise AssertionError("no row merges by the operator")


def calls_of(case: CapabilityCase) -> list[FusedArguments]:
    operator, plan = CallsWithoutArithmetic(), case.case.make_plan()
    rows = [torch.zeros_like(x) for x in reference_inputs(case.case.reference_key)]
    attend_in_process(plan, *rows, NpuAttention(**case.case.npu, operator=operator))
    return operator.calls


def test_rows_of_a_variant_have_the_calls_that_it_is_about() -> None:
    for case in CAPABILITY_CASES:
        calls = calls_of(case)
        assert all((call.layout == "BSND") == (case.lowering == "masks") for call in calls)
        lengths = [np.diff([0, *(call.actual_seq_qlen or (1,))]) for call in calls]
        has_gaps = any(0 in x for x in lengths)
        assert has_gaps == (case.option == "key_gaps" and case.variant == "skipped"), case.case.name
        has_bias = any(call.slopes is not None for call in calls)
        assert has_bias == (case.option == "alibi") == case.condition.alibi
        attention = case.case.attention
        if case.condition.widths is not None:
            assert [attention.head_dim, attention.head_dim_v] == case.condition.widths
        if case.variant == "shared":
            assert any(len(x) > 1 for x in lengths)
        assert attention.heads // attention.kv_heads >= case.condition.min_group
        assert case.condition.window == (attention.window is not None)


def test_every_variant_has_rows_in_every_type_and_every_name_is_one_row() -> None:
    rows = [(case.option, case.variant, case.lowering, dtype) for case, dtype, _ in capability_calls()]
    variants = {
        *(("lowering", name, name) for name in ("tnd", "masks")),
        *(("alibi", name, "tnd") for name in ("split", "shared")),
        *(("statistics", name, lowering) for name in ("max_sum", "lse") for lowering in ("tnd", "masks")),
        *(("key_gaps", name, "tnd") for name in ("copied", "skipped")),
    }
    assert {row[:3] for row in rows} == variants
    assert all((*variant, dtype) in rows for variant in variants for dtype in DTYPES)
    names, counts = np.unique([case.case.name for case in CAPABILITY_CASES], return_counts=True)
    assert (counts == 1).all(), names[counts > 1]
