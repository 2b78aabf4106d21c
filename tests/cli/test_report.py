"""`mindspeed-cp report`: predicted beside measured, from traces that are written here with known numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mindspeed_cp import Documents, build_plan, load_cluster, simulate_plan
from mindspeed_cp.cli.main import run
from mindspeed_cp.cluster import LayerCost
from mindspeed_cp.config.settings import Settings
from mindspeed_cp.plan import AttentionConfig, traffic
from mindspeed_cp.report.step_trace import layer_metadata, trace_path, write_step_trace
from mindspeed_cp.report.trace_events import TraceEvent

ROOT = Path(__file__).parents[2]
ATTENTION = AttentionConfig(4, 2, 16)
LAYER = LayerCost.from_sizes(64, 128, 4, 2, 16, 16)
ROWS = ([900, 120], [517, 400])  # two micro-batches
GRADIENT_BYTES = 4_000_000


def settings(**suite: Any) -> Settings:
    return Settings(
        model={"num_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2},
        data={"seq_length": 1024},
        train={"bf16": True, "global_batch_size": 2},
        context_parallel_suite={"context_parallel_size": 2, **suite},
    )


def metadata(step: int, suite: Settings, layer: LayerCost, **changes: Any) -> dict[str, Any]:
    """What a trace says of a step, by default of three equal layers in bf16 on NPUs."""
    plan = suite.context_parallel_suite.algorithm, suite.plan_options
    return {
        "step": step, "first_of_start": step == 1, "replicas": 1, "pool": None, "device": "npu",
        "micro_batches": [[[row, None, *plan] for row in ROWS]], "layers": layer_metadata([(ATTENTION, layer)] * 3),
        "gradient_bytes": GRADIENT_BYTES, "settings": suite.model_dump(mode="json"), **changes,
    }  # fmt: skip


def events(rank: int) -> list[TraceEvent]:
    """A step of one second; rank 1 computes longer, rank 0 waits longer."""
    attention = 0.3 + 0.2 * rank
    message = {"sends": True, "bytes": 1000, "messages": 2}
    return [
        TraceEvent(rank, "step", "step", 0.0, 1.0, "step"),
        TraceEvent(rank, "compute", "waits for a batch", 0.0, 0.01, "batch"),
        TraceEvent(rank, "compute", "attention forward", 0.05, attention, "attention"),
        TraceEvent(rank, "compute", "posts messages", 0.6, 0.02, "communication"),
        TraceEvent(rank, "compute", "waits for messages", 0.62, 0.2 - 0.15 * rank, "wait"),
        TraceEvent(rank, "compute", "reduces gradients", 0.85, 0.04, "ranks"),
        TraceEvent(rank, "compute", "optimizer", 0.9, 0.1, "optimizer"),
        TraceEvent(rank, "send", "keys forward", 0.05, 0.4, "keys", message),
        TraceEvent(rank, "send", "keys forward", 0.06, 0.4, "keys", message),  # overlaps: on a lane of its own
        TraceEvent(rank, "receive", "keys forward", 0.05, 0.4, "keys", {**message, "sends": False}),
    ]


def leave(
    folder: Path, step: int, suite: Settings | None = None, ranks: int = 2, layer: LayerCost = LAYER, **changes: Any
) -> Path:
    """The trace of a step."""
    path = trace_path(folder, step)
    made = [event for rank in range(min(ranks, 2)) for event in events(rank)]
    if ranks > 2:
        made = [
            TraceEvent(rank, "step" if name == "step" else "compute", name, 0, seconds, name)
            for rank in range(ranks)
            for name, seconds in (("step", 1), ("attention", rank / 100))
        ]
    write_step_trace(path, metadata(step, suite or settings(), layer, **changes), made, ranks)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of two ranks, which traced steps 1 and 4."""
    made = tmp_path / "run"
    made.mkdir()
    for step in (1, 4):
        leave(made, step)
    return made


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert run(["report", *map(str, arguments), "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def failure(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a report that must fail on bad input: its one line."""
    assert run(["report", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and captured.err.startswith("error: ")
    return captured.err


def test_measured_figures_are_sums_over_the_traces(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, folder)
    assert [step["step"] for step in lines["steps"]] == [1, 4] and lines["cluster"] == "a2"
    for step in lines["steps"]:
        early, late = (rank["measured"] for rank in step["ranks"])
        for made, attention, exposed in ((early, 0.3, 0.22), (late, 0.5, 0.07)):
            assert made["attention"] == pytest.approx(attention) and made["exposed"] == pytest.approx(exposed)
            assert made["waiting"] == pytest.approx(0.05) and made["optimizer"] == pytest.approx(0.1)
            assert made["seconds"] == pytest.approx(1) and made["sent"] == 2000
            parts = ("attention", "exposed", "waiting", "optimizer", "other")
            assert sum(made[key] for key in parts) == pytest.approx(1)
        assert step["measured"]["attention"] == pytest.approx(0.4)  # mean of the ranks
        ratio = step["measured"]["seconds"] / step["predicted"]["seconds"]
        assert step["ratio"]["seconds"] == pytest.approx(ratio) and step["ratio"]["optimizer"] is None


@pytest.mark.parametrize("algorithm", ["ring", "ulysses"])
def test_the_prediction_is_the_simulator_s(tmp_path: Path, capsys: pytest.CaptureFixture[str], algorithm: str) -> None:
    suite = settings(algorithm=algorithm)
    leave(tmp_path, 3, suite)
    (step,) = told(capsys, tmp_path, "--cluster", "a800")["steps"]
    cluster = load_cluster("a800").with_ranks(2)
    plans = [build_plan(Documents(row), suite.context_parallel_suite.topology, ATTENTION, algorithm) for row in ROWS]
    made = [simulate_plan(plan, cluster, LAYER) for plan in plans]
    total = 3 * sum(timeline.total for timeline in made) + cluster.reduction_seconds(GRADIENT_BYTES, 2)
    assert step["predicted"]["seconds"] == pytest.approx(total)
    both = ("forward", "backward")
    for rank, said in enumerate(step["ranks"]):
        predicted = said["predicted"]
        posted = sum(timeline.launch_overhead(way)[rank].sum() for timeline in made for way in both)
        assert posted > 0
        kernels = sum(timeline.compute[rank] for timeline in made) - posted
        assert predicted["attention"] == pytest.approx(3 * kernels)
        assert predicted["other"] == pytest.approx(3 * sum(timeline.linear[rank] for timeline in made))
        assert predicted["exposed"] == pytest.approx(3 * (sum(timeline.exposed[rank] for timeline in made) + posted))
        assert predicted["seconds"] == pytest.approx(total) and predicted["waiting"] >= 0
        assert predicted["sent"] == 3 * sum(traffic(plan)["total"][rank] for plan in plans)


def test_recomputed_forwards_are_predicted_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reports = []
    for number, again in enumerate((None, "selective", "full"), 1):
        suite = settings()
        suite = suite.model_copy(update={"model": suite.model.model_copy(update={"recompute_granularity": again})})
        leave(tmp_path, number, suite)
    for step in told(capsys, tmp_path)["steps"]:
        reports.append(step["predicted"])
    plain, selective, full = reports
    assert plain["attention"] < selective["attention"] == full["attention"] < plain["attention"] * (1 + 1 / 2.5)
    assert plain["other"] == selective["other"] < full["other"] == pytest.approx(plain["other"] * 4 / 3)
    assert plain["seconds"] < selective["seconds"] < full["seconds"]


def test_wider_elements_take_longer_on_links_and_no_longer_in_kernels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = tmp_path / "slow.yaml"
    text = (ROOT / "configs/clusters/a800.yaml").read_text(encoding="utf-8")
    slow.write_text(text.replace("_bandwidth: 200e9", "_bandwidth: 1e6"), encoding="utf-8")
    assert load_cluster(str(slow)).rank_bandwidth == 1e6
    for step, size in ((1, 2), (2, 4)):
        leave(tmp_path, step, layer=replace(LAYER, bytes_per_element=size))
    narrow, wide = (step["predicted"] for step in told(capsys, tmp_path, "--cluster", slow)["steps"])
    assert wide["attention"] == pytest.approx(narrow["attention"]) and 1.3 < wide["exposed"] / narrow["exposed"] < 2


def test_tables_name_both_and_say_what_is_modelled(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(folder), "--cluster", "h200"]) == 0
    text = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert any(line.startswith("step 4 measured 400.0 145.0 50.0 305.0 100.0 1,000") for line in lines)
    assert any(line.startswith("step 4 predicted") for line in lines) and any(
        line.startswith("ratio") for line in lines
    )
    assert any(line.startswith("rank 1 measured 500.0 70.0 50.0 280.0 100.0 2.0 KiB") for line in lines)
    assert "mean of step 4" in text  # the first of a start is left out of the ranks' means
    assert "predicted is modelled on cluster h200" in text and "step 1: the first of its start" in text
    assert "calibrate" not in text  # an NPU's run beside a preset of devices


def test_a_run_on_cpus_is_told_to_calibrate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave(tmp_path, 3, device="cpu")
    answer = told(capsys, tmp_path)
    assert answer["not_comparable"].startswith("not comparable: the run was on CPUs, and cluster a2")
    assert "calibrate mine.yaml --device cpu --dtype bf16" in answer["not_comparable"]
    assert {value for step in answer["steps"] for value in step["ratio"].values()} == {None}
    assert run(["report", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("not comparable: ")  # before any number
    assert "ratio" not in text


def test_a_run_on_cpus_is_compared_with_a_calibrated_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave(tmp_path, 3, device="cpu")
    calibrated = tmp_path / "mine.yaml"
    calibrated.write_text((ROOT / "configs/clusters/a800.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    answer = told(capsys, tmp_path, "--cluster", calibrated)
    assert answer["not_comparable"] is None and answer["steps"][0]["ratio"]["attention"] > 0


def test_one_trace_has_all_ranks_and_a_modelled_layer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = folder / "out.json"
    assert run(["report", str(folder), "--trace", str(trace)]) == 0
    assert str(trace) in capsys.readouterr().out
    whole = json.loads(trace.read_text())
    complete = [event for event in whole["traceEvents"] if event["ph"] == "X"]
    measured = [event for event in complete if event["pid"] < 2]
    assert sorted({event["pid"] for event in measured}) == [0, 1] and len(complete) > len(measured) == 20
    assert sum(event["dur"] for event in measured if event["cat"] == "attention") == pytest.approx(0.8e6)
    assert any("modelled" in name for name in whole["otherData"])


def test_of_many_ranks_those_that_compute_longest_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave(tmp_path, 3, settings(context_parallel_size=40, nodes=5), 40)
    assert run(["report", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "the 32 of 40 that compute longest" in text and "rank 8 " in text and "rank 7 " not in text


def test_steps_are_chosen(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [step["step"] for step in told(capsys, folder, "--step", 4)["steps"]] == [4]
    assert "--step 3: was not traced; valid: 1, 4" in failure(capsys, folder, "--step", 3)


def test_missing_folder_traces_or_preset_are_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    line = failure(capsys, tmp_path / "empty")
    assert "has no traces of steps; set output.trace_steps: [3, 4], and train" in line
    assert "there is no such folder" in failure(capsys, tmp_path / "nowhere")
    assert "no such preset" in failure(capsys, folder, "--cluster", "a9")
    assert "cluster '': no such preset; valid: a2, a3" in failure(capsys, folder, "--cluster", "")
    assert "the suffix is '.txt'" in failure(capsys, folder, "--trace", tmp_path / "a.txt")
    assert "there is no folder" in failure(capsys, folder, "--trace", tmp_path / "no" / "a.json")


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-40],
        lambda text: "[]",
        lambda text: '{"otherData": {}}',
        lambda text: text.replace('"layers":[[{', '"layers":[[["', 1),
        lambda text: text.replace('"replicas":1', '"replicas":"x"', 1),
        lambda text: text.replace('"breakdown":{"attention"', '"breakdown":{"attenti"', 1),
        lambda text: text.replace('"micro_batches":[[[[900', '"micro_batches":[[[[-900', 1),
    ],
)
def test_damaged_trace_is_named(folder: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[str], str]) -> None:
    path = trace_path(folder, 1)
    damaged = damage(path.read_text())
    assert damaged != path.read_text()
    path.write_text(damaged)
    assert str(path) in failure(capsys, folder)


def test_trace_of_another_version_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = trace_path(folder, 1)
    path.write_text(path.read_text().replace('"version":3', '"version":2'))
    assert "of another version of mindspeed-cp; remove it, and trace again" in failure(capsys, folder)


def test_a_cluster_with_too_few_ranks_a_node_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite = settings(context_parallel_size=9)
    leave(tmp_path, 3, suite, 9)
    assert "a node of cluster a2 has 8 ranks" in failure(capsys, tmp_path)


def test_no_torch_is_needed(folder: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from pathlib import Path; from mindspeed_cp.report import step_trace as report; "
        f"report.compare_with_prediction(Path({str(folder)!r}))"
    )
    subprocess.run([sys.executable, "-c", f"{code}; assert 'torch' not in sys.modules"], check=True)
