"""Tiles lowered all at once are the calls that they are one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_cp import AttentionConfig, Documents, Topology
from mindspeed_cp.algorithms import build_plan
from mindspeed_cp.ops.attention.cpu.cost_model import CpuCostModel
from mindspeed_cp.ops.attention.cpu.lowering import KernelCall, MaskKind, _calls_of_blocks, lower_to_kernel_calls
from mindspeed_cp.ops.attention.lowering.first_write import FirstWrite, true_runs
from mindspeed_cp.plan import CAUSAL, FULL, TILE


def one_by_one(tiles, rows, attention, costs):
    """What `lower` does, with a flag for every row."""
    out, written, writers = {}, np.zeros(rows, bool), np.zeros(rows, int)
    for t in tiles:
        writers[t["q_row"] : t["q_row"] + t["q_rows"]] += 1
    for t in tiles:
        step, slot, q, q_rows, k, k_rows, mask, document, _, q_pos, k_pos = t.tolist()
        calls, seen = out.setdefault((step, slot), []), written[q : q + q_rows]
        if attention.dropout or attention.alibi or not (mask == FULL or (mask == CAUSAL and q_rows == k_rows)):
            shared = bool(writers[q : q + q_rows].max() > 1)
            calls += _calls_of_blocks(t, seen, shared, attention, costs)
            assert seen.all()  # what FirstWrite takes for granted
            continue
        kind, q_pos = (MaskKind.CAUSAL, k_pos) if mask == CAUSAL else (MaskKind.PLAIN, q_pos)
        unwritten = true_runs(~seen, q) if seen.any() and not seen.all() else ()
        upcast = costs.upcasts(q_rows, k_rows, bool(writers[q : q + q_rows].max() > 1))
        calls.append(
            KernelCall(
                slice(q, q + q_rows),
                slice(k, k + k_rows),
                kind,
                not seen.any(),
                unwritten,
                upcast,
                document,
                q_pos,
                k_pos,
            )
        )
        seen[:] = True
    return out


MANY = st.lists(st.one_of(st.integers(0, 12), st.integers(0, 900)), min_size=1, max_size=8)
SOME = [
    dict(),
    dict(mask="full"),
    dict(window=(40, 0)),
    dict(mask="full", window=(9, 30)),
    dict(alibi=True),
    dict(dropout=0.2),
]


@settings(max_examples=150, deadline=None)
@given(
    MANY,
    st.sampled_from(SOME),
    st.sampled_from(["ring", "double_ring", "hybrid", "all_gather", "direct"]),
    st.sampled_from(["zigzag", "contiguous", "balanced"]),
    st.sampled_from([(1, 1), (1, 4), (2, 2), (2, 3)]),
    st.sampled_from(["forward", "backward"]),
    st.sampled_from([torch.bfloat16, torch.float32]),
    st.booleans(),
)
def test_plans(lengths, settings_of_attention, algorithm, layout, topology, direction, dtype, native):
    attention = AttentionConfig(12, **settings_of_attention)
    plan = build_plan(Documents(lengths), Topology(*topology), attention, algorithm, layout=layout)
    costs = replace(CpuCostModel.for_kernel(direction, attention, dtype), native=native)
    for rank in range(topology[0] * topology[1]):
        tiles, rows = getattr(plan, direction).tiles(rank), int(plan.q_layout_compute.token_counts[rank])
        got, want = lower_to_kernel_calls(tiles, rows, attention, costs), one_by_one(tiles, rows, attention, costs)
        assert got == want and list(got) == list(want)


@st.composite
def any_tiles(draw):
    """Tiles that overlap in any way, in steps and slots of any order."""
    number = st.integers(1, 300)
    tiles = []
    for _ in range(draw(st.integers(0, 12))):
        rows, more = draw(number), draw(st.sampled_from([0, 0, 5, 300]))
        place = draw(st.integers(0, 1)), draw(st.integers(0, 1))
        tiles.append(
            (
                *place,
                draw(st.integers(0, 300)),
                rows,
                draw(st.integers(0, 40)),
                rows + more,
                draw(st.sampled_from([FULL, CAUSAL])),
                *draw(st.tuples(number, st.just(0), number, number)),
            )
        )
    return np.array(tiles, TILE)


@settings(max_examples=200, deadline=None)
@given(any_tiles(), st.sampled_from([dict(), dict(dropout=0.2)]))
def test_tiles_that_overlap(tiles, settings_of_attention):
    attention = AttentionConfig(12, **settings_of_attention)
    for direction in ("forward", "backward"):
        costs = replace(CpuCostModel.for_kernel(direction, attention, torch.bfloat16), native=True)
        got, want = lower_to_kernel_calls(tiles, 600, attention, costs), one_by_one(tiles, 600, attention, costs)
        assert got == want and list(got) == list(want)
        fields = [
            x
            for calls in got.values()
            for call in calls
            for x in (call.q.start, call.document, call.stores, call.upcast)
        ]
        assert all(type(x) in (int, bool) for x in fields)


def test_large_calls_do_not_overflow():
    tiles = np.array([(0, 0, 0, 65536, 0, 65536, FULL, 0, 0, 0, 0)], TILE)
    (call,) = lower_to_kernel_calls(tiles, 65536, AttentionConfig(8), CpuCostModel("backward", True, 1.0))[0, 0]
    assert not call.upcast


@pytest.mark.parametrize(
    ("tiles", "all_unwritten", "partly_written", "unwritten"),
    [
        ([(0, 5), (2, 5)], [True, False], [1], (slice(5, 7),)),
        ([(2, 2), (6, 1), (0, 9)], [True, True, False], [2], (slice(0, 2), slice(4, 6), slice(7, 9))),
        ([(4, 3), (4, 3)], [True, False], [], ()),
    ],
)  # fmt: skip
def test_first_write(tiles, all_unwritten, partly_written, unwritten):
    first_write = FirstWrite.of(*np.array(tiles).T)
    assert first_write.all_unwritten.tolist() == all_unwritten and first_write.partly_written.tolist() == partly_written
    last = len(tiles) - 1
    assert first_write.unwritten_rows(last) == unwritten
    assert true_runs(~first_write.written_before(last), tiles[last][0]) == unwritten
