"""Plans whose messages are cut into pieces: they are still exact, and what the benchmark simulates is what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.chunked.__main__ import CUTS, layer_seconds, main, without_transfer_times
from benchmarks.chunked.document_pieces import cut_documents
from benchmarks.chunked.head_pieces import cut_heads, part_of_heads
from benchmarks.chunked.pieces import edge_parts
from mindspeed_cp import AttentionConfig, Documents, Plan, Topology, build_plan, verify_plan
from mindspeed_cp.cluster.cluster import cluster_of
from mindspeed_cp.plan.transfers import traffic
from mindspeed_cp.simulate.simulator import simulate_plan

MHA = AttentionConfig(heads=16, head_dim=8)
GQA = AttentionConfig(heads=16, kv_heads=4, head_dim=8)
LENGTHS = (9000, 2200, 40, 1700, 1, 900, 650)

#: Plans that fetch over relays, from owners, and between groups of nodes, and that split heads only.
PLANS: dict[str, tuple[AttentionConfig, Topology, tuple[int, ...], dict[str, Any]]] = {
    "relays": (MHA, Topology(4, 2, "a800"), LENGTHS, {"head_split": False}),
    "owners": (GQA, Topology(2, 4, "a800"), LENGTHS, {"head_split": False, "routing": False}),
    "groups of nodes": (AttentionConfig(heads=4, head_dim=8), Topology(4, 2, "a800"), (30000, 500, 700, 90), {}),
    "split heads": (
        AttentionConfig(heads=32, head_dim=128),
        Topology(2, 4, "a800"),
        (9000, 8000, *[3100, 2900] * 5, 700),
        {},
    ),
}


def plan_of(name: str) -> Plan:
    attention, topology, lengths, options = PLANS[name]
    return build_plan(Documents(lengths), topology, attention, "hierarchical", simulated_placements=1, **options)


def test_plans_cut_by_documents_are_exact() -> None:
    plan = plan_of("split heads")
    first, last = edge_parts(plan)
    assert first != last
    cut = cut_documents(plan, (1, 1), (1, 2), (2, 1))
    verify_plan(cut)
    assert len(plan.parts) < len(cut.parts) <= 2 * len(plan.parts)
    verify_plan(cut_documents(plan, (1, 1), (1, 1), (1, 1)))
    assert cut_documents(plan_of("owners"), (1, 1), (1, 1), (1, 1)).parts == ()


def test_a_plan_with_equal_tokens_for_linear_layers_keeps_them() -> None:
    plan = build_plan(
        Documents((9000, 5000, 4000, 800, 700, 90)), Topology(2, 4, "a800"), MHA, "hierarchical", remap="qkv"
    )
    cut = cut_documents(plan, (1, 1), (1, 1), (1, 1))
    assert np.ptp(plan.layout.token_counts) <= 1 and np.ptp(cut.layout.token_counts) <= 1
    verify_plan(cut)


@pytest.mark.parametrize("name", ["relays", "groups of nodes", "split heads"])
@pytest.mark.parametrize("pieces", [2, 4])
def test_pieces_of_heads_are_exact_and_together_all_heads(name: str, pieces: int) -> None:
    plan = plan_of(name)
    cut = cut_heads(plan, pieces)
    number = 0
    for part in plan.parts_or_self:
        piece = part_of_heads(part, pieces)
        if piece is None or (part.q_redistribution is None and not len(part.forward.fetch)):
            number += 1
            continue
        verify_plan(piece)
        assert piece.attention.heads * pieces == part.attention.heads
        bounds = np.stack(
            [p.q_layout_compute.head_bounds(part.attention.heads) for p in cut.parts[number : number + pieces]]
        )
        whole = part.q_layout_compute.head_bounds(part.attention.heads)
        assert (bounds[0, :, 0] == whole[:, 0]).all() and (bounds[-1, :, 1] == whole[:, 1]).all()
        assert (bounds[1:, :, 0] == bounds[:-1, :, 1]).all()
        number += pieces
    assert number == len(cut.parts_or_self)
    if plan.attention.kv_heads == plan.attention.heads:
        assert traffic(cut)["total"].tolist() == traffic(plan)["total"].tolist()


def test_seconds_are_those_of_the_simulator_and_posting_adds_to_them() -> None:
    for name in PLANS:
        plan = plan_of(name)
        cluster = cluster_of(plan.topology)
        posted, free = layer_seconds(plan, cluster.with_values(posting=1e-3))
        assert free == pytest.approx(simulate_plan(plan, cluster.with_values(posting=0.0)).total, rel=1e-12)
        assert posted > free + 1e-3
        assert layer_seconds(plan, without_transfer_times(cluster))[1] <= free


def test_the_table_has_a_row_for_each_setting_and_the_best_is_never_worse_than_the_whole_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--clusters", "a800", "--ranks", "16", "--tokens", "600", "--batches", "1", "--lengths", "prolong"]
    main([*words, "--json", str(tmp_path / "x.json")])
    printed, rows = capsys.readouterr().out, json.loads((tmp_path / "x.json").read_text())
    assert len(rows) == 2
    assert len(re.findall(r"^a800 +(?:mha|gqa8) +16 prolong +0\.\d{3}", printed, re.MULTILINE)) == 2
    for row in rows:
        assert set(row["seconds"]) == {"whole", "free", *CUTS}
        whole, without_posting = row["seconds"]["whole"]
        assert row["seconds"]["free"][0] <= whole > without_posting


@pytest.mark.parametrize("words", [["--batches", "0"], ["--posting", "-1"], ["--ranks", "12"]])
def test_values_out_of_range_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert "valid" in capsys.readouterr().err
