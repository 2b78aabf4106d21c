"""Rows of the profile over the stand-in's arithmetic on the CPU: what a fault breaks fails, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from mindspeed_cp.device.npu_profile import NpuIdentity, NpuProfile, ProfileRow
from mindspeed_cp.device.npu_variants import Need, choose_variants
from mindspeed_cp.doctor.guarded import Failure
from mindspeed_cp.doctor.habit_cases import HABIT_CASES, HabitCase
from mindspeed_cp.doctor.habits import habit_calls, make_profile, measure_habit, profile_row
from mindspeed_cp.doctor.operator import MAX_DIFFERENCE
from mindspeed_cp.doctor.profile_tables import profile_tables
from tests.host_cann import oracle_faults as faults
from tests.ops.npu_oracle import OracleOperator

IDENTITY = NpuIdentity("a stand-in", "2.13.0", None)


@pytest.fixture
def fault() -> Iterator[Callable[[str | None], None]]:
    yield faults.set_fault
    faults.set_fault(None)


def quick(case: HabitCase) -> bool:
    """Return True for rows of little arithmetic, of which every variant has some."""
    scores = sum(length**2 for length in case.case.lengths) * case.case.attention.heads * case.case.attention.head_dim
    return scores < 7e7


def measured(dtype: str, *words: str) -> list[ProfileRow]:
    """Return the rows of quick cases, or of all those with these words in their names."""
    rows = []
    for case, type_name, _ in habit_calls():
        wanted = any(word in case.case.name for word in words) if words else quick(case)
        if type_name == dtype and wanted:
            rows.append(profile_row(case, dtype, measure_habit(case, dtype, 3, OracleOperator())))
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
    assert all(set(row.differences) == {"out", "lse", "dq", "dk", "dv"} and row.templates for row in rows)
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
    case = HABIT_CASES[0]
    row = profile_row(case, "fp16", Failure("gave no result within 60 s"))
    assert not row.ok and row.failure == f"{case.case.name} (fp16): gave no result within 60 s"
    infinite = {"templates": [], "differences": {"out": 0.0, "dq": None}, "seconds": 0.1, "error": None}
    row = profile_row(case, "fp16", infinite)
    assert not row.ok and row.failure == f"{case.case.name} (fp16): dq is not finite"


def test_tables_have_every_row_and_what_settings_take() -> None:
    rows = [profile_row(case, dtype, Failure("did not start")) for case, dtype, _ in habit_calls()]
    ok = [row.model_copy(update={"ok": True, "error": None, "differences": {"out": 0.0}}) for row in rows]
    for content, lowering in ((rows, "none passed"), (ok, "tnd")):
        profile = NpuProfile(format=1, device="d", torch_npu="1", cann=None, rows=content)
        table, choices = profile_tables(profile)
        assert len(table.rows) == len(rows) and all(len(row) == len(table.columns) for row in table.rows)
        assert [row[0] for row in choices.rows] == ["fp32", "fp32, ALiBi", "fp16", "fp16, ALiBi", "bf16", "bf16, ALiBi"]
        assert {row[1] for row in choices.rows} == {lowering}
        assert all(len(row) == len(choices.columns) for row in choices.rows)
