"""The calls that the backend makes of a row of the profile, without computing them."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from mindspeed_cp.doctor.cann_templates import CallShape
from mindspeed_cp.doctor.habit_cases import HABIT_CASES, HabitCase
from mindspeed_cp.doctor.habits import RecordingOperator, deterministic_algorithms
from mindspeed_cp.doctor.operator import DTYPES, plan_of
from mindspeed_cp.engine import attend_in_process
from mindspeed_cp.layout import Documents
from mindspeed_cp.ops.attention.npu.backend import NpuAttention
from mindspeed_cp.ops.attention.npu.fused_operator import DropoutState, FusedArguments


class NoArithmetic:
    """Fused operators whose results are zeros."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, arguments: FusedArguments
    ) -> tuple[Tensor, Tensor, Tensor, DropoutState]:
        statistics = torch.ones(*q.shape[:-1], 8)
        if arguments.layout == "BSND":
            statistics = statistics.transpose(1, 2)
        return q.new_zeros(*q.shape[:-1], v.shape[-1]), statistics, statistics, (0, 0, 0)

    def backward(self, q: Tensor, k: Tensor, v: Tensor, *more: object) -> tuple[Tensor, Tensor, Tensor]:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    def update(self, *parts: object) -> tuple[Tensor, ...]:
        raise AssertionError("no row merges by the operator")


def calls_of(case: HabitCase, dtype: str) -> tuple[CallShape, ...]:
    """Return the calls that the backend makes of a row, one of HABIT_CASES."""
    return _calls(HABIT_CASES.index(case), dtype)


@cache
def _calls(index: int, dtype: str) -> tuple[CallShape, ...]:
    case = HABIT_CASES[index]
    attention, q_lengths = case.case.attention, case.case.lengths
    kv_lengths = case.case.kv_rows
    q = torch.zeros(sum(q_lengths), attention.heads, attention.head_dim, dtype=DTYPES[dtype])
    k, v = (
        torch.zeros(sum(kv_lengths), attention.kv_heads, width, dtype=DTYPES[dtype])
        for width in (attention.head_dim, attention.head_dim_v)
    )
    recorder = RecordingOperator(NoArithmetic())
    plan = plan_of(case.case, Documents(q_lengths), Documents(kv_lengths))
    with deterministic_algorithms(case.condition.deterministic):
        backend = NpuAttention(**case.case.npu, operator=recorder)
        attend_in_process(plan, q, k, v, q.new_zeros(*q.shape[:-1], attention.head_dim_v), backend)
    return tuple(recorder.calls)
