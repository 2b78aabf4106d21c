"""Plans of parts on the engine, against the dense fp64 reference, on real processes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from mindspeed_cp import Plan
from mindspeed_cp.layout import equal_tokens
from tests.engine.cases import SIZES, Case, errors, run_all, worst
from tests.engine.test_dropout import SEEN, matrix
from tests.plan.parts import mixed_plan, remapped


@dataclass(frozen=True)
class Mixed(Case):
    """Documents treated in three ways: exchanged, and with heads split over either half of the ranks."""

    remap: bool = False

    def plan(self) -> Plan:
        plan = mixed_plan(self.documents, self.ranks, self.attention, self.algorithm, self.kv_documents)
        return remapped(plan, equal_tokens(self.documents, self.ranks)) if self.remap else plan

    def on(self, ranks: int, variant: str | None = None) -> Mixed:
        return replace(self, ranks=ranks)


PROBLEMS = {
    "packed and ragged": Mixed((129, 3, 0, 50, 7, 311), 1, algorithm="direct"),
    "a ring": Mixed((129, 80, 33, 50, 7, 90), 1, algorithm="ring"),
    "GQA": Mixed((61, 130, 5), 1, heads=6, kv_heads=2, algorithm="direct"),
    "MQA": Mixed((100, 33, 60), 1, heads=5, kv_heads=1, algorithm="direct"),
    "one head": Mixed((64, 70, 41), 1, heads=1, kv_heads=1, algorithm="direct"),
    "kv heads cut between ranks": Mixed((90, 41, 77), 1, heads=9, kv_heads=3, algorithm="all_gather"),
    "latent attention": Mixed((65, 30, 12, 40), 1, heads=2, kv_heads=2, head_dim=192, head_dim_v=128, algorithm="direct"),
    "shorter than the ranks": Mixed((1, 2, 3, 1, 0, 7, 1), 1, algorithm="direct"),
    "one token": Mixed((0, 1), 1, algorithm="direct"),
    "no token": Mixed((0, 0), 1, algorithm="direct"),
    "only heads split": Mixed((0, 90, 0, 0, 41), 1, algorithm="direct"),
    "full mask": Mixed((129, 3, 0, 50, 7, 190), 1, mask="full", kv_heads=2, algorithm="direct"),
    "window": Mixed((129, 103, 0, 50, 7, 190), 1, window=(30, 0), algorithm="direct"),
    "ALiBi": Mixed((129, 3, 80, 50, 7, 190), 1, heads=6, kv_heads=3, alibi=True, algorithm="direct"),
    "dropout": Mixed((129, 53, 50, 20), 1, dropout=0.3, algorithm="direct"),
    "keys of other lengths": Mixed((40, 0, 7, 90, 30), 1, kv_lengths=(13, 5, 60, 0, 120), mask="full", kv_heads=2, algorithm="direct"),
    "everything": Mixed((129, 63, 40, 50), 1, 6, 2, 24, 16, "full", (50, 9), True, 0.2, kv_lengths=(90, 70, 8, 70), algorithm="direct"),
    "heads split after a hybrid": Mixed((129, 63, 40, 50), 1, heads=6, kv_heads=2, algorithm="hybrid"),
    "another layout held": Mixed((129, 63, 40, 50, 33), 1, heads=6, kv_heads=2, algorithm="direct", remap=True),
    "another layout held, ring": Mixed((129, 63, 40, 50, 33), 1, kv_heads=2, algorithm="ring", remap=True, dropout=0.1),
}  # fmt: skip


@pytest.mark.parametrize("ranks", SIZES)
def test_fp32_agrees_with_fp64(workers, ranks):
    cases = [case.on(ranks) for case in PROBLEMS.values()]
    parts = workers.run(ranks, run_all, cases, timeout=240)
    found = {
        name: worst(case, [part[i] for part in parts])
        for i, (name, case) in enumerate(zip(PROBLEMS, cases, strict=True))
    }
    assert {name: error for name, error in found.items() if error > 1e-5} == {}


@pytest.mark.parametrize("ranks", [2, 8])
def test_bf16(workers, ranks):
    """As good as the kernel itself."""
    cases = [
        replace(PROBLEMS[name], ranks=ranks, head_dim=32, head_dim_v=32, dtype=torch.bfloat16)
        for name in ("packed and ragged", "GQA", "ALiBi", "another layout held")
    ]
    alone = [replace(case, ranks=1) for case in cases]
    parts, one = workers.run(ranks, run_all, cases, timeout=120), workers.run(1, run_all, alone)
    for i, case in enumerate(cases):
        found = errors(case, [part[i] for part in parts], case.reference())
        there = errors(alone[i], [part[i] for part in one], case.reference())
        for name, (largest, l2) in found.items():
            assert largest < 2e-2 and l2 <= 1.3 * there[name][1], (name, case, l2, there)


@pytest.mark.parametrize("ranks", [3, 8])
def test_the_same_weights_are_dropped_as_without_parts(workers, ranks):
    alone = SEEN.plan().layout.unshard(workers.run(1, matrix, SEEN))
    fields = {name: getattr(SEEN, name) for name in Case.__dataclass_fields__}
    case = Mixed(**{**fields, "ranks": ranks, "algorithm": "direct"})
    found = case.plan().layout.unshard(workers.run(ranks, matrix, case))
    assert torch.equal(found == 0, alone == 0)
    assert torch.allclose(found, alone, atol=1e-6)
