"""Lanes on real processes: both ends of every edge find the same group, warm-up connects without waiting in a circle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan, context_parallel_attention
from mindspeed_cp.algorithms import ALGORITHMS
from mindspeed_cp.comm.directional_groups import (
    OPEN_GROUPS,
    connection_order,
    message_pairs,
    open_directional_groups,
    warm_up,
)
from mindspeed_cp.comm.group_transport import GroupTransport, Transfer
from mindspeed_cp.comm.groups import process_group_options
from mindspeed_cp.errors import ConfigError
from tests.comm.closed_groups import close_directional_groups
from tests.engine.cases import sizes
from tests.limits import HANG

PROCESSES = 8


@contextmanager
def two_groups(rank: int, ranks: int) -> Iterator[dist.ProcessGroup]:
    """The first `ranks` processes are one group, the others another, as context-parallel groups are side by side."""
    groups = [dist.new_group(members) for members in (list(range(ranks)), list(range(ranks, PROCESSES)))]
    group = groups[rank >= ranks]
    yield group
    dist.barrier()
    dist.destroy_process_group(group)


def recorded(patch: pytest.MonkeyPatch) -> list[tuple[str, int, dist.ProcessGroup]]:
    """What isend and irecv are asked for from now on: name, peer, group."""
    calls: list[tuple[str, int, dist.ProcessGroup]] = []

    def record(name, really):
        def call(tensor, peer, group, tag):
            calls.append((name, peer, group))
            return really(tensor, peer, group, tag)

        return call

    for name in ("isend", "irecv"):
        patch.setattr(dist, name, record(name, getattr(dist, name)))
    return calls


def through_directional_groups(rank, everybody, ranks, documents, algorithm):
    """A plan's attention with directional groups, and without, on the same input; what went over which group."""
    with two_groups(rank, ranks) as group:
        size, me = dist.get_world_size(group), dist.get_rank(group)
        # The planner leaves so short documents whole, unless a rank cannot hold them.
        options = (
            {"head_split": False, "max_seqlen_per_dp_cp_rank": -(-sum(documents) // size)}
            if algorithm == "hierarchical"
            else {}
        )
        plan = build_plan(Documents(documents), Topology(1, size), AttentionConfig(2, head_dim=8), algorithm, **options)
        torch.manual_seed(rank)
        q, k, v = (torch.randn(int(plan.layout.token_counts[me]), 2, 8, requires_grad=True) for _ in range(3))

        def run():
            out = context_parallel_attention(q, k, v, plan, group, timeout=HANG)
            return [out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))]

        plain = run()
        directional = open_directional_groups(group)
        assert open_directional_groups(group) is directional and OPEN_GROUPS.get(group) is directional
        warm_up(plan, group)
        with pytest.MonkeyPatch.context() as patch:
            sent = recorded(patch)
            with_directional = run()
        names = {directional.to_higher: "up", directional.to_lower: "down"}
        close_directional_groups(group)
        assert OPEN_GROUPS.get(group) is None
        equal = all(torch.equal(a, b) for a, b in zip(plain, with_directional, strict=True))
        return equal, {
            (kind, dist.get_group_rank(group, peer), names.get(used_group)) for kind, peer, used_group in sent
        }


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@sizes(default=(3,), full=(2, 3, 5))
def test_attention_through_directional_groups(workers, ranks, algorithm):
    results = workers.run(PROCESSES, through_directional_groups, ranks, [61, 0, 3, 40], algorithm)
    for group in (results[:ranks], results[ranks:]):
        for rank, (equal, sent) in enumerate(group):
            assert equal
            for kind, peer, direction in sent:
                source, target = (rank, peer) if kind == "isend" else (peer, rank)
                assert direction == ("up" if source < target else "down")
                other = "irecv" if kind == "isend" else "isend"
                assert (other, rank, direction) in group[peer][1]
            assert sent, "nothing went through directional groups"


def warmed(rank, everybody, ranks):
    """The edges of a ring, twice, then one message over each."""
    with two_groups(rank, ranks) as group:
        size, me, first = dist.get_world_size(group), dist.get_rank(group), rank - dist.get_rank(group)
        open_directional_groups(group)
        plan = build_plan(Documents([100]), Topology(1, size), AttentionConfig(1), "ring")
        for _ in range(2):
            warm_up(plan, group)
        into = torch.empty(4)
        transfers = [
            Transfer(torch.full((4,), float(rank)), (me + 1) % size, True, 0, "block"),
            Transfer(into, (me - 1) % size, False, 0, "block"),
        ]
        for pending in GroupTransport(group, 30).post(transfers):
            pending.wait()
        close_directional_groups(group)
        return into.tolist() == [float(first + (me - 1) % size)] * 4


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_warm_up_of_rings_of_any_size(workers, ranks):
    assert workers.run(PROCESSES, warmed, ranks) == [True] * PROCESSES


@given(
    st.integers(2, 9).flatmap(
        lambda n: st.tuples(
            st.just(n), st.sets(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(lambda p: p[0] != p[1]))
        )
    )
)
def test_edges_connect_without_waiting_in_a_circle(case):
    """Every rank goes through its own edges in the order given; an edge is done when both its ends are at it."""
    ranks, pairs = case
    order = connection_order(pairs, ranks)
    assert set(order) == pairs and len(order) == len(pairs)
    left = {rank: [pair for pair in order if rank in pair] for rank in range(ranks)}
    while any(left.values()):
        ready = [
            pairs[0]
            for rank, pairs in left.items()
            if pairs and left[pairs[0][0]][:1] == left[pairs[0][1]][:1] == pairs[:1]
        ]
        assert ready, f"all wait: {left}"
        for pair in set(ready):
            for rank in pair:
                left[rank].pop(0)


def test_edges_are_those_of_both_directions():
    plan = build_plan(Documents([64]), Topology(1, 4), AttentionConfig(1), "direct", layout="contiguous")
    fetched = {(int(m["src"]), int(m["dst"])) for m in plan.forward.fetch.items}
    returned = {(int(m["src"]), int(m["dst"])) for m in plan.backward.reduce.items}
    assert message_pairs(plan) == fetched | returned and fetched != returned


def test_group_options_are_those_of_hccl():
    with pytest.raises(
        ConfigError, match=r"group option 'buffers': unknown; valid: buffer_mb, traffic_class, service_level"
    ):
        process_group_options("hccl", {"buffers": 1})
    with pytest.raises(
        ConfigError, match=r"group options buffer_mb: are HCCL's, and this group is gloo; leave them out"
    ):
        process_group_options("gloo", {"buffer_mb": 100})
    assert process_group_options("gloo", None) is None


def test_lanes_and_warm_up_need_a_group():
    plan = build_plan(Documents([64]), Topology(1, 2), AttentionConfig(1))
    for call in (lambda group: warm_up(plan, group), open_directional_groups):
        with pytest.raises(ConfigError, match=r"torch.distributed is not initialised; call init_process_group first"):
            call(None)
        for group in ("x", dist.GroupMember.NON_GROUP_MEMBER):
            with pytest.raises(
                ConfigError, match=r"group is .*; valid: a torch.distributed.ProcessGroup that this process is in"
            ):
                call(group)


def warmed_by_another_plan(rank, group):
    """A plan for three ranks on a group of two; then the right one."""
    other, right = (build_plan(Documents([64]), Topology(1, ranks), AttentionConfig(1)) for ranks in (3, 2))
    with pytest.raises(ConfigError) as caught:
        warm_up(other, group)
    warm_up(right, group)
    return str(caught.value)


def test_warm_up_refuses_a_plan_for_other_ranks(workers):
    for text in workers.run(2, warmed_by_another_plan):
        assert text == "warm_up: the plan is for 3 ranks, but the group has 2; build the plan for the group's size"
