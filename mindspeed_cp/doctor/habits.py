"""Rows of the profile of a device: each variant of the npu backend on each shape, against dense attention in fp64."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mindspeed_cp.device.npu_profile import NpuIdentity, NpuProfile, ProfileRow
from mindspeed_cp.doctor.cann_templates import CallShape, describe_templates
from mindspeed_cp.doctor.guarded import Failure, GuardedCall
from mindspeed_cp.doctor.habit_cases import HABIT_CASES, HabitCase
from mindspeed_cp.doctor.operator import DTYPES, MAX_DIFFERENCE, plan_of
from mindspeed_cp.doctor.reference import RESULT_NAMES, reference_inputs, reference_results, relative_difference
from mindspeed_cp.engine import attend_in_process
from mindspeed_cp.layout import Documents
from mindspeed_cp.ops.attention.npu.backend import NpuAttention
from mindspeed_cp.ops.attention.npu.fused_operator import (
    DropoutState,
    FusedArguments,
    FusedOperator,
    TorchNpuOperator,
)
from mindspeed_cp.plan import Plan

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

#: Error of a deterministic row whose second run gave other bits.
_OTHER_BITS = "two runs under deterministic algorithms have other bits in {}"


class RecordingOperator:
    """The fused operators, and the shapes of the calls that they got."""

    def __init__(self, operator: FusedOperator) -> None:
        self.calls: list[CallShape] = []
        self._operator = operator

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, arguments: FusedArguments
    ) -> tuple[Tensor, Tensor, Tensor, DropoutState]:
        """Record the call and make it."""
        self.calls.append(call_shape(q, k, v, arguments))
        return self._operator.forward(q, k, v, arguments)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, out: Tensor, softmax_max: Tensor, softmax_sum: Tensor,
        rng_state: DropoutState, arguments: FusedArguments,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Make the call; its shape is that of its forward."""
        return self._operator.backward(q, k, v, dout, out, softmax_max, softmax_sum, rng_state, arguments)

    def update(self, before: tuple[Tensor, Tensor, Tensor], part: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Make the call."""
        return self._operator.update(before, part)


def call_shape(q: Tensor, k: Tensor, v: Tensor, arguments: FusedArguments) -> CallShape:
    """Return what decides the template of a call."""
    if arguments.actual_seq_qlen is None or arguments.actual_seq_kvlen is None:
        lengths = (q.shape[1],) * q.shape[0], (k.shape[1],) * k.shape[0]
    else:
        lengths = _lengths(arguments.actual_seq_qlen), _lengths(arguments.actual_seq_kvlen)
    return CallShape(
        dtype=_NAMES[q.dtype],
        layout=arguments.layout,
        heads=arguments.heads,
        kv_heads=k.shape[-2],
        head_dim=q.shape[-1],
        head_dim_v=v.shape[-1],
        q_lengths=lengths[0],
        kv_lengths=lengths[1],
        sparse_mode=arguments.sparse_mode,
        has_mask=arguments.mask is not None,
        has_bias=arguments.slopes is not None,
        has_dropout=arguments.keep_prob < 1,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


def habit_calls(seed: int = 0, cases: Sequence[HabitCase] = HABIT_CASES) -> list[tuple[HabitCase, str, GuardedCall]]:
    """Return case, type and guarded call of every row, in an order in which references can be used again."""
    return [
        (case, dtype, GuardedCall(measure_habit, (case, dtype, seed), case.case.name))
        for case in sorted(cases, key=lambda case: repr(case.case.reference_key(seed)))
        for dtype in DTYPES
    ]


def profile_row(case: HabitCase, dtype: str, result: dict[str, Any] | Failure) -> ProfileRow:
    """Return the row of a result of :func:`measure_habit`, or of its failure."""
    limit = MAX_DIFFERENCE[dtype]
    if isinstance(result, Failure):
        result = {"templates": [], "differences": {}, "seconds": None, "error": result.error}
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
    return NpuProfile(format=1, rows=list(rows), **vars(identity))


def measure_habit(case: HabitCase, dtype: str, seed: int, operator: FusedOperator | None = None) -> dict[str, Any]:
    """Run forward and backward of a case twice and compare the first with the fp64 reference.

    Args:
        case: the case.
        dtype: "fp32", "fp16" or "bf16".
        seed: seed of the inputs.
        operator: the fused operators, for tensors on the CPU; None: those of torch_npu, on the NPU.

    Returns:
        {"templates", "differences", "seconds", "error"} of a ProfileRow: the seconds are those of the second run, whose
        kernels are loaded.
    """
    device = "npu" if operator is None else "cpu"
    key = case.case.reference_key(seed)
    rows = [x.to(device, DTYPES[dtype], copy=True) for x in reference_inputs(key)]
    recorder = RecordingOperator(TorchNpuOperator() if operator is None else operator)
    backend = NpuAttention(**case.case.npu, operator=recorder)
    plan = plan_of(case.case, Documents(case.case.lengths), Documents(case.case.kv_rows))
    with deterministic_algorithms(case.condition.deterministic):
        first, templates = _run(plan, rows, backend), describe_templates(recorder.calls)
        start = time.perf_counter()
        second = _run(plan, rows, backend)
        seconds = time.perf_counter() - start
    reference = reference_results(key)
    differences = {name: relative_difference(first[name], reference[name]) for name in RESULT_NAMES}
    other_bits = [name for name in RESULT_NAMES if not torch.equal(first[name], second[name])]
    error = _OTHER_BITS.format(", ".join(other_bits)) if case.condition.deterministic and other_bits else None
    return {
        "templates": templates,
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


def _lengths(ends: Sequence[int]) -> tuple[int, ...]:
    return tuple(end - start for start, end in zip((0, *ends), ends, strict=False))
