"""Messages of a step that travel as one all-to-all-v of all ranks: in this process, on gloo, and in the simulator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mindspeed_cp import (
    AttentionConfig,
    ConfigError,
    Documents,
    PlanError,
    Topology,
    build_plan,
    simulate_plan,
    verify_plan,
)
from mindspeed_cp.cluster import LayerCost, load_cluster
from mindspeed_cp.comm import ExchangePart, InMemoryNetwork, InMemoryTransport, exchange_buffers
from mindspeed_cp.engine.agreement import plan_digest
from mindspeed_cp.engine.all_ranks import Stepping, run_all_ranks
from mindspeed_cp.errors import PeerError
from mindspeed_cp.plan.program import ALIGNMENT, Exchanges
from tests.engine.cases import Case, run_all, run_here, worst

#: Ragged rows, ranks without rows, rows of an odd number of bytes, keys of other lengths, positions, a single rank's row.
CASES = (
    Case((64, 31), 1, 4, 2),
    Case((129, 3, 0, 45), 1, 6, 3, 17, 5),
    Case((40, 0, 33), 1, 5, 1, mask="full", kv_lengths=(7, 90, 0)),
    Case((130, 70), 1, 9, 3, window=(50, 0), alibi=True),
    Case((0, 1, 2), 1, 3, 3),
)


def on(case: Case, ranks: int, **options: object) -> Case:
    """The case on so many ranks, by exchanges."""
    given = {"exchange": "all_to_all", **options}
    return replace(case, ranks=ranks, algorithm="direct", options=tuple(given.items()))


@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.thorough), 5])
def test_gloo_agrees_with_fp64(workers: Any, ranks: int) -> None:
    """Both directions, with one round under way and with three."""
    cases = [on(case, ranks, prefetch=1 + 2 * (i % 2)) for i, case in enumerate(CASES)]
    parts = workers.run(ranks, run_all, cases)
    for i, case in enumerate(cases):
        assert worst(case, [part[i] for part in parts]) <= 1e-5, case


@pytest.mark.parametrize("lazy", [False, True])
def test_any_order_of_ranks_gives_the_same(lazy: bool) -> None:
    for case in (on(CASES[0], 4, prefetch=2), on(CASES[1], 3), on(CASES[4], 4)):  # in the last, ranks without rows
        expected = run_here(replace(case, options=(("prefetch", dict(case.options).get("prefetch", 1)),)))
        results = run_here(case, Stepping(lazy=lazy, seed=5))
        assert all(torch.equal(a, b) for x, y in zip(results, expected, strict=True) for a, b in zip(x, y, strict=True))


def launches(rank: int, group: Any, case: Case) -> Counter[str]:
    """Calls of the library that this rank makes for a case."""
    calls: Counter[str] = Counter()
    originals = {name: getattr(dist, name) for name in ("all_to_all_single", "isend", "irecv")}

    def counted(name: str) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            calls[name] += 1
            return originals[name](*arguments, **keywords)

        return call

    with patch.multiple(dist, **{name: counted(name) for name in originals}):
        run_all(rank, group, [case])
    return calls


def test_every_rank_takes_part_in_every_exchange_and_sends_nothing_else(workers: Any) -> None:
    for case in (on(CASES[0], 4), on(CASES[4], 4)):  # in the second, some ranks have no rows
        plan = case.plan()
        expected = sum(len(Exchanges.of(program)) for program in (plan.forward, plan.backward))
        assert workers.run(4, launches, case) == [Counter(all_to_all_single=expected)] * 4 and expected
    without = workers.run(4, launches, replace(on(CASES[0], 4), options=()))
    assert all(calls["all_to_all_single"] == 0 < calls["isend"] for calls in without)


def test_messages_with_equal_steps_are_one_exchange() -> None:
    shared = []
    for prefetch in (1, 3):
        program = on(CASES[0], 5, prefetch=prefetch).plan().backward
        exchanges = Exchanges.of(program)
        steps = list(zip(exchanges.start.tolist(), exchanges.done.tolist(), strict=True))
        assert steps == sorted(set(steps))
        for messages, number in ((program.reduce, exchanges.of_reduce), (program.fetch, exchanges.of_fetch)):
            assert (messages.items["start"] == exchanges.start[number]).all()
            assert (messages.items["done"] == exchanges.done[number]).all()
        shared.append(len(np.intersect1d(exchanges.of_reduce, exchanges.of_fetch)))
    assert shared == [2, 0]  # of rounds 2 and 3 the keys travel in one call with the gradients of rounds 0 and 1


def test_tensors_of_several_types_lie_apart_and_aligned() -> None:
    parts = [
        ExchangePart(2, True, (3, 1, 5), torch.bfloat16),
        ExchangePart(0, True, (2, 3), torch.float32),
        ExchangePart(0, True, (1, 1), torch.bfloat16),
        ExchangePart(1, False, (0, 4), torch.float32),
    ]
    buffers, views = exchange_buffers(parts, 3, torch.device("cpu"))
    assert (buffers.send_bytes, buffers.receive_bytes) == ([48, 0, 32], [0, 0, 0])
    for part, view in zip(parts, views, strict=True):
        assert (tuple(view.shape), view.dtype) == (part.shape, part.dtype) and view.data_ptr() % ALIGNMENT == 0
    for number, view in enumerate(views):
        view.fill_(number)
    assert all((view == number).all() for number, view in enumerate(views))


def exchange_of(transport: InMemoryTransport, sizes: list[list[int]], takes_part: bool) -> Iterator[Any]:
    """What a rank does; sizes[a][b]: floats that rank a sends to rank b."""
    rank = transport.rank
    parts = [ExchangePart(peer, True, (sizes[rank][peer],), torch.float32) for peer in range(3)]
    parts += [ExchangePart(peer, False, (sizes[peer][rank],), torch.float32) for peer in range(3)]
    buffers, views = exchange_buffers(parts, 3, torch.device("cpu"))
    for view in views[:3]:
        view.fill_(float(rank))
    if takes_part:
        pending = transport.all_to_all(buffers, "steps 0 to 1")
        yield [pending]
        pending.wait()
    return [view.tolist() for view in views[3:]]


@pytest.mark.parametrize("lazy", [False, True])
def test_exchanges_in_memory_meet_and_refuse_what_does_not_fit(lazy: bool) -> None:
    sizes = [[0, 1, 2], [0, 0, 9], [3, 0, 0]]
    network = InMemoryNetwork(3, lazy)
    results = run_all_ranks([exchange_of(network.transport(rank), sizes, True) for rank in range(3)], network)
    assert results == [[[], [], [2.0] * 3], [[0.0], [], []], [[0.0] * 2, [1.0] * 9, []]]

    network = InMemoryNetwork(3, lazy)
    with pytest.raises(PeerError, match="dead-lock: rank 0: the exchange of all ranks, steps 0 to 1 waits for the oth"):
        run_all_ranks([exchange_of(network.transport(rank), sizes, rank != 1) for rank in range(3)], network)

    network, others = InMemoryNetwork(3, lazy), [[0, 1, 2], [0, 0, 9], [4 + 4, 0, 0]]
    with pytest.raises(PeerError, match=r"rank 0: .*it takes 32 bytes of rank 2, which sends 16"):
        run_all_ranks(
            [exchange_of(network.transport(rank), others if rank == 0 else sizes, True) for rank in range(3)], network
        )


def die_or_exchange(rank: int, group: Any) -> str:
    """Rank 1 leaves; what rank 0 is told."""
    from mindspeed_cp.comm import GroupTransport

    if rank == 1:
        return ""
    buffers, _ = exchange_buffers([ExchangePart(1, True, (4,), torch.float32)], 2, torch.device("cpu"))
    try:
        GroupTransport(group, 1.0).all_to_all(buffers, "steps 2 to 3").wait()
    except PeerError as error:
        return str(error)
    return "no error"


def test_a_rank_that_does_not_take_part_is_an_error() -> None:
    from tests.workers import GlooPool

    workers = GlooPool(2)  # of its own: a failed group cannot be used again
    try:
        text = workers.run(2, die_or_exchange)[0]
    finally:
        workers.close()
    assert "rank 0: the exchange of all 2 ranks, steps 2 to 3: a rank died, or did not take part" in text


def test_ranks_that_differ_have_other_plans_and_other_names_are_refused() -> None:
    def digest(**options: object) -> int:
        return plan_digest(build_plan(Documents([50]), Topology(1, 2), AttentionConfig(2), "direct", **options))

    assert digest() == digest(exchange="messages") != digest(exchange="all_to_all")
    with pytest.raises(ConfigError, match="exchange is 'collective'; valid: one of messages, all_to_all"):
        digest(exchange="collective")
    plan = build_plan(Documents([50]), Topology(1, 2), AttentionConfig(2), "direct")
    with pytest.raises(PlanError, match="exchange is 'broadcast'; valid: messages, all_to_all"):
        verify_plan(replace(plan, exchange="broadcast"))


def test_the_simulator_lets_all_ranks_meet() -> None:
    """Ranks with unequal work: no row of an exchange travels before the last rank has come to its step, and the step in
    which it is due ends on no rank before its last row has arrived. Messages by themselves begin earlier."""
    cluster, documents = load_cluster("a2").with_values(posting=0.0), Documents([8 * 4096, 4096, 4096])
    attention = AttentionConfig(32, head_dim=128)
    early, timelines = {}, {}
    for exchange in ("messages", "all_to_all"):
        plan = build_plan(documents, Topology(1, 8), attention, "direct", layout="contiguous", exchange=exchange)
        made = timelines[exchange] = simulate_plan(plan, cluster, LayerCost(0.0, 4096))
        early[exchange] = 0
        for direction in ("forward", "backward"):
            steps, sent = made.steps(direction), made.transfers(direction)
            assert (sent["exchange"] == (exchange == "all_to_all")).all() and len(sent)
            early[exchange] += int((sent["begin"] < steps[:, sent["start"], 0].max(0)).sum())
            for step in np.unique(sent["done"]) if exchange == "all_to_all" else ():
                assert (steps[:, step, 2] >= sent["end"][sent["done"] == step].max()).all()
    assert early["messages"] > early["all_to_all"] == 0
    assert timelines["all_to_all"].exposed.mean() > timelines["messages"].exposed.mean()
    assert timelines["all_to_all"].total >= timelines["messages"].total
    assert timelines["all_to_all"].bytes_sent == pytest.approx(timelines["messages"].bytes_sent)
