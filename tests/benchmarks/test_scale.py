"""The benchmark of planning at every scale, on next to nothing: no second of it is looked at."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks import scale
from benchmarks.data import HEADS
from benchmarks.scale import Problem, main, plan_batches
from mindspeed_cp import Documents, Topology, build_plan
from mindspeed_cp.algorithms.hierarchical import choose_placement
from mindspeed_cp.cluster.cluster import cluster_of
from mindspeed_cp.simulate.simulator import simulate_plan

LENGTHS = (np.array([3000, 40, 500, 556]), np.array([4096]))


def test_every_size_has_its_lines_and_missed_targets_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scale.measure, "__defaults__", (plan_batches,))
    monkeypatch.setattr(scale, "UNSIMULATED_MS", {4: 1e-6})
    words = ["--ranks", "4", "16", "--simulated-up-to", "4", "--tokens", "300", "--batches", "2", "--heads", "gqa8"]
    main([*words, "--lengths", "prolong", "bimodal", "--json", str(tmp_path / "x.json")])
    printed, rows = capsys.readouterr().out, json.loads((tmp_path / "x.json").read_text())
    assert [(row["ranks"], row["simulated"]) for row in rows] == [(4, True), (4, False), (16, False)]
    assert len(re.findall(r"^ +\d+ +\d+  (?:simulations|model alone) +4 ", printed, re.MULTILINE)) == 3
    assert all(len(row["batches"]) == 4 for row in rows)
    assert all(0 < batch["fraction"] <= 1 for batch in rows[0]["batches"])
    assert all(batch["fraction"] is None and batch["seconds"] > 0 for row in rows[1:] for batch in row["batches"])
    assert len(re.findall(r"^4 ranks: .* ms, target 0 ms: missed by", printed, re.MULTILINE)) == 1


def test_the_fraction_is_that_of_the_default_plan() -> None:
    topology = Topology(1, 4, "a2")
    (batch, _) = plan_batches(Problem(LENGTHS, HEADS["mha"], topology, True))
    documents = Documents(LENGTHS[0])
    plan = build_plan(documents, topology, HEADS["mha"], "hierarchical")
    bound = choose_placement(documents, documents, topology, HEADS["mha"]).bound
    assert batch.documents == 4 and batch.fraction == bound / simulate_plan(plan, cluster_of(topology)).total
