"""Tiles as calls of Ascend's fused operator, without running any: every visible pair in one call with the right bias, no
rule of the operator broken, and as few calls as was promised.

`expanded` says in NumPy which pairs a call computes and with what distance, from the operator's documented rules alone."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_cp.layout import expand
from mindspeed_cp.ops.attention.npu_calls import MOST_ROWS, MOST_SEQUENCES, NO_LIMIT, Choice, FusedCall
from mindspeed_cp.ops.attention.npu_lowering import lower
from mindspeed_cp.ops.attention.npu_masks import lower_to_masks
from mindspeed_cp.plan import Program
from tests.plan.problems import choices, problems


def numbers(rows):
    return np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows


def hidden(mode: int, pre: int, next: int, compressed: bool, n: int, m: int) -> np.ndarray:
    """What the operator hides of one TND sequence of n queries and m keys."""
    i, j = np.arange(n)[:, None], np.arange(m)
    if not compressed:
        return np.zeros((n, m), bool)
    corner = i + (m - n)
    if mode == 3:
        return j > corner
    assert mode == 4
    return (j < corner - pre) | (j > corner + next)


def expanded(call: FusedCall, choice: Choice):
    """Rows of queries and keys of all pairs that a call computes, and the distance it gives them; checks the rules."""
    q, k = numbers(call.q), numbers(call.k)
    assert len(q) == call.rows and len(k) == call.keys and len(call.cu_q) == len(call.cu_k) > 0
    assert len(call.cu_q) <= choice.sequences and max(call.rows, call.keys) <= choice.rows
    padding = np.zeros(len(q), bool)
    if call.padding is not None:
        padding[numbers(call.padding)] = True
    assert call.compressed or call.sparse_mode == 0
    assert min(call.pre, call.next) >= 0 and max(call.pre, call.next) <= NO_LIMIT
    shift = np.zeros(len(q), np.int64) if call.shift is None else call.shift
    found = []
    for (a, b), (c, d) in zip(pairwise([0, *call.cu_q]), pairwise([0, *call.cu_k]), strict=True):
        n, m = b - a, d - c
        assert n >= 0 and m >= 0
        if call.starts is not None:
            assert n == m > 0
        if n == 0:
            continue
        assert call.sparse_mode != 3 or n <= m
        seen = ~hidden(call.sparse_mode, call.pre, call.next, call.compressed, n, m)
        assert seen.any(1).all(), "a row that sees nothing"
        i, j = np.nonzero(seen & ~padding[a:b, None])
        away = np.zeros(len(i), np.int64)
        if call.starts is not None:
            away = np.abs((j + call.starts[1]) - (i + call.starts[0])) + shift[a + i]
        found.append((q[a + i], k[c + j], away))
    return [np.concatenate(x) for x in zip(*found, strict=True)]


def of_mask(call: FusedCall):
    """The same for a call with a mask of its own."""
    q, k, column = numbers(call.q), numbers(call.k), np.arange(call.keys)
    seen = np.ones((call.rows, call.keys), bool)
    if call.visible is not None:
        seen = ((column >= call.visible[:, 0, :, None]) & (column < call.visible[:, 1, :, None])).any(0)
        assert call.sparse_mode == 1 and call.layout == "BSND" and not seen.all()
    assert seen.any(1).all() and seen.any(0).all()
    i, j = np.nonzero(seen)
    return q[i], k[j], np.zeros(len(i), np.int64)


def check_backs(call: FusedCall) -> None:
    """What is folded and put back is what every row of the call belongs to."""
    rng = np.random.default_rng(0)
    for back, rows, padding in ((call.q_back, call.q, call.padding), (call.k_back, call.k, None)):
        rows = numbers(rows)
        held = rng.integers(1, 1 << 40, len(rows))
        real = np.ones(len(rows), bool)
        if padding is not None:
            real[numbers(padding)] = False
        ends = {id(call.q_back): call.cu_q, id(call.k_back): call.cu_k}[id(back)]
        if back is call.k_back:  # gaps are sequences without queries
            for (a, b), (c, d) in zip(pairwise([0, *call.cu_q]), pairwise([0, *ends]), strict=True):
                real[c:d] &= b > a
        want = np.zeros(int(rows.max()) + 1, np.int64)
        np.add.at(want, rows[real], held[real])
        for into, out_of in back.folds:
            into, out_of = numbers(into), numbers(out_of)
            assert len(np.unique(into)) == len(into) == len(out_of) and not np.isin(into, out_of).any()
            held[into] += held[out_of]
        target = numbers(back.target)
        assert len(np.unique(target)) == len(target)
        got = np.zeros_like(want)
        got[target] = held[numbers(back.source)]
        assert (got == want).all()


def rows_of(spans: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Document and position of each row."""
    rows = spans["stop"] - spans["start"]
    return np.repeat(spans["doc"], rows), expand(spans["start"] - offsets[spans["doc"]], rows)


def check(program: Program, rank: int, lowering, choice: Choice, masks: bool = False) -> None:
    """All calls of a rank: every visible pair of every step once, with its distance."""
    attention = program.attention
    q_doc, q_pos = rows_of(program.q_layout.of(rank), program.q_layout.documents.offsets)
    left, right = attention.reach
    contents: dict[tuple[int, int], list[np.void]] = {}
    for content in program.contents_of(rank):
        contents.setdefault((int(content["step"]), int(content["slot"])), []).append(content)
    touched = np.zeros(len(q_doc), bool)
    assert set(lowering) <= set(contents)
    for place, parts in contents.items():
        k_doc, k_pos = np.full((2, int(program.capacity[rank, place[1]])), -1)
        for part in parts:
            doc, pos = rows_of(program.spans_in(part), program.kv_documents.offsets)
            at = slice(int(part["row"]), int(part["row"]) + len(doc))
            k_doc[at], k_pos[at] = doc, pos
        away = q_pos[:, None] - k_pos
        sees = (q_doc[:, None] == k_doc) & (away <= left) & (away >= -right)
        count = np.zeros(sees.shape, int)
        for call in lowering.get(place, []):
            q, k, distance = of_mask(call) if masks else expanded(call, choice)
            np.add.at(count, (q, k), 1)
            if attention.slopes is not None:
                assert call.starts is not None and (distance == np.abs(away[q, k])).all()
                assert choice.share or call.shift is None
            else:
                assert call.starts is None and call.shift is None
            check_backs(call)
            target = numbers(call.q_back.target)
            fresh = target if call.fresh is True else call.fresh
            assert set(fresh.tolist()) == set(target[~touched[target]].tolist())
            touched[target] = True
        assert (count == sees).all()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_calls_of_any_plan_hold_every_visible_pair_once_and_break_no_rule(data):
    problem = data.draw(problems())
    algorithm, options = data.draw(choices(problem.ranks))
    plan = problem.plan(algorithm, **options)
    choice = Choice(
        share=data.draw(st.booleans()),
        excess=data.draw(st.sampled_from([0.25, 4.0, 2.0**12])),
        sequences=data.draw(st.sampled_from([3, 7, MOST_SEQUENCES])),
        rows=data.draw(st.sampled_from([80, 150, MOST_ROWS])),
        small=data.draw(st.sampled_from([0, 4, 512])),
        least=data.draw(st.sampled_from([1, 5, 256])),
    )
    program = data.draw(st.sampled_from([plan.forward, plan.backward]))
    rank = data.draw(st.integers(0, problem.ranks - 1))
    tiles, rows = program.tiles(rank), int(plan.q_layout.token_counts[rank])
    check(program, rank, lower(tiles, rows, problem.attention, choice), choice)
    if problem.attention.slopes is None:
        check(program, rank, lower_to_masks(tiles, rows, problem.attention), choice, masks=True)
