"""How many calls of the fused operator a layer needs."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from mindspeed_cp import AttentionConfig, Documents, Plan, Topology, build_plan
from mindspeed_cp.ops.attention.lowering.fused_call import CallLimits
from mindspeed_cp.ops.attention.lowering.fused_lowering import lower_to_fused_calls
from tests.ops.test_npu_lowering import DEFAULT, lowered


def counts(plan: Plan, limits: CallLimits = DEFAULT, direction: str = "forward") -> list[int]:
    """Calls of each rank."""
    return [sum(map(len, lowered(plan, rank, limits, direction).values())) for rank in range(plan.ranks)]


@pytest.mark.parametrize(
    ("tokens", "share", "forward", "backward"),
    [
        (1 << 15, True, 8.9, 10.9),
        (1 << 15, False, 16.8, 28.8),
        ((1 << 15) + 5, True, 8.9, 10.9),
        ((1 << 15) + 5, False, 48.4, 59.4),
    ],
)
def test_calls_of_a_layer_with_alibi_are_those_of_the_table(tokens, share, forward, backward):
    """The table of benchmarks/results/ascend.md: a causal ring, cp 8, mean over the ranks."""
    plan = build_plan(Documents([tokens]), Topology(1, 8), AttentionConfig(8, 8, 64, alibi=True), "ring")
    means = (np.mean(counts(plan, CallLimits(share_calls=share), direction)) for direction in ("forward", "backward"))
    assert tuple(round(float(mean), 1) for mean in means) == (forward, backward)


@pytest.mark.parametrize("documents", [1, 10, 300, 1000])
def test_calls_of_a_layer_without_bias_are_those_of_the_table(documents):
    """One a step in the forward, at most two in the backward, which computes its own block in two halves."""
    lengths = [1 << 15] if documents == 1 else np.random.default_rng(documents).integers(16, 2000, documents)
    plan = build_plan(Documents(lengths), Topology(1, 8), AttentionConfig(8, 8, 64), "ring")
    for rank in range(8):
        forward = list(lowered(plan, rank).values())
        assert [len(calls) for calls in forward] == [1] * 8
        # No keys are copied, and queries only where some are left out.
        assert all(isinstance(call.k, slice) for calls in forward for call in calls)
        backward: dict[int, int] = {}
        for (step, _), calls in lowered(plan, rank, direction="backward").items():
            backward[step] = backward.get(step, 0) + len(calls)
        assert len(backward) >= 8 and max(backward.values()) <= 2


@pytest.mark.parametrize("documents", [10, 1000])
def test_packed_causal_needs_two_calls_for_each_step_whatever_the_documents(documents):
    lengths = np.random.default_rng(documents).integers(16, 2000, documents)
    plan = build_plan(Documents(lengths), Topology(1, 8), AttentionConfig(8, 8, 64, alibi=True), "ring")
    for rank in range(8):
        calls = lowered(plan, rank)
        assert len(calls) == 8 and all(len(step_calls) <= 2 for step_calls in calls.values())


@pytest.mark.parametrize("window", [(4095, 0), (100, 0), (3, 0)])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_packed_windows_need_three_calls_for_each_step(window, layout):
    """And a fourth one where two chunks of a document share many keys, which one call would copy."""
    lengths = np.random.default_rng(3).integers(16, 9000, 60)
    for alibi in (False, True):
        attention = AttentionConfig(8, 8, 64, window=window, alibi=alibi)
        plan = build_plan(Documents(lengths), Topology(1, 8), attention, "ring", layout=layout)
        most = max(len(step_calls) for rank in range(8) for step_calls in lowered(plan, rank).values())
        assert most <= (4 if layout == "zigzag" and window == (4095, 0) and not alibi else 3)


def test_full_masks_need_one_call_for_each_step_with_alibi_three():
    lengths = np.random.default_rng(5).integers(16, 3000, 40)
    for alibi, most in ((False, 1), (True, 2)):
        attention = AttentionConfig(8, 8, 64, mask="full", alibi=alibi)
        plan = build_plan(Documents(lengths), Topology(1, 4), attention, "ring")
        assert max(len(step_calls) for rank in range(4) for step_calls in lowered(plan, rank).values()) <= most


def calls_of_lowering(documents: int, alibi: bool, window: tuple[int, int] | None) -> int:
    """How many functions, those written in C among them, the lowering of one rank of a ring of 64 calls."""
    lengths = np.random.default_rng(7).integers(200, 2000, documents)
    attention = AttentionConfig(8, 8, 64, alibi=alibi, window=window)
    plan = build_plan(Documents(lengths), Topology(8, 8), attention, "ring")
    tiles, rows = plan.forward.tiles(40), int(plan.q_layout_compute.token_counts[40])
    calls = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        lower_to_fused_calls(tiles, rows, attention, DEFAULT)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize(("alibi", "window"), [(False, None), (True, None), (False, (511, 0))])
def test_the_work_of_lowering_grows_no_faster_than_the_documents(alibi, window):
    few, many = (calls_of_lowering(documents, alibi, window) for documents in (125, 1000))
    assert many < 8 * 1.25 * few
