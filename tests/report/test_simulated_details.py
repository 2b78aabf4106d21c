"""What pictures tell of a plan: tiles with positions, documents in messages, who shares a document."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mindspeed_cp import AttentionConfig, Documents, Plan, Topology, build_plan
from mindspeed_cp.algorithms import ALGORITHMS
from mindspeed_cp.cluster import load_cluster
from mindspeed_cp.report.simulation.details import (
    ACROSS_NODES,
    IN_ONE_NODE,
    ON_ONE_RANK,
    ComputedTiles,
    count_documents_by_spread,
    document_shares,
)
from mindspeed_cp.report.simulation.messages import MessageBars, documents_in_messages, merge_by_document
from mindspeed_cp.simulate.simulator import simulate_plan
from mindspeed_cp.simulate.timeline import Timeline

LENGTHS = [3000, 40, 900, 5200, 0, 260]
CASES: dict[str, dict[str, Any]] = {
    **{name: {"algorithm": name} for name in ALGORITHMS},
    "window": {"algorithm": "direct", "window": (300, 0)},
    "full": {"algorithm": "ring", "mask": "full"},
    "balanced": {"algorithm": "direct", "layout": "balanced"},
    "no routing": {"algorithm": "hierarchical", "routing": False},
    "no head split": {"algorithm": "hierarchical", "head_split": False},
    "parts": {"algorithm": "hierarchical", "lengths": [360000, 1800, 5400, 180000, 0, 174000, 168000, 6000]},
    "remap": {"algorithm": "hierarchical", "remap": "hidden"},
}


def plan_of(case: str) -> Plan:
    options = dict(CASES[case])
    documents = Documents(options.pop("lengths", LENGTHS))
    attention = AttentionConfig(8, 2, 64, mask=options.pop("mask", "causal"), window=options.pop("window", None))
    return build_plan(documents, Topology(2, 4, "a2"), attention, **options)


def timeline_of(case: str) -> Timeline:
    return simulate_plan(plan_of(case), load_cluster("a2").with_ranks(4))


@pytest.mark.parametrize("case", CASES)
def test_tiles_lie_in_their_documents_and_have_all_the_work(case: str) -> None:
    plan = plan_of(case)
    for direction in ("forward", "backward"):
        tiles = ComputedTiles(plan, direction, range(8)).tiles
        length = plan.documents.lengths[tiles["doc"]]
        for side in "qk":
            first, last, rows = (tiles[f"{side}_{name}"] for name in ("first", "last", "rows"))
            assert (first >= 0).all() and (last < length).all() and (last - first + 1 >= rows).all()
        assert (tiles["pairs"] > 0).all()
        work = np.bincount(tiles["rank"], tiles["pairs"] * tiles["heads"], 8)
        if direction == "forward":
            np.testing.assert_array_equal(work, plan.work().sum(1))
        assert work.sum() == plan.work().sum()


def test_positions_are_those_of_the_rows() -> None:
    """A ring on two ranks: rank 0 has chunks 0 and 3 of a document of 400 tokens, rank 1 chunks 1 and 2."""
    plan = build_plan(Documents([400]), Topology(1, 2), AttentionConfig(1, 1, 64))
    tiles = ComputedTiles(plan, "forward", [0, 1])
    other = tiles.of(0, 2)  # chunk 3 of rank 0 sees all that rank 1 has
    assert len(other) == 1
    actual = {name: int(other[0][name]) for name in ("q_first", "q_last", "k_first", "k_last", "pairs")}
    assert actual == {"q_first": 300, "q_last": 399, "k_first": 100, "k_last": 299, "pairs": 100 * 200}
    assert len(tiles.of(0, 3)) == 0
    own = tiles.of(1, 1)
    assert own["pairs"].sum() == 200 * 201 // 2 and own["q_first"].min() == 100 and own["k_last"].max() == 299


@pytest.mark.parametrize("case", CASES)
def test_messages_have_as_many_bytes_as_the_rows_of_their_documents(case: str) -> None:
    """Which documents a message carries is found from slots and contents; its bytes are the plan's. Both agree where
    bytes over rows are what one row of its kind has: whole numbers of heads, in bf16 or fp32."""
    timeline = timeline_of(case)
    for direction, sent in (("forward", timeline.transfers_forward), ("backward", timeline.transfers_backward)):
        table = documents_in_messages(timeline.plan, direction, sent)
        rows = np.bincount(table["message"], table["rows"], len(sent))
        assert (rows > 0).all()
        each = sent["bytes"] / rows
        np.testing.assert_array_equal(each % (64 * 2), 0)
        for kind, part in {(int(message["kind"]), int(message["part"])) for message in sent if message["kind"] < 2}:
            chosen = (sent["kind"] == kind) & (sent["part"] == part)
            assert len(np.unique(each[chosen])) == 1  # rows of one part have one width
        named = np.zeros(len(sent), bool)
        named[::3] = True
        np.testing.assert_array_equal(merge_by_document(documents_in_messages(timeline.plan, direction, sent, named)),
                                      merge_by_document(table[named[table["message"]]]))  # fmt: skip


def test_a_message_of_the_ring_carries_the_documents_of_the_block() -> None:
    timeline = timeline_of("ring")
    bars = MessageBars(timeline, "forward", "dst")
    layout = timeline.plan.layout
    for number, bar in enumerate(bars.bars):
        owner = (int(bar["rank"]) - int(bar["start"])) % 8  # whose block comes in step t is t ranks before
        held = layout.rank_spans(owner)
        rows = {doc: int((held["stop"] - held["start"])[held["doc"] == doc].sum()) for doc in set(held["doc"].tolist())}
        shown = bars.documents(number)
        assert set(shown) <= set(rows) and shown[0] == max(rows, key=lambda doc: rows[doc])
        assert bars.peers(number) == [(int(bar["rank"]) - 1) % 8]


@pytest.mark.parametrize("end", ["src", "dst"])
@pytest.mark.parametrize("case", ["ulysses", "hierarchical", "all_gather"])
def test_bars_have_all_messages_of_a_rank_posted_together(case: str, end: str) -> None:
    timeline = timeline_of(case)
    for direction, sent in (("forward", timeline.transfers_forward), ("backward", timeline.transfers_backward)):
        bars = MessageBars(timeline, direction, end)
        assert bars.bars["messages"].sum() == len(sent) and len(bars.bars) < len(sent)
        np.testing.assert_allclose(
            np.bincount(bars.bars["rank"], bars.bars["bytes"], 8), np.bincount(sent[end], sent["bytes"], 8)
        )
        for number, bar in enumerate(bars.bars):
            messages = sent[bars.message_numbers[bars.bar_offsets[number] : bars.bar_offsets[number + 1]]]
            assert (messages[end] == bar["rank"]).all() and (messages["start"] == bar["start"]).all()
            assert (messages["begin"].min(), messages["end"].max()) == (bar["begin"], bar["end"])
            assert (
                len({a // 4 == b // 4 for a, b in zip(messages["src"].tolist(), messages["dst"].tolist(), strict=True)})
                == 1
            )


@pytest.mark.parametrize("case", [case for case in CASES if case != "parts"])
def test_shares_cover_every_document(case: str) -> None:
    plan = plan_of(case)
    shares = document_shares(plan, 99)
    assert [share.doc for share in shares] == [3, 0, 2, 5, 1]  # the longest first, the empty one not at all
    assert [share.doc for share in document_shares(plan, 2)] == [3, 0]
    for share in shares:
        (part_plan,) = (part_plan for part_plan in plan.parts_or_self if part_plan.documents.lengths[share.doc])
        for runs, layout in ((share.queries, part_plan.q_layout_compute), (share.keys, part_plan.kv_layout_compute)):
            assert sum(rows for _, rows in runs) == LENGTHS[share.doc]
            start = int(part_plan.documents.offsets[share.doc])
            for ranks, rows in runs:
                for rank in range(8):
                    held = layout.tokens(rank)
                    inside = np.isin(np.arange(start, start + rows), held)
                    busy = np.diff(layout.head_range(rank, 8))[0] > 0
                    assert inside.all() and busy if rank in ranks else not inside.any() or not busy
                start += rows


def test_parts_share_each_document_once() -> None:
    plan = plan_of("parts")
    assert len(plan.parts_or_self) > 1
    shares = document_shares(plan, 99)
    assert [share.doc for share in shares] == [0, 3, 5, 6, 7, 2, 1]
    lengths = [share_of_all * 6 for share_of_all in (60000, 30000, 29000, 28000, 1000, 900, 300)]
    assert [sum(rows for _, rows in share.queries) for share in shares] == lengths


def test_spread_counts_documents_and_tokens() -> None:
    assert count_documents_by_spread(plan_of("ring")) == {
        ON_ONE_RANK: (0, 0),
        IN_ONE_NODE: (0, 0),
        ACROSS_NODES: (5, 9400),
    }
    assert count_documents_by_spread(plan_of("ulysses"))[ACROSS_NODES] == (5, 9400)
    counts = count_documents_by_spread(plan_of("no head split"))
    assert sum(documents for documents, _ in counts.values()) == 5 and counts[ON_ONE_RANK][0] >= 2
    plan = build_plan(Documents([5, 0]), Topology(1, 1), AttentionConfig(1))
    assert count_documents_by_spread(plan) == {ON_ONE_RANK: (1, 5), IN_ONE_NODE: (0, 0), ACROSS_NODES: (0, 0)}
