"""The comparison of the simulator with the emulated cluster: its arithmetic, on rows made up."""

from __future__ import annotations

import pytest

from benchmarks.cluster.scale import BASE, Batch, Scale, plan_for
from benchmarks.cluster.validate import (
    Case,
    cases_of,
    empty_batch,
    in_order,
    predicted,
    turn_seconds,
    verdict,
    wrong_bytes,
)
from mindspeed_cp import AttentionConfig, simulate_plan
from mindspeed_cp.cluster import LayerCost

SCALE = Scale("a800", 2, AttentionConfig(32, 32, 128), 2, 100_000_000)
BATCH = Batch("some", 0, (9000, 700, 300))


def test_a_prediction_is_the_simulation_in_the_time_of_the_emulation() -> None:
    alone = (
        simulate_plan(plan_for(BASE, BATCH, SCALE, 2), SCALE.cluster, LayerCost(0.0, 4096), sharing="fifo").total
        * SCALE.seconds
    )
    assert predicted(BASE, BATCH, SCALE, 2, 0.0) == pytest.approx(
        alone, rel=0.02
    )  # without the latencies of the preset
    slower = predicted(BASE, BATCH, SCALE, 2, 0.01)
    assert alone + 6 * 0.01 <= slower <= alone + 10 * 0.01  # its turns wait for one another


def test_cases_have_medians_of_runs_and_the_seconds_of_a_turn() -> None:
    rows = [{"batch": "latency", "number": 0, "variant": BASE, "seconds": s} for s in (0.07, 0.08, 0.07)]
    assert turn_seconds(rows, 4) == pytest.approx(0.01)
    assert empty_batch(4).lengths == (32,)
    names = {
        BASE: 3.0,
        "all_gather": 5.0,
        "Ulysses+ring": 1.0,
        "direct, balanced, all at once": 2.0,
        "hierarchical + routing": 0.5,
    }
    for name, seconds in names.items():
        rows += [
            {"batch": "some", "number": 0, "variant": name, "seconds": s} for s in (seconds, 9 * seconds, seconds / 9)
        ]
    cases = cases_of(rows, [BATCH], SCALE, 2)
    assert {case.variant: case.measured for case in cases} == names
    assert all(case.predicted == predicted(case.variant, BATCH, SCALE, 2, 0.01) for case in cases)


def test_order_and_errors() -> None:
    def case(name: str, measured: float, seconds: float, batch: str = "b 0") -> Case:
        return Case(100_000_000, batch, name, measured, seconds)

    right = [case("x", 1.0, 1.1), case("y", 2.0, 1.8), case("z", 2.05, 1.7)]  # y and z are alike
    wrong = [case("x", 1.0, 1.0, "b 1"), case("y", 2.0, 0.9, "b 1")]
    assert in_order(right) and not in_order(wrong)
    said = verdict([*right, *wrong])
    assert "5 cases: mean error 18.4%, worst 55.0% (y, b 1, 100 Mbit/s)" in said and "right in 1 of 2" in said


def test_a_rank_that_sends_other_bytes_than_planned_is_told() -> None:
    rows = [
        {
            "variant": name,
            "batch": "made up",
            "number": 3,
            "planned": [5, 7],
            "ranks": [{"handed": [0, 5]}, {"handed": [sent, 0]}],
        }
        for name, sent in (("good", 7), ("bad", 8))
    ]
    (line,) = wrong_bytes(rows)
    assert line.startswith("bad, made up 3: sent")
