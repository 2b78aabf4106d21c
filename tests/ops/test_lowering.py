"""Tiles as calls of the CPU kernels, without running any: every visible pair in one call, and no row that sees nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mindspeed_cp import AttentionConfig, Documents
from mindspeed_cp.layout import TOKEN_SPAN
from mindspeed_cp.ops.attention.cpu.cost_model import CpuCostModel
from mindspeed_cp.ops.attention.cpu.lowering import (
    DROPOUT_BLOCK,
    LARGEST_BIAS,
    KernelCall,
    MaskKind,
    lower_to_kernel_calls,
)
from mindspeed_cp.ops.attention.cpu.tile_regions import BlockShape, TileRegion
from mindspeed_cp.plan import CAUSAL, FULL, TILE, UNLIMITED
from mindspeed_cp.plan.tiles import tiles_between
from tests.ops.cuts import Cut

U = UNLIMITED


@st.composite
def regions(draw):
    rows, keys = draw(st.integers(1, 25)), draw(st.integers(1, 25))
    low, high = draw(st.one_of(st.just(-U), st.integers(-25, 25))), draw(st.one_of(st.just(U), st.integers(-25, 25)))
    i, j = np.arange(rows)[:, None], np.arange(keys)
    sees = (j >= i + low) & (j <= i + high)
    assume(sees.any(1).all() and sees.any(0).all())
    return TileRegion(rows, keys, low, high), sees


TRIANGLE = {
    BlockShape.ALL: np.ones,
    BlockShape.LOWER: lambda shape: np.tril(np.ones(shape)),
    BlockShape.UPPER: lambda shape: np.triu(np.ones(shape)),
}


@settings(max_examples=300, deadline=None)
@given(regions(), st.integers(1, 30), st.one_of(st.none(), st.integers(1, 9)), st.booleans())
def test_blocks_hold_every_visible_pair_once(case, rows, keys, squares):
    region, sees = case
    if squares:
        assume(region.width > 1)
    blocks = list(region.squares(min(rows, region.width - 1)) if squares else region.strips(rows, keys))
    count = np.zeros(sees.shape, int)
    for block in blocks:
        q, k = slice(*block.q), slice(*block.k)
        part = sees[q, k]
        assert part.size and part.any(1).all() and part.any(0).all()
        assert block.shape == BlockShape.PART or (part == TRIANGLE[block.shape](part.shape)).all()
        assert block.shape == BlockShape.ALL or not part.all() or part.size == 1
        assert not (squares and block.shape == BlockShape.PART)
        assert keys is None or squares or part.shape[1] <= keys
        count[q, k] += part
    assert (count == sees).all()


def spans(draw, documents):
    """Some part of every document, in at most two runs."""
    out = []
    for d, (a, b) in enumerate(zip(documents.offsets[:-1].tolist(), documents.offsets[1:].tolist(), strict=True)):
        edges = sorted(draw(st.lists(st.integers(a, b), min_size=4, max_size=4)))
        out += [(0, d, x, y) for x, y in (edges[:2], edges[2:]) if y > x]
    return np.array(out, TOKEN_SPAN)


@st.composite
def problems(draw):
    mask = draw(st.sampled_from(["causal", "full"]))
    window = draw(st.one_of(st.none(), st.tuples(st.integers(-1, 30), st.integers(-1, 30 if mask == "full" else 0))))
    alibi, dropout = draw(st.booleans()), draw(st.sampled_from([0.0, 0.5]))
    attention = AttentionConfig(2, mask=mask, window=window, alibi=alibi, dropout=dropout)
    queries = Documents(draw(st.lists(st.integers(0, 40), min_size=1, max_size=3)))
    keys = (
        queries
        if mask == "causal"
        else Documents(draw(st.lists(st.integers(0, 40), min_size=len(queries), max_size=len(queries))))
    )
    return attention, queries, keys, spans(draw, queries), spans(draw, keys)


def positions(runs, documents):
    """Document and position of every row."""
    document = np.repeat(runs["doc"], runs["stop"] - runs["start"])
    tokens = np.concatenate(
        [np.zeros(0, int), *(np.arange(a, b) for a, b in zip(runs["start"], runs["stop"], strict=True))]
    )
    return document, tokens - documents.offsets[document]


@settings(max_examples=300, deadline=None)
@given(problems(), st.booleans(), st.integers(1, 12), st.booleans())
def test_calls_hold_every_visible_pair_of_a_slot_once(problem, squares, rows, half):
    attention, queries, keys, q_spans, k_spans = problem
    tiles = tiles_between(q_spans, k_spans, queries, attention, keys)
    (q_doc, q_pos), (k_doc, k_pos) = positions(q_spans, queries), positions(k_spans, keys)
    left, right = attention.visible_range
    away = q_pos[:, None] - k_pos
    sees = (q_doc[:, None] == k_doc) & (away <= left) & (away >= -right)
    count = np.zeros(sees.shape, int)
    written = np.zeros(len(q_doc), bool)
    for call in lower_to_kernel_calls(tiles, len(q_doc), attention, Cut("forward", half, 1.0, True, squares, rows)).get(
        (0, 0), []
    ):
        part, distance = sees[call.q, call.k], away[call.q, call.k]
        assert part.shape == (call.rows, call.keys) and part.any(1).all()
        if call.kind == MaskKind.DISTANCE:  # what the table of distances will make of it
            by_call = call.q_pos + np.arange(call.rows)[:, None] - call.k_pos - np.arange(call.keys)
            assert ((by_call <= left) & (by_call >= -right) == part).all()
            assert not attention.needs_positions or (by_call == distance).all()
        else:
            assert (
                part
                == {
                    MaskKind.PLAIN: np.ones,
                    MaskKind.CAUSAL: TRIANGLE[BlockShape.LOWER],
                    MaskKind.REVERSED: TRIANGLE[BlockShape.UPPER],
                }[call.kind](part.shape)
            ).all()
            if attention.slopes is not None:
                assert half and call.kind != MaskKind.PLAIN and (distance[part] >= 0).all()
        if attention.dropout:
            assert max(part.shape) <= 1.5 * DROPOUT_BLOCK and call.kind in (MaskKind.PLAIN, MaskKind.DISTANCE)
            assert (q_doc[call.q] == call.document).all() and (q_pos[call.q] == call.q_pos + np.arange(call.rows)).all()
            assert (k_pos[call.k] == call.k_pos + np.arange(call.keys)).all()
        unwritten = np.zeros(len(q_doc), bool)
        for run in call.unwritten:
            unwritten[run] = True
        assert call.stores == (not written[call.q].any())
        assert call.stores or (unwritten[call.q] == ~written[call.q]).all()
        assert not unwritten[: call.q.start].any() and not unwritten[call.q.stop :].any()
        written[call.q] = True
        count[call.q, call.k] += part
    assert (count == sees).all()


def tile(q_row, q_rows, k_row, k_rows, mask, step=0, slot=0, q_pos=0, k_pos=0):
    return np.array([(step, slot, q_row, q_rows, k_row, k_rows, mask, 0, 0, q_pos, k_pos)], TILE)


def calls_of(tiles, rows, attention, direction="forward", dtype=torch.bfloat16):
    return lower_to_kernel_calls(
        tiles, rows, attention, replace(CpuCostModel.for_kernel(direction, attention, dtype), native=True)
    )


PLAIN = AttentionConfig(8, 8, 64)


def test_plain_tiles_are_one_call_and_the_first_on_its_rows_stores():
    tiles = np.concatenate(
        [tile(0, 2000, 0, 2000, CAUSAL), tile(2000, 90, 2000, 90, CAUSAL), tile(0, 2000, 0, 80, FULL, 1, 1)]
    )
    calls = calls_of(tiles, 2090, PLAIN)
    assert [(c.kind, c.stores) for c in calls[0, 0]] == [(MaskKind.CAUSAL, True)] * 2
    assert calls[1, 1] == [KernelCall(slice(0, 2000), slice(0, 80), MaskKind.PLAIN, stores=False, upcast=True)]


@pytest.mark.parametrize(
    ("rows", "kinds"), [(1, [MaskKind.PLAIN]), (64, [MaskKind.DISTANCE]), (1000, [MaskKind.PLAIN, MaskKind.CAUSAL])]
)
def test_a_causal_rectangle_is_one_call_while_it_is_small(rows, kinds):
    """Of joined runs too, whose first positions say nothing about the others."""
    (calls,) = calls_of(tile(0, rows, 0, rows + 500, CAUSAL, q_pos=7, k_pos=3), rows, PLAIN).values()
    assert [c.kind for c in calls] == kinds
    assert calls[-1].q_pos - calls[-1].k_pos == (500 if len(calls) == 1 else 0)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_wide_window_is_cut_into_few_calls_that_compute_little_in_vain(direction):
    for width in (16, 100, 500, 1024, 2048, 4096):
        attention = AttentionConfig(8, 8, 64, window=(width - 1, 0))
        documents = Documents([16384])
        whole = np.array([(0, 0, 0, 16384)], TOKEN_SPAN)
        (calls,) = calls_of(tiles_between(whole, whole, documents, attention), 16384, attention, direction).values()
        computed = sum(c.rows * c.keys for c in calls)
        assert len(calls) <= 16384 / 32 and computed <= 16384 * max(2.0 * width, width + 128)


def test_alibi_uses_the_causal_mask_of_the_kernel_only_where_its_bias_stays_small():
    for steepest, largest in ((0.5, 4096), (1.0, 2048), (8.0, 0)):
        attention = AttentionConfig(2, 2, 64, alibi=(steepest, 0.01))
        for dtype in (torch.bfloat16, torch.float32):
            (calls,) = calls_of(tile(0, 8192, 0, 8192, CAUSAL), 8192, attention, dtype=dtype).values()
            squares = [c for c in calls if c.kind == MaskKind.CAUSAL]
            assert bool(squares) == (largest > 0 and dtype == torch.bfloat16)
            assert all(c.rows * steepest <= 2 * LARGEST_BIAS for c in squares)


def upcasts(tiles: np.ndarray, direction: str, dtype: torch.dtype = torch.bfloat16, **model: bool) -> list[bool]:
    """Which calls of a step are in fp32."""
    costs = replace(CpuCostModel.for_kernel(direction, PLAIN, dtype), **model)
    calls = lower_to_kernel_calls(tiles, 4096, PLAIN, costs)
    return [call.upcast for of_slot in calls.values() for call in of_slot]


def test_small_backward_calls_are_computed_in_fp32():
    tiles = np.concatenate([tile(0, 100, 0, 100, CAUSAL), tile(100, 800, 100, 800, CAUSAL)])
    assert upcasts(tiles, "backward", native=True) == [True, False]
    assert upcasts(tiles, "forward", native=True) == [False, False]
    assert upcasts(tiles, "backward", torch.float32, native=True) == [False, False]


def test_forward_calls_that_are_merged_are_computed_in_fp32():
    tiles = np.concatenate([tile(0, 900, 0, 900, CAUSAL), tile(800, 900, 0, 900, FULL), tile(1700, 9, 0, 9, FULL)])
    assert upcasts(tiles, "forward", native=True) == [True, True, False]
    assert upcasts(tiles, "forward", torch.float32, native=True) == [False] * 3
    # More keys than queries: a rectangle and a causal square of the same rows.
    assert upcasts(tile(0, 500, 0, 900, CAUSAL), "forward", native=True) == [True, True]


def test_a_cpu_without_bf16_instructions_computes_in_fp32():
    tiles = tile(0, 2000, 0, 2000, CAUSAL)
    for direction in ("forward", "backward"):
        assert upcasts(tiles, direction, native=False) == [True]
        assert upcasts(tiles, direction, torch.float32, native=True) == [False]


def test_no_tiles_no_calls():
    assert calls_of(np.empty(0, TILE), 0, PLAIN) == {}
