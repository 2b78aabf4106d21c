"""Tiles as calls of Ascend's fused operator, without running any: every visible pair in one call with the right bias, no
rule of the operator broken, and as few calls as was promised.

`expanded` says in NumPy which pairs a call computes and with what distance, from the operator's documented rules alone."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_cp import AttentionConfig, ConfigError, Documents, Topology, build_plan
from mindspeed_cp.algorithms import ALGORITHMS
from mindspeed_cp.layout import ragged_arange
from mindspeed_cp.ops.attention.lowering.fused_call import (
    MAX_CALL_ROWS,
    MAX_SEQUENCES,
    MIN_COPIES,
    NO_LIMIT,
    CallLimits,
    FusedCall,
    scatter_rows,
)
from mindspeed_cp.ops.attention.lowering.fused_lowering import lower_to_fused_calls, lower_to_masks
from mindspeed_cp.plan import BAND, CAUSAL, FULL, TILE, Plan, Program
from tests.plan.problems import choices, problems

DEFAULT = CallLimits()


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


def sequences(call: FusedCall):
    """(first row, first key, what is computed and counts: bool [n, m]) of each sequence that has queries."""
    padding = np.zeros(call.rows, bool)
    if call.padding is not None:
        padding[numbers(call.padding)] = True
    if call.layout == "BSND":
        column = np.arange(call.keys)
        seen = np.ones((call.rows, call.keys), bool)
        if call.visible_ranges is not None:
            seen = ((column >= call.visible_ranges[:, 0, :, None]) & (column < call.visible_ranges[:, 1, :, None])).any(
                0
            )
        return [(0, 0, seen)]
    results = []
    for (a, b), (c, d) in zip(pairwise([0, *call.actual_seq_qlen]), pairwise([0, *call.actual_seq_kvlen]), strict=True):
        assert b >= a and d >= c
        if b > a:
            seen = ~hidden(call.sparse_mode, call.pre_tokens, call.next_tokens, call.uses_compressed_mask, b - a, d - c)
            assert seen.any(1).all(), "a row that sees nothing"
            results.append((a, c, seen & ~padding[a:b, None]))
    return results


def check_rules(call: FusedCall, limits: CallLimits) -> None:
    """What the operator's documentation demands."""
    q, k = numbers(call.q), numbers(call.k)
    assert len(q) == call.rows and len(k) == call.keys and len(call.actual_seq_qlen) == len(call.actual_seq_kvlen) > 0
    assert max(call.rows, call.keys) <= limits.max_rows
    assert min(call.pre_tokens, call.next_tokens) >= 0 and max(call.pre_tokens, call.next_tokens) <= NO_LIMIT
    if call.layout == "BSND":
        seen = sequences(call)[0][2]
        assert seen.any(1).all() and seen.any(0).all() and not call.uses_compressed_mask
        assert (call.sparse_mode, call.visible_ranges is None) in ((0, True), (1, False)) and seen.all() == (
            call.visible_ranges is None
        )
        return
    assert len(call.actual_seq_qlen) <= limits.max_sequences
    assert call.visible_ranges is None and call.uses_compressed_mask == (call.sparse_mode != 0)
    n, m = np.diff([0, *call.actual_seq_qlen]), np.diff([0, *call.actual_seq_kvlen])
    assert call.sparse_mode != 3 or (n <= m).all()
    assert (m[n > 0] > 0).all()
    if call.start_idx is not None:
        assert (n == m).all() and (n > 0).all() and min(call.start_idx) >= 0


def expanded(call: FusedCall):
    """Rows of queries and keys of all pairs that a call computes, and the distance that it gives them."""
    q, k = numbers(call.q), numbers(call.k)
    shift = np.zeros(len(q), np.int64) if call.bias_shift is None else call.bias_shift
    results = []
    for a, c, seen in sequences(call):
        i, j = np.nonzero(seen)
        away = np.zeros(len(i), np.int64)
        if call.start_idx is not None:
            away = np.abs((j + call.start_idx[1]) - (i + call.start_idx[0])) + shift[a + i]
        results.append((q[a + i], k[c + j], away))
    return [np.concatenate(x) for x in zip(*results, strict=True)]


def check_backs(call: FusedCall) -> None:
    """What is folded and put back is what every row of the call belongs to."""
    rng = np.random.default_rng(0)
    for back, rows, padding in ((call.q_scatter, call.q, call.padding), (call.k_scatter, call.k, None)):
        rows = numbers(rows)
        held = rng.integers(1, 1 << 40, len(rows))
        real = np.ones(len(rows), bool)
        if padding is not None:
            real[numbers(padding)] = False
        ends = {id(call.q_scatter): call.actual_seq_qlen, id(call.k_scatter): call.actual_seq_kvlen}[id(back)]
        if back is call.k_scatter:  # gaps are sequences without queries
            for (a, b), (c, d) in zip(pairwise([0, *call.actual_seq_qlen]), pairwise([0, *ends]), strict=True):
                real[c:d] &= b > a
        want = np.zeros(int(rows.max()) + 1, np.int64)
        np.add.at(want, rows[real], held[real])
        for into, out_of in back.merges:
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
    return np.repeat(spans["doc"], rows), ragged_arange(spans["start"] - offsets[spans["doc"]], rows)


def check(program: Program, rank: int, lowering, limits: CallLimits) -> None:
    """All calls of a rank: every visible pair of every step once, with its distance."""
    attention = program.attention
    q_doc, q_pos = rows_of(program.q_layout_compute.rank_spans(rank), program.q_layout_compute.documents.offsets)
    left, right = attention.visible_range
    contents: dict[tuple[int, int], list[np.void]] = {}
    for content in program.contents_of(rank):
        contents.setdefault((int(content["step"]), int(content["slot"])), []).append(content)
    written = np.zeros(len(q_doc), bool)
    assert set(lowering) <= set(contents)
    for place, parts in contents.items():
        k_doc, k_pos = np.full((2, int(program.capacity[rank, place[1]])), -1)
        for part in parts:
            doc, pos = rows_of(program.spans_in(part), program.kv_documents.offsets)
            rows = slice(int(part["row"]), int(part["row"]) + len(doc))
            k_doc[rows], k_pos[rows] = doc, pos
        away = q_pos[:, None] - k_pos
        sees = (q_doc[:, None] == k_doc) & (away <= left) & (away >= -right)
        count = np.zeros(sees.shape, int)
        for call in lowering.get(place, []):
            check_rules(call, limits)
            q, k, distance = expanded(call)
            np.add.at(count, (q, k), 1)
            if attention.slopes is not None and call.layout == "TND":
                assert call.start_idx is not None and (distance == np.abs(away[q, k])).all()
                assert limits.share_calls or call.bias_shift is None
            else:
                assert call.start_idx is None and call.bias_shift is None
            check_backs(call)
            target = numbers(call.q_scatter.target)
            unwritten = target if call.unwritten is True else call.unwritten
            assert set(unwritten.tolist()) == set(target[~written[target]].tolist())
            written[target] = True
        assert (count == sees).all()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_calls_of_any_plan_hold_every_visible_pair_once_and_break_no_rule(data):
    problem = data.draw(problems())
    algorithm, options = data.draw(choices(problem.ranks))
    plan = problem.plan(algorithm, **options)
    limits = CallLimits(
        share_calls=data.draw(st.booleans()),
        max_bias_excess=data.draw(st.sampled_from([0.25, 4.0, 2.0**12])),
        max_sequences=data.draw(st.sampled_from([3, 7, MAX_SEQUENCES])),
        max_rows=data.draw(st.sampled_from([20, 80, 150, MAX_CALL_ROWS])),
        pad_up_to=data.draw(st.sampled_from([0, 4, 512])),
        min_square=data.draw(st.sampled_from([1, 5, 256])),
        key_gaps=data.draw(st.booleans()),
        min_copies=data.draw(st.sampled_from([0, MIN_COPIES])),
    )
    program = data.draw(st.sampled_from([plan.forward, plan.backward]))
    rank = data.draw(st.integers(0, problem.ranks - 1))
    tiles, rows = program.tiles(rank), int(plan.q_layout_compute.token_counts[rank])
    cut = np.where(tiles["mask"] == BAND, tiles["k_rows"], 0)
    too_tall = len(tiles) and max(tiles["q_rows"].max(), cut.max()) > limits.max_rows
    if too_tall:
        with pytest.raises(ConfigError, match="use more context-parallel ranks"):
            lower_to_fused_calls(tiles, rows, problem.attention, limits)
    else:
        check(program, rank, lower_to_fused_calls(tiles, rows, problem.attention, limits), limits)
    if problem.attention.slopes is None or problem.attention.visible_range == (0, 0):
        check(program, rank, lower_to_masks(tiles, rows, problem.attention), DEFAULT)


MASKS = (("causal", None), ("full", None), ("causal", (30, 0)), ("full", (9, 25)))


@pytest.mark.parametrize(
    ("algorithm", "mask", "window"),
    [
        pytest.param(algorithm, *mask, marks=() if (i + j) % 2 == 0 else pytest.mark.thorough)
        for i, algorithm in enumerate(ALGORITHMS)
        for j, mask in enumerate(MASKS)
    ],
)
def test_every_rank_of_every_algorithm_with_each_lowering(algorithm, mask, window):
    for alibi in (False, True):
        attention = AttentionConfig(4, 2, 8, mask=mask, window=window, alibi=alibi)
        plan = build_plan(Documents([131, 0, 17, 64, 2]), Topology(2, 2), attention, algorithm)
        for program in (plan.forward, plan.backward):
            for rank in range(4):
                tiles, rows = program.tiles(rank), int(plan.q_layout_compute.token_counts[rank])
                for limits in (
                    DEFAULT,
                    CallLimits(share_calls=False),
                    CallLimits(min_square=8, pad_up_to=8, max_bias_excess=2.0, min_copies=0),
                ):
                    check(program, rank, lower_to_fused_calls(tiles, rows, attention, limits), limits)
                if not alibi:
                    check(program, rank, lower_to_masks(tiles, rows, attention), DEFAULT)


def lowered(plan: Plan, rank: int, limits: CallLimits = DEFAULT, direction: str = "forward"):
    program = getattr(plan, direction)
    return lower_to_fused_calls(
        program.tiles(rank), int(plan.q_layout_compute.token_counts[rank]), plan.attention, limits
    )


def block(q_rows: int, k_rows: int, mask: int = FULL, q_pos: int = 0, k_pos: int = 0) -> np.ndarray:
    return np.array([(0, 0, 0, q_rows, 0, k_rows, mask, 0, 0, q_pos, k_pos)], TILE)


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 9), (5, 12), (12, 12)])
def test_causal_tiles_are_aligned_bottom_right(n, m):
    want = np.arange(m) <= np.arange(n)[:, None] + m - n
    tiles = block(n, m, CAUSAL, q_pos=m - n)
    for alibi in (False, True):
        attention = AttentionConfig(8, 8, 64, alibi=alibi)
        for lowering in [lower_to_fused_calls(tiles, n, attention, DEFAULT)] + [lower_to_masks(tiles, n, attention)] * (
            not alibi
        ):
            counted = np.zeros((n, m), int)
            for call in lowering[0, 0]:
                check_rules(call, DEFAULT)
                q, k, _ = expanded(call)
                np.add.at(counted, (q, k), 1)
            assert (counted == want).all()


@pytest.mark.parametrize(
    ("n", "m"), [(512, 511), (511, 512), (512, 1), (1, 512), (3, 400), (400, 3), (250, 375), (625, 417), (100, 100)]
)
def test_rectangles_of_alibi_cost_little_more_than_their_pairs(n, m):
    """Squares that are computed, against the rectangle; a wide one that is narrower than the kernel's own blocks counts
    as wide as those (here 32 instead of 256 rows)."""
    attention = AttentionConfig(8, 8, 64, mask="full", alibi=True)
    (calls,) = lower_to_fused_calls(
        block(n, m, q_pos=m), n, attention, CallLimits(min_square=32, pad_up_to=64)
    ).values()
    computed = sum(int((np.diff([0, *call.actual_seq_qlen]) ** 2).sum()) for call in calls)
    assert computed <= 1.25 * max(n, 32) * m + 64 * m
    mask = np.zeros((n, m), np.int8)
    for call in calls:
        check_rules(call, DEFAULT)
        check_backs(call)
        q, k, distance = expanded(call)
        assert (distance == q + m - k).all()
        np.add.at(mask, (q, k), 1)
        assert len(call.q_scatter.merges) <= 9 and len(call.k_scatter.merges) <= 9
    assert (mask == 1).all()


def test_calls_beyond_the_limits_of_the_operator_are_split():
    attention = AttentionConfig(8, 8, 64)
    documents = Documents([3] * 5000)
    plan = build_plan(documents, Topology(1, 1), attention, "ring")
    (calls,) = lowered(plan, 0).values()
    assert [len(call.actual_seq_qlen) for call in calls] == [2048, 2048, 904]
    long = build_plan(Documents([1_500_000, 900_000]), Topology(1, 4), attention, "all_gather")
    for calls in lowered(long, 3).values():
        assert all(max(call.rows, call.keys) <= MAX_CALL_ROWS for call in calls)
    with pytest.raises(ConfigError, match="valid for the npu backend: 1000000 of each at most; use more"):
        lower_to_fused_calls(block(1_500_000, 1_500_000, CAUSAL), 1_500_000, attention, DEFAULT)


def test_masks_of_more_rows_than_a_call_takes_are_refused():
    tiles = block(600_000, 600_000, FULL)
    tiles = np.concatenate([tiles, tiles])
    tiles["q_row"][1] = 600_000
    with pytest.raises(
        ConfigError, match="has 1200000 queries and 600000 keys; valid for npu_lowering 'masks': 1000000 of"
    ):
        lower_to_masks(tiles, 1_200_000, AttentionConfig(8, 8, 64, mask="full"))


def test_results_that_belong_to_one_row_are_folded_in_few_rounds():
    n = 1000
    back = scatter_rows(np.zeros(n, np.int64), np.full(n, 5), 5 * np.arange(n), np.zeros(n, np.int64))
    assert len(back.merges) == 10 and back.source == back.target == slice(0, 5)


def test_calls_without_duplicates_or_gaps_copy_nothing():
    attention = AttentionConfig(8, 8, 64, alibi=True)
    plan = build_plan(Documents([4096]), Topology(1, 4), attention, "ring")
    for place, calls in lowered(plan, 2).items():
        for call in calls:
            twice = place[0] > 0  # q twice against a later rank, k twice against an earlier one
            assert isinstance(call.q, slice) + isinstance(call.k, slice) == 2 - twice


def test_a_shared_start_never_enlarges_a_bias_by_more_than_was_asked_for():
    """Documents of very different lengths: short ones next to their keys do not join the long ones' call in fp32."""
    lengths = [40_000, 60, 60, 9000, 300]
    attention = AttentionConfig(8, 8, 64, alibi=True)
    steepest = float(attention.slopes.max())
    plan = build_plan(Documents(lengths), Topology(1, 4), attention, "ring")
    made = []
    for excess in (2.0**5, 2.0**12):
        limits = CallLimits(max_bias_excess=excess)
        for rank in range(4):
            for calls in lowered(plan, rank, limits).values():
                made.append(len(calls))
                for call in calls:
                    assert call.bias_shift is None or -steepest * call.bias_shift.min() <= excess
    assert max(made[: len(made) // 2]) > 2 >= max(made[len(made) // 2 :])
