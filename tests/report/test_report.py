"""Reports of plans: the numbers are those of the plan."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_cp import AttentionConfig, Documents, Plan, Topology, build_plan
from mindspeed_cp.algorithms import ALGORITHMS
from mindspeed_cp.plan import peak_bytes, traffic
from mindspeed_cp.report.plan import TABLE_RANK_LIMIT, PlanSummary, plan_tables
from mindspeed_cp.report.text import format_bytes, format_count
from tests.plan.parts import mixed_plan


def plan_of(lengths: list[int], ranks: int, **options: Any) -> Plan:
    return build_plan(Documents(lengths), Topology(1, ranks), AttentionConfig(heads=4, head_dim=16), **options)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_numbers_are_those_of_the_plan(ranks: int, algorithm: str) -> None:
    lengths = [500, 37, 0, 3, 121]
    plan = plan_of(lengths, ranks, algorithm=algorithm)
    summary = PlanSummary(plan, bytes_per_element=4)
    assert summary.work.sum() == 4 * sum(n * (n + 1) // 2 for n in lengths)
    assert summary.imbalance >= 1 and summary.step_imbalance >= summary.imbalance - 1e-12
    sent = traffic(plan, 4)
    assert (summary.sent_forward + summary.sent_backward == sent["total"]).all()
    assert (summary.buffers[:, 1] == peak_bytes(plan, "backward", 4)["total"]).all()
    last = summary.as_dict()["per_rank"][ranks - 1]
    assert last["tokens"] == plan.layout.token_counts[-1] and last["bytes_sent"]["total"] == sent["total"][-1]
    assert last["heads"] == list(plan.q_layout_compute.head_range(ranks - 1, 4))
    splits = ranks > 1 and algorithm in ("ulysses", "hybrid") and (algorithm, ranks) not in ALONE
    assert summary.splits_heads == (
        splits or any(part_plan.q_layout_compute.heads is not None for part_plan in plan.parts)
    )


ALONE = {("hybrid", 2), ("hybrid", 3)}  # one rank for each group: the largest divisor of so many ranks is 1


def test_some_ranks_stand_for_the_others_of_very_large_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of([4000, 900], 16)
    exact = PlanSummary(plan)
    assert exact.as_dict()["ranks_counted"] == 16
    monkeypatch.setattr("mindspeed_cp.report.plan.COUNTED_SPANS", 200)
    some = PlanSummary(plan)
    assert 4 <= some.counted_ranks < 16 and some.as_dict()["ranks_counted"] == some.counted_ranks
    assert some.work.sum(1) == pytest.approx(exact.work.sum(1), rel=0.02)
    assert (some.work[[0, 15]] == exact.work[[0, 15]]).all()


def test_overview_has_attention_heads_and_bytes_sent() -> None:
    def overview(**more: Any) -> dict[str, str]:
        attention = AttentionConfig(
            heads=6, kv_heads=2, head_dim=12, head_dim_v=8, mask="full", window=(40, 9), alibi=True
        )
        plan = build_plan(Documents([500, 37]), Topology(2, 2), attention, **more)
        return {row[0]: row[1] for row in plan_tables(PlanSummary(plan))[0].rows}

    ring, hybrid, ulysses = (overview(algorithm=name) for name in ("ring", "hybrid", "ulysses"))
    assert ring["attention"] == "full mask, window of 40 back, 9 ahead, ALiBi"
    assert ring["heads"] == "6, key/value heads 2, of width 12/8, bf16" and ring["ranks"] == "4 (2 nodes)"
    assert ring["sent in the forward"].endswith(" of K/V") and "of K/V, dK and dV" in ring["sent in the backward"]
    assert ulysses["sent in the forward"].endswith(" by all-to-all") and ":" not in ulysses["sent in the forward"]
    assert "of K/V, " in hybrid["sent in the forward"] and hybrid["sent in the forward"].endswith(" by all-to-all")
    keys = overview(algorithm="direct", kv_documents=Documents([7, 900]))
    assert keys["keys of the documents"] == "2 (7, 900)" and "keys of the documents" not in ring


def test_contiguous_layout_is_seen_to_be_uneven() -> None:
    even, uneven = (PlanSummary(plan_of([4096], 4, layout=layout)) for layout in ("zigzag", "contiguous"))
    assert even.imbalance < 1.01
    assert uneven.imbalance == pytest.approx(7 / 4, rel=0.01)  # the last of 4 quarters of a triangle
    assert uneven.token_imbalance == 1.0


def test_an_empty_batch_has_tables_too() -> None:
    summary = PlanSummary(plan_of([0, 0], 2))
    assert summary.imbalance == summary.step_imbalance == summary.token_imbalance == 1.0
    for table in plan_tables(summary):
        assert all(len(row) == len(table.columns) for row in table.rows)


def test_tables_have_a_row_for_each_rank_or_the_extremes() -> None:
    for ranks, rows in ((5, 5), (TABLE_RANK_LIMIT + 4, 8)):
        _, table = plan_tables(PlanSummary(plan_of([4000, 99], ranks)))
        assert len(table.rows) == rows and all(len(row) == len(table.columns) for row in table.rows)


def test_counts_read_well() -> None:
    assert [format_count(n) for n in (0, 999, 9_999_999, 12_345_678, 3e9, 2.5e12)] == [
        *("0", "999", "9,999,999", "12.3 M", "3.0 G", "2.5 T")
    ]
    assert [format_bytes(n) for n in (0, 1023, 1024, 1.5 * 2**20, 5 * 2**30)] == [
        *("0 B", "1,023 B", "1.0 KiB", "1.5 MiB", "5.0 GiB")
    ]


def test_tables_have_parts_and_their_sums() -> None:
    plan = mixed_plan(Documents([129, 63, 40, 50, 0, 12]), 4, AttentionConfig(4, 2, 16))
    summary = PlanSummary(plan, 4)
    assert len(summary.labels) == len(plan.forward_order)
    assert [part.plan.algorithm for part in summary.parts] == ["direct", "head_split", "head_split"]
    assert (summary.sent_forward + summary.sent_backward == traffic(plan, 4)["total"]).all()
    assert (summary.buffers[:, 1] == peak_bytes(plan, "backward", 4)["total"]).all()
    assert summary.labels[:4] == ("0.0", "1.0", "2.0", "0.1") and summary.splits_heads
    (parts,) = (table for table in plan_tables(summary) if table.title.startswith("Parts"))
    assert [row[1:4] for row in parts.rows] == [
        ("direct", "2", "179"),
        ("head_split", "1", "63"),
        ("head_split", "2", "52"),
    ]
    assert [row[5] for row in parts.rows] == ["all", "split", "split"]
    told = summary.as_dict()
    assert told["step_labels"] == list(summary.labels) and [part["tokens"] for part in told["parts"]] == [179, 63, 52]
    assert "parts" not in PlanSummary(plan.parts[0]).as_dict()
