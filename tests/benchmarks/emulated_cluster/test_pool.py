"""The pool against replicas on the emulated cluster: its steps, its figures, and the smallest of its runs."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.balance import global_batches
from benchmarks.cluster import pool, show
from benchmarks.cluster.fabric import PREFIX, missing
from benchmarks.cluster.pool import (
    MEASURED_WAYS,
    arguments,
    groups_of,
    measured,
    plan_steps,
    pool_table,
    trial_step,
    written_rows,
)
from benchmarks.cluster.pool_ranks import Step
from benchmarks.cluster.scale import Scale
from benchmarks.cluster.worker import Job
from benchmarks.pool import PlannedBatch, PoolCase, plan_batch, simulated_step
from mindspeed_cp.plan import traffic
from tests.limits import HANG

LACK = missing()
CASE = PoolCase(replicas=2, ranks=2, context=16384, cluster="a2", simulated_placements=1)
SCALE = Scale("a2", 2, CASE.attention, 2, 1_000_000_000).with_seconds(100.0)
JOB = Job(SCALE.shape(2, "preset"), SCALE, "", linear=True)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[PlannedBatch, list[Step]]:
    """One batch with a document as long as the context, in all ways."""
    folder = tmp_path_factory.mktemp("lengths")
    np.savez(folder / "wikipedia.npz", lengths=np.array([16384, *[512] * 8], np.uint32))
    args = arguments(
        ["--replicas", "2", "--ranks", "2", "--context", "16384", "--batches", "1", "--lengths-folder", str(folder)]
    )
    (batch,), steps = plan_steps(args, CASE, JOB)
    return batch, steps


def test_replicas_are_groups_of_consecutive_ranks_and_the_pool_is_all(planned: tuple[PlannedBatch, list[Step]]) -> None:
    batch, steps = planned
    assert [step.way for step in steps] == list(MEASURED_WAYS) == ["in order", "time", "pool"]
    for step in steps[:2]:
        assert [group.ranks for group in step.groups] == [(0, 1), (2, 3)]
        assert step.group_of(1) is step.groups[0] and step.group_of(2) is step.groups[1]
    (everybody,) = steps[2].groups
    assert everybody.ranks == (0, 1, 2, 3) and len(everybody.plans) == 1
    for step in steps:
        tokens = sum(int(plan.documents.lengths.sum()) for group in step.groups for plan in group.plans)
        assert tokens == batch.lengths.sum() == 2 * 16384


def test_bytes_and_work_are_those_of_the_plans(planned: tuple[PlannedBatch, list[Step]]) -> None:
    batch, steps = planned
    for step in steps:
        expected: list[int] = []
        for plans in groups_of(batch, step.way):
            expected += sum(traffic(plan)["total"] for plan in plans).tolist()
        assert step.planned == [size // 64 for size in expected]  # 2 channels of 128 travel
        assert len(step.busy) == 4
        perfect = 4 * batch.perfect * SCALE.seconds
        assert perfect < sum(step.busy) < 1.5 * perfect  # launches, and tiles that are cut
    assert sum(steps[2].planned) > 0
    # the document as long as the context keeps one replica busy, and is shared in the pool
    in_order, _, shared = (max(step.busy) / np.mean(step.busy) for step in steps)
    assert shared < 1.05 < 1.2 < in_order


def test_batches_and_modelled_seconds_are_those_of_the_benchmark_of_balance() -> None:
    (batch,) = global_batches(np.full(100, 2800), 16384, 2, 1)
    result = plan_batch(CASE, *batch)
    assert sorted(result.lengths) == sorted(batch[0]) and not result.replicas.keys() ^ {"in order", "time"}
    replicas = [simulated_step(CASE, [plans]) for plans in result.replicas["in order"]]
    assert simulated_step(CASE, result.replicas["in order"]) == max(replicas)
    assert simulated_step(CASE, [[result.pool]]) > result.perfect


def test_the_trial_is_short_and_of_all_ranks() -> None:
    step = trial_step(CASE, JOB)
    assert [group.ranks for group in step.groups] == [(0, 1, 2, 3)] and max(step.busy) < 1.0


def row(number: int, way: str, seconds: float) -> show.Row:
    """Return a run of two ranks."""
    ranks = [{"own": 0.01, "cores": 1.0}, {"own": 0.02, "cores": 1.0}]
    return dict(number=number, variant=way, seconds=seconds, busy=[1.0, 2.0], ranks=ranks)


def test_figures_are_medians_over_perfect_balance_and_over_the_pool() -> None:
    rows = [row(0, "time", s) for s in (4.0, 4.4, 9.0)] + [
        row(0, "pool", 2.0),
        row(1, "time", 3.0),
        row(1, "pool", 3.0),
    ]
    numbers = ((0, "time", 4.2), (0, "pool", 2.1), (1, "time", 2.4), (1, "pool", 3.0))
    figures = [measured(rows, number, way, (fair, 1.1 * fair), 1.6) for number, way, fair in numbers]
    assert figures[0].seconds == 4.4 and figures[0].spread == 9 / 4 and figures[0].host == 0.02
    assert figures[0].busy == pytest.approx(1.5 / 4.4)
    console = show.Console(width=200, record=True, file=io.StringIO())
    console.print(pool_table("title", figures, 10.0))
    lines = [line.split("│")[1:-1] for line in console.export_text().splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in line] for line in lines]
    ratios = ["2.750", "2.625", "2.888", "2.200", "2.000", "2.000"]
    assert cells[0] == ["0", "time", "4.40", "2.250", "440.00", *ratios, "34.1%", "2.00%"]
    assert cells[-2][:2] == ["mean", "time"]
    assert cells[-2][5:11] == ["2.312", "2.062", "2.269", "1.600", "1.400", "1.400"]
    assert cells[-1][5:11] == ["1.562", "1.594", "1.753", "1.000", "1.000", "1.000"]


def test_a_row_that_is_half_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    results.touch()
    assert written_rows(results) == []
    whole = json.dumps(row(0, "time", 1.0)) + "\n"
    for written in range(len(whole)):
        results.write_text(whole + whole[:written])
        assert written_rows(results) == [row(0, "time", 1.0)]
    results.write_text(2 * whole)
    assert len(written_rows(results)) == 2


def test_without_the_pool_nothing_is_over_it() -> None:
    console = show.Console(width=200, record=True, file=io.StringIO())
    console.print(pool_table("title", [measured([row(0, "time", 4.0)], 0, "time", (4.0, 4.0), 2.0)], 10.0))
    assert " - " in console.export_text()


def test_bad_options_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for option, value in (("--replicas", "1"), ("--repeat", "0"), ("--first", "-1")):
        with pytest.raises(SystemExit):
            arguments([option, value])
        assert f"{option} is {value}; valid: " in capsys.readouterr().err


def test_without_a_cluster_the_program_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "missing", lambda: "an emulated cluster needs root, which is missing here")
    with pytest.raises(SystemExit, match=r"^benchmarks\.cluster\.pool: an emulated cluster needs root"):
        pool.main([])


@pytest.mark.thorough
@pytest.mark.skipif(LACK is not None, reason=str(LACK))
def test_the_smallest_pool_sends_what_its_plans_say(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    sizes = ["--replicas", "2", "--ranks", "2", "--context", "1024", "--batches", "1", "--repeat", "1"]
    command = [sys.executable, "-m", "benchmarks.cluster.pool", *sizes, "--slowdown", "200", "--json", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    printed, _ = process.communicate(timeout=HANG)
    assert process.returncode == 0, printed
    assert "Every rank handed over just the bytes that its plan says." in printed
    rows = json.loads(out.read_text())["rows"]
    assert [row["variant"] for row in rows] == list(MEASURED_WAYS)
    for result in rows:
        handed = np.array([rank["handed"] for rank in result["ranks"]])
        assert handed.sum(1).tolist() == result["planned"] and handed.sum() > 0
        assert result["seconds"] >= max(result["busy"])
        if result["variant"] != "pool":  # replicas send nothing to each other
            assert not handed[:2, 2:].any() and not handed[2:, :2].any()
    assert not [name for name in os.listdir("/run/netns") if name.startswith(f"{PREFIX}{process.pid}-")]
