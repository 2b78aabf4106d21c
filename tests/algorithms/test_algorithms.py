"""What holds for every algorithm: its plans are proved, for any input, and broken ones are refused; who moves how much."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mindspeed_cp import AttentionConfig, Documents, PlanError, Topology, build_plan, verify_plan
from mindspeed_cp.algorithms import ALGORITHMS, algorithm_options
from mindspeed_cp.algorithms.head_groups import head_ranges
from mindspeed_cp.plan import Messages, traffic
from mindspeed_cp.plan.tiles import count_pairs, visible_keys
from tests.plan.problems import choices, options, problems

SMALL = AttentionConfig(8, 4)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(max_examples=150, deadline=None)
@given(problem=problems(), data=st.data())
def test_random_plans_are_proved(algorithm, problem, data):
    plan = problem.plan(algorithm, **data.draw(options(problem.ranks, algorithm)))
    verify_plan(plan)
    assert plan.algorithm == algorithm


@settings(max_examples=150, deadline=None)
@given(problem=problems(40), data=st.data())
def test_tiles_are_trimmed_and_their_pairs_counted(problem, data):
    """No empty tile, no row that sees nothing, no key that nobody sees; the work of all ranks is what the mask shows."""
    algorithm, given_options = data.draw(choices(problem.ranks))
    plan = problem.plan(algorithm, **given_options)
    left, right = problem.attention.visible_range
    visible = 0
    for q_len, k_len in zip(plan.documents.lengths, plan.kv_documents.lengths, strict=True):
        distance = np.arange(k_len)[None, :] - np.arange(q_len)[:, None]
        visible += int(((distance >= -left) & (distance <= right)).sum())
    assert plan.work().sum() == visible * problem.attention.heads
    for rank in range(plan.ranks):
        for tile in plan.forward.tiles(rank):
            assert count_pairs(tile.reshape(1), problem.attention)[0] > 0
            if problem.attention.needs_positions:
                first, last = visible_keys(tile.reshape(1), problem.attention)
                seen = np.zeros(tile["k_rows"], bool)
                for a, b in zip(first, last, strict=True):
                    assert b > a
                    seen[a:b] = True
                assert seen.all()


@settings(max_examples=300, deadline=None)
@given(problem=problems(), data=st.data())
def test_direct_moves_no_more_than_any_other_exchange(problem, data):
    layout = data.draw(st.sampled_from(["zigzag", "contiguous", "balanced"]))
    window = data.draw(st.sampled_from([d for d in range(1, problem.ranks + 1) if problem.ranks % d == 0]))
    prefetch = data.draw(st.integers(1, 4))
    direct = traffic(problem.plan("direct", layout=layout, prefetch=prefetch))
    for other, more in (("ring", {}), ("double_ring", {"cp_window_size": window}), ("all_gather", {})):
        sent = traffic(problem.plan(other, layout=layout, **more))
        for kind in ("fetch_forward", "fetch_backward", "reduce"):
            assert direct[kind].sum() <= sent[kind].sum(), (other, kind)


def test_outer_hops_of_a_double_ring_have_the_whole_inner_ring():
    plan = build_plan(Documents([800]), Topology(3, 4), AttentionConfig(4, mask="full"), "double_ring")
    items = plan.forward.fetch.items
    across = items["src"] // 4 != items["dst"] // 4
    assert across.sum() == 2 * 12
    assert (items["done"] - items["start"])[across].tolist() == [3] * 24
    assert (items["done"] == items["start"])[~across].all()
    back = plan.backward.reduce.items
    onward = (back["src"] // 4 != back["dst"] // 4) & (back["dst_slot"] > 0)
    assert onward.any() and ((back["done"] - back["start"])[onward] == 3).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("kind", ["fetch", "reduce"])
def test_a_plan_without_one_of_its_messages_is_refused(algorithm, direction, kind):
    """Each message matters: without any single one the proof fails and names rank and step."""
    how = {"head_split": False} if algorithm == "hierarchical" else {}  # all its messages in one program
    plan = build_plan(Documents([50, 3, 64]), Topology(1, 6), SMALL, algorithm, **how)
    program = getattr(plan, direction)
    messages = getattr(program, kind)
    expected = {"ulysses": 0}.get(algorithm, 1) and (kind == "fetch" or direction == "backward")
    assert bool(len(messages)) == bool(expected)
    for index in range(0, len(messages), 5):
        fewer = Messages(np.delete(messages.items, index), messages.runs)
        with pytest.raises(PlanError, match=r"rank \d, step \d|rank \d: query"):
            verify_plan(replace(plan, **{direction: replace(program, **{kind: fewer})}))


@settings(max_examples=60, deadline=None)
@given(problem=problems(), data=st.data())
def test_a_message_from_another_rank_is_refused(problem, data):
    algorithm, given_options = data.draw(choices(problem.ranks))
    plan = problem.plan(algorithm, **given_options)
    assume(len(plan.forward.fetch))
    items = plan.forward.fetch.items.copy()
    index = data.draw(st.integers(0, len(items) - 1))
    items["src"][index] = (items["src"][index] + 1) % problem.ranks
    with pytest.raises(PlanError):
        broken = replace(plan.forward, fetch=Messages(items, plan.forward.fetch.runs))
        verify_plan(replace(plan, forward=broken))


def test_every_default_works_for_every_number_of_ranks():
    for algorithm in ALGORITHMS:
        for nodes, per_node in ((1, 1), (1, 2), (1, 5), (1, 8), (3, 3), (2, 4), (7, 1), (1, 16)):
            verify_plan(build_plan(Documents([100, 7]), Topology(nodes, per_node), AttentionConfig(6, 2), algorithm))


def test_the_hybrids_default_is_the_largest_divisor_of_a_node_that_is_not_all():
    def degree(nodes: int, per_node: int) -> int:
        plan = build_plan(Documents([64]), Topology(nodes, per_node), AttentionConfig(8), "hybrid")
        held = plan.q_layout_compute.heads
        return 1 if held is None else int((held[:, 0] == 0).sum() and len(np.unique(held[:, 0])))

    assert [degree(1, 8), degree(2, 4), degree(1, 3), degree(1, 6), degree(1, 1), degree(3, 5)] == [4, 4, 1, 3, 1, 5]
    assert {name: option.default for name, option in algorithm_options("hybrid").items()} == {
        "ulysses_degree": None,
        "layout": "zigzag",
        "reduce_dtype": "float32",
        "latents": "auto",
    }


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 12))
def test_heads_are_split_evenly_with_the_kv_heads_that_they_read(kv_heads, shared, degree):
    attention = AttentionConfig(kv_heads * shared, kv_heads)
    q, kv = head_ranges(attention, degree)
    sizes = q[:, 1] - q[:, 0]
    assert q[0, 0] == 0 and q[-1, 1] == attention.heads and (q[1:, 0] == q[:-1, 1]).all()
    assert sizes.max() - sizes.min() <= 1
    for (a, b), (c, d) in zip(q.tolist(), kv.tolist(), strict=True):
        assert set(range(c, d)) == {h // shared for h in range(a, b)}


def test_ulysses_moves_are_one_run_each():
    plan = build_plan(Documents([700, 30, 4100]), Topology(1, 5), SMALL, "ulysses")
    assert plan.q_redistribution is not None and (plan.q_redistribution.rank_pairs["count"] == 1).all()
    assert plan.kv_redistribution is not None and plan.kv_redistribution.has_copies
    counts = plan.layout.token_counts
    assert counts.max() - counts.min() <= 1


def test_all_gather_fills_one_slot_in_token_order():
    plan = build_plan(Documents([700, 30, 4100]), Topology(1, 4), SMALL, "all_gather")
    assert plan.forward.capacity.shape[1] == 2 and plan.forward.steps == 2
    assert all(len(plan.forward.tiles(rank)) <= 3 * 3 for rank in range(4))


def test_prefetch_bounds_the_slots_in_flight():
    for prefetch in (1, 2, 3, 10):
        plan = build_plan(Documents([4000]), Topology(1, 6), SMALL, "direct", prefetch=prefetch)
        assert plan.forward.capacity.shape[1] - 1 == min(prefetch + 1, 5)
        items = plan.forward.fetch.items
        assert (items["done"] - items["start"]).max() <= prefetch - 1


def test_windows_send_only_what_they_reach():
    attention = AttentionConfig(4, window=(10, 0))
    plan = build_plan(Documents([400]), Topology(1, 4), attention, "direct", layout="contiguous")
    assert plan.forward.fetch.items["rows"].tolist() == [10, 10, 10]
    assert plan.forward.steps == 2


def test_balanced_layouts_keep_short_documents_whole_and_ranks_busy():
    rng = np.random.default_rng(0)
    lengths = np.append(rng.lognormal(6, 1, 120).astype(int), 20_000)
    plan = build_plan(Documents(lengths), Topology(1, 4), AttentionConfig(4), "direct", layout="balanced")
    ranks_of = [len(np.unique(plan.layout.spans["rank"][plan.layout.spans["doc"] == d])) for d in range(len(lengths))]
    assert set(ranks_of) == {1, 4} and ranks_of[-1] == 4 and ranks_of.count(4) < 10
    work = plan.work().sum(1)
    assert work.max() <= 1.02 * work.mean()


def test_the_backward_of_one_rank_has_the_same_tiles():
    for algorithm in ALGORITHMS:
        plan = build_plan(Documents([30, 4]), Topology(1, 1), SMALL, algorithm)
        assert np.array_equal(plan.forward.tiles(0), plan.backward.tiles(0))


def test_hybrid_takes_no_more_ranks_for_heads_than_there_are_heads() -> None:
    """By default; 32 ranks with 8 heads would else leave half of them without work."""
    plan = build_plan(Documents([4000]), Topology(1, 32), AttentionConfig(8), "hybrid")
    assert min(stop - first for first, stop in (plan.q_layout_compute.head_range(rank, 8) for rank in range(32))) == 1
