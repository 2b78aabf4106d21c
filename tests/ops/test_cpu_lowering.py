"""Tiles as calls of the CPU kernels, without running any: every visible pair in one call, and no row that sees nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mindspeed_cp import AttentionConfig, Documents
from mindspeed_cp.layout import TOKEN_SPAN
from mindspeed_cp.ops.attention.cpu import lowering
from mindspeed_cp.ops.attention.cpu.lowering import (
    DROPOUT_BLOCK,
    KernelCall,
    MaskKind,
    TileRegion,
    _mask_kind,
    lower_to_kernel_calls,
)
from mindspeed_cp.plan import CAUSAL, FULL, TILE, UNLIMITED
from mindspeed_cp.plan.tiles import tiles_between

U = UNLIMITED
PLAIN = AttentionConfig(8, 8, 64)


@contextmanager
def strips_of(rows: int) -> Iterator[None]:
    """Cut small tiles into strips of so many rows, as large ones are cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowering, "STRIP_ROWS", (rows,))
        yield


@st.composite
def regions(draw: Any) -> tuple[TileRegion, np.ndarray]:
    rows, keys = draw(st.integers(1, 25)), draw(st.integers(1, 25))
    low, high = draw(st.one_of(st.just(-U), st.integers(-25, 25))), draw(st.one_of(st.just(U), st.integers(-25, 25)))
    i, j = np.arange(rows)[:, None], np.arange(keys)
    sees = (j >= i + low) & (j <= i + high)
    assume(sees.any(1).all() and sees.any(0).all())
    return TileRegion(rows, keys, low, high), sees


MASKS = {MaskKind.PLAIN: np.ones, MaskKind.CAUSAL: lambda shape: np.tril(np.ones(shape))}


@settings(max_examples=300, deadline=None)
@given(regions(), st.integers(1, 30), st.one_of(st.none(), st.integers(1, 9)))
def test_strips_hold_every_visible_pair_once(case: tuple[TileRegion, np.ndarray], rows: int, keys: int | None) -> None:
    region, sees = case
    count = np.zeros(sees.shape, int)
    for a, b, c, d in region.strips(rows, keys):
        part, kind = sees[a:b, c:d], _mask_kind(region, (a, b, c, d), PLAIN)
        assert part.size and part.any(1).all() and part.any(0).all()
        assert (kind == MaskKind.PLAIN) == bool(part.all())
        assert kind == MaskKind.DISTANCE or (part == MASKS[kind](part.shape)).all()
        assert keys is None or part.shape[1] <= keys
        count[a:b, c:d] += part
    assert (count == sees).all()


def spans(draw: Any, documents: Documents) -> np.ndarray:
    """Some part of every document, in at most two runs."""
    out = []
    for d, (a, b) in enumerate(zip(documents.offsets[:-1].tolist(), documents.offsets[1:].tolist(), strict=True)):
        edges = sorted(draw(st.lists(st.integers(a, b), min_size=4, max_size=4)))
        out += [(0, d, x, y) for x, y in (edges[:2], edges[2:]) if y > x]
    return np.array(out, TOKEN_SPAN)


@st.composite
def problems(draw: Any) -> tuple[AttentionConfig, Documents, Documents, np.ndarray, np.ndarray]:
    mask = draw(st.sampled_from(["causal", "full"]))
    window = draw(st.one_of(st.none(), st.tuples(st.integers(-1, 30), st.integers(-1, 30 if mask == "full" else 0))))
    alibi, dropout = draw(st.booleans()), draw(st.sampled_from([0.0, 0.5]))
    attention = AttentionConfig(2, mask=mask, window=window, alibi=alibi, dropout=dropout)
    queries = keys = Documents(draw(st.lists(st.integers(0, 40), min_size=1, max_size=3)))
    if mask == "full":
        keys = Documents(draw(st.lists(st.integers(0, 40), min_size=len(queries), max_size=len(queries))))
    return attention, queries, keys, spans(draw, queries), spans(draw, keys)


def positions(runs: np.ndarray, documents: Documents) -> tuple[np.ndarray, np.ndarray]:
    """Document and position of every row."""
    document = np.repeat(runs["doc"], runs["stop"] - runs["start"])
    tokens = [np.arange(a, b) for a, b in zip(runs["start"], runs["stop"], strict=True)]
    return document, np.concatenate([np.zeros(0, int), *tokens]) - documents.offsets[document]


@settings(max_examples=300, deadline=None)
@given(problems(), st.integers(1, 12))
def test_calls_hold_every_visible_pair_of_a_slot_once(problem: Any, rows: int) -> None:
    attention, queries, keys, q_spans, k_spans = problem
    tiles = tiles_between(q_spans, k_spans, queries, attention, keys)
    (q_doc, q_pos), (k_doc, k_pos) = positions(q_spans, queries), positions(k_spans, keys)
    left, right = attention.visible_range
    away = q_pos[:, None] - k_pos
    sees = (q_doc[:, None] == k_doc) & (away <= left) & (away >= -right)
    count, written = np.zeros(sees.shape, int), np.zeros(len(q_doc), bool)
    with strips_of(rows):
        calls = lower_to_kernel_calls(tiles, attention).get((0, 0), [])
    for call in calls:
        part, distance = sees[call.q, call.k], away[call.q, call.k]
        assert part.shape == (call.rows, call.keys) and part.any(1).all()
        if call.kind == MaskKind.DISTANCE:  # what the table of distances will make of it
            by_call = call.q_pos + np.arange(call.rows)[:, None] - call.k_pos - np.arange(call.keys)
            assert ((by_call <= left) & (by_call >= -right) == part).all()
            assert not attention.needs_positions or (by_call == distance).all()
        else:
            assert attention.slopes is None and (part == MASKS[call.kind](part.shape)).all()
        if attention.dropout:
            assert max(part.shape) <= 1.5 * DROPOUT_BLOCK and call.kind != MaskKind.CAUSAL
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


def tile(
    q_row: int, q_rows: int, k_row: int, k_rows: int, mask: int,
    step: int = 0, slot: int = 0, q_pos: int = 0, k_pos: int = 0,
) -> np.ndarray:  # fmt: skip
    return np.array([(step, slot, q_row, q_rows, k_row, k_rows, mask, 0, 0, q_pos, k_pos)], TILE)


def test_plain_tiles_are_one_call_and_the_first_on_its_rows_stores() -> None:
    tiles = np.concatenate(
        [tile(0, 2000, 0, 2000, CAUSAL), tile(2000, 90, 2000, 90, CAUSAL), tile(0, 2000, 0, 80, FULL, 1, 1)]
    )
    calls = lower_to_kernel_calls(tiles, PLAIN)
    assert [(c.kind, c.stores) for c in calls[0, 0]] == [(MaskKind.CAUSAL, True)] * 2
    assert calls[1, 1] == [KernelCall(slice(0, 2000), slice(0, 80), MaskKind.PLAIN, stores=False)]


@pytest.mark.parametrize(
    ("rows", "kinds"), [(1, [MaskKind.PLAIN]), (64, [MaskKind.DISTANCE]), (1000, [MaskKind.PLAIN, MaskKind.CAUSAL])]
)
def test_a_causal_rectangle_is_one_call_while_it_is_small(rows: int, kinds: list[MaskKind]) -> None:
    """Of joined runs too, whose first positions say nothing about the others."""
    tiles = tile(0, rows, 0, rows + 500, CAUSAL, q_pos=7, k_pos=3)
    (calls,) = lower_to_kernel_calls(tiles, PLAIN).values()
    assert [c.kind for c in calls] == kinds
    assert calls[-1].q_pos - calls[-1].k_pos == (500 if len(calls) == 1 else 0)


@pytest.mark.parametrize("width", [16, 100, 500, 1024, 2048, 4096])
def test_a_window_is_few_calls_that_compute_little_in_vain(width: int) -> None:
    attention, documents = AttentionConfig(8, 8, 64, window=(width - 1, 0)), Documents([16384])
    whole = np.array([(0, 0, 0, 16384)], TOKEN_SPAN)
    tiles = tiles_between(whole, whole, documents, attention)
    (calls,) = lower_to_kernel_calls(tiles, attention).values()
    computed = sum(c.rows * c.keys for c in calls)
    assert len(calls) <= 16384 / 64 and computed <= 16384 * max(1.4 * width, width + 64)


def test_no_tiles_are_no_calls() -> None:
    assert lower_to_kernel_calls(np.empty(0, TILE), PLAIN) == {}


@pytest.mark.parametrize(
    ("tiles", "stores", "unwritten"),
    [
        ([(0, 5), (2, 5)], [True, False], (slice(5, 7),)),
        ([(2, 2), (6, 1), (0, 9)], [True, True, False], (slice(0, 2), slice(4, 6), slice(7, 9))),
        ([(4, 3), (4, 3)], [True, False], ()),
    ],
)
def test_the_last_call_names_the_rows_that_no_earlier_one_wrote(
    tiles: list[tuple[int, int]], stores: list[bool], unwritten: tuple[slice, ...]
) -> None:
    table = np.concatenate([tile(row, rows, 0, 2, FULL) for row, rows in tiles])
    (calls,) = lower_to_kernel_calls(table, PLAIN).values()
    assert [call.stores for call in calls] == stores and calls[-1].unwritten == unwritten
