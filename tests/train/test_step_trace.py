"""Traced steps: what every rank writes of them, what it adds up to, and that a run is the same with and without."""

from __future__ import annotations

import io
import json
import re
import time
from contextlib import redirect_stderr
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mindspeed_cp.algorithms import build_plan
from mindspeed_cp.config.settings import Settings
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan import traffic
from mindspeed_cp.report.run.predicted_vs_measured import compare_with_prediction, predicted_vs_measured_dict
from mindspeed_cp.report.run.step_traces import MeasuredStep, find_trace_files, read_traced_steps, trace_file_name
from mindspeed_cp.train.run_files import RunFiles
from tests.limits import HANG
from tests.processes import RankError
from tests.train.fresh_ranks import FreshRanks
from tests.train.test_training import curve, tiny, train_here, values

LATE = 0.06  # seconds that rank 0 waits at least for rank 1 in every call of attention


def two_ranks(corpus: Path, folder: Path, **changes: Any) -> Settings:
    return tiny(corpus, folder, train__train_iters=5, context_parallel_suite__context_parallel_size=2, **changes)


def train_late(settings: str) -> None:
    """In a rank: train, where rank 1 starts every call of attention LATE seconds after rank 0 began to wait in it."""
    import os

    from torch.distributed.distributed_c10d import _get_default_store

    from mindspeed_cp.engine.call_agreement import CallAgreement

    announce, begin = CallAgreement.announce, CallAgreement._start
    is_late = os.environ["RANK"] == "1"
    announced = 0

    def counted(agreement: CallAgreement, *arguments: Any) -> None:
        nonlocal announced
        announced += 1
        if is_late:
            _get_default_store().wait([f"rank 0 waits in micro-batch {announced}"], timedelta(seconds=HANG))
            time.sleep(LATE)
        announce(agreement, *arguments)

    def begun(*arguments: Any) -> Any:
        comparison = begin(*arguments)

        def wait(limit: float) -> Any:
            _get_default_store().set(f"rank 0 waits in micro-batch {announced}", "")
            return comparison.wait(limit)

        return replace(comparison, wait=wait)

    CallAgreement.announce = counted  # type: ignore[method-assign]
    if not is_late:
        CallAgreement._start = begun  # type: ignore[method-assign]
    train_here(settings)


@pytest.fixture(scope="module")
def traced(fresh_ranks: FreshRanks, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of five steps on two ranks, of which 2 and 4 were traced."""
    folder = tmp_path_factory.mktemp("traced")
    settings = two_ranks(corpus, folder, output__trace_steps=[2], output__trace_interval=4)
    fresh_ranks.run(2, train_late, settings.model_dump_json())
    return folder


@pytest.fixture(scope="module")
def steps(traced: Path) -> list[MeasuredStep]:
    steps, lines = read_traced_steps(traced)
    assert not lines
    return steps


def test_each_rank_leaves_a_trace_of_the_steps_that_were_asked_for(traced: Path, steps: list[MeasuredStep]) -> None:
    assert [step.number for step in steps] == [2, 4]
    names = sorted(path.name for path in (traced / "trace").iterdir())
    assert names == [trace_file_name(step, rank) for step in (2, 4) for rank in (0, 1)]  # and no halves of files


def test_viewers_can_read_it(traced: Path) -> None:
    for path in (traced / "trace").iterdir():
        whole = json.loads(path.read_text())
        rank = int(re.findall(r"rank-(\d+)", path.name)[0])
        threads = set()
        for event in whole["traceEvents"]:
            assert event["ph"] in ("X", "M") and event["pid"] == rank and isinstance(event["tid"], int)
            if event["ph"] == "X":
                assert event["ts"] >= 0 and event["dur"] >= 0 and event["name"] and event["cat"]
            elif event["name"] == "thread_name":
                threads.add(re.sub(r" \d+$", "", event["args"]["name"]))
        assert threads == {"compute", "send", "receive", "step"}


def test_what_a_rank_does_follows_and_adds_up_to_no_more_than_the_step(steps: list[MeasuredStep]) -> None:
    for step in steps:
        for rank in step.ranks:
            (whole,) = [event for event in rank.events if event["cat"] == "step"]
            assert whole["dur"] / 1e6 == pytest.approx(rank.metadata["seconds"], abs=1e-6)
            spans = sorted((event for event in rank.events if event["thread"] == "compute"), key=lambda e: e["ts"])
            ends = [span["ts"] + span["dur"] for span in spans]
            assert all(end <= after["ts"] + 1e-3 for end, after in zip(ends, spans[1:], strict=False))
            assert sum(span["dur"] for span in spans) <= whole["dur"] and ends[-1] <= whole["dur"] + 1e-3
            kernels = [event["args"] for event in spans if event["cat"] == "attention"]
            assert {(kernel["micro_batch"], kernel["layer"]) for kernel in kernels} == {
                (m, n) for m in (0, 1) for n in (1, 2)
            }
            assert [event["name"] for event in spans if event["cat"] in ("batch", "ranks", "optimizer")] == [
                "waits for a batch",  # the first, of which the number of micro-batches is read
                "waits for ranks to compare plans",
                "waits for a batch",
                "waits for ranks to compare plans",
                *("reduces gradients", "waits for all ranks", "optimizer"),
            ]
        made = step.breakdown
        assert (made.attention > 0).all() and (made.optimizer > 0).all() and (made.other > 0).all()


def test_the_rank_that_waits_for_a_slow_one_is_seen_to_wait(steps: list[MeasuredStep]) -> None:
    """Rank 0 waits in the first layer of each of two micro-batches, for the comparison of their plans."""
    for step in steps:
        assert step.breakdown.waiting[0] >= 2 * LATE


def test_messages_are_those_of_the_plans(steps: list[MeasuredStep]) -> None:
    for step in steps:
        expected, count = np.zeros(2), np.zeros(2)
        for documents, algorithm, options in step.micro_batches(0):
            suite = step.settings.context_parallel_suite
            assert (algorithm, options) == (suite.algorithm, {})
            for attention, _ in step.layers:
                plan = build_plan(documents, suite.topology, attention, algorithm)
                expected += traffic(plan, 4)["total"]
                for messages in (plan.forward.fetch, plan.backward.fetch, plan.backward.reduce):
                    count += np.bincount(messages.items["src"], minlength=2)
        assert (step.breakdown.sent == expected).all() and (step.breakdown.messages == count).all()
        sides = [
            [(e["name"], e["args"]["bytes"]) for e in r.events if e["thread"][:4] in ("send", "rece")]
            for r in step.ranks
        ]
        assert sorted(sides[0]) == sorted(sides[1])  # what one sends the other gets


def test_a_step_says_what_it_was_made_of(traced: Path, steps: list[MeasuredStep]) -> None:
    lines = [json.loads(line) for line in (traced / "metrics.jsonl").read_text().splitlines()]
    for step in steps:
        line = lines[step.number - 1]
        assert sum(documents.tokens for documents, *_ in step.micro_batches(0)) == line["tokens"]
        assert step.settings.data.seq_length == 517 and len(step.layers) == 2
        assert step.metadata["first_of_start"] is False and step.metadata["device"] == "cpu"
        assert line["seconds"] <= step.ranks[0].metadata["seconds"]


def test_the_report_shows_the_sums_of_the_traces(traced: Path, steps: list[MeasuredStep]) -> None:
    told = predicted_vs_measured_dict(compare_with_prediction(traced))
    assert told["predicted_is"] == "modelled" and told["cluster"] == "a2"
    for step, said in zip(steps, told["steps"], strict=True):
        for rank, reported in zip(step.ranks, said["ranks"], strict=True):
            made, dur = reported["measured"], {}
            for event in rank.events:
                dur[event["cat"]] = dur.get(event["cat"], 0.0) + event["dur"] / 1e6
            assert made["attention"] == pytest.approx(dur["attention"])
            assert made["exposed"] == pytest.approx(dur["wait"] + dur["communication"])
            assert made["waiting"] == pytest.approx(dur["batch"] + dur["ranks"])
            assert made["optimizer"] == pytest.approx(dur["optimizer"])
            assert made["seconds"] == pytest.approx(dur["step"])
            assert (
                reported["predicted"]["sent"] == made["sent"] and reported["predicted"]["messages"] == made["messages"]
            )


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        pytest.param(
            4,
            {
                "context_parallel_suite__algorithm": "hierarchical",
                "context_parallel_suite__remap": "hidden",
                "context_parallel_suite__head_split": False,  # ranks then hold unequal numbers of tokens
                "train__tensor_model_parallel_size": 2,
                "train__sequence_parallel": True,
                "train__bf16": True,
                "model__recompute_granularity": "full",
            },
            id="hidden-states, recompute-full",
        ),
        pytest.param(  # two replicas
            4,
            {"context_parallel_suite__algorithm": "direct", "model__recompute_granularity": "full"},
            id="recompute-full",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            2,
            {"context_parallel_suite__algorithm": "ulysses", "model__recompute_granularity": "selective"},
            id="recompute-selective",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_planned_and_measured_messages_agree_however_the_work_is_split(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path, ranks: int, changes: dict[str, Any]
) -> None:
    settings = two_ranks(corpus, tmp_path, output__trace_steps=[2], **changes)
    settings = settings.model_copy(
        update={"train": settings.train.model_copy(update={"train_iters": 2, "lr_warmup_iters": 0})}
    )
    fresh_ranks.run(ranks, train_here, settings.model_dump_json())
    (pair,) = compare_with_prediction(tmp_path).pairs
    assert len(pair.step.ranks) == ranks and pair.measured.sent.sum() > 0
    assert (pair.predicted.sent == pair.measured.sent).all()
    assert (pair.predicted.messages == pair.measured.messages).all()
    assert (pair.predicted.seconds > 0).all() and np.ptp(pair.predicted.seconds) == pytest.approx(0, abs=1e-12)
    kinds = {details["kind"] for rank in pair.step.ranks for details in rank.sends}
    assert ("hidden_states" in kinds) == ("context_parallel_suite__remap" in changes)


@pytest.mark.thorough
def test_tracing_changes_no_number_and_leaves_nothing_where_it_is_off(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path, traced: Path
) -> None:
    lines = curve(fresh_ranks, two_ranks(corpus, tmp_path), 2)
    assert not (tmp_path / "trace").exists()
    with_traces = [json.loads(line) for line in (traced / "metrics.jsonl").read_text().splitlines()]
    for key in ("loss", "grad_norm", "tokens", "documents"):
        assert values(lines, key) == values(with_traces, key)


def trace_nothing(settings: str, step: int) -> list[str]:
    """In a rank: a tracer of a run that stands at a step; the files that are left."""
    from mindspeed_cp.train.step_trace import StepTracer

    parsed = Settings.model_validate_json(settings)
    files = RunFiles(Path(parsed.output.folder))
    world: Any = SimpleNamespace(is_first=True)
    with StepTracer(parsed, world, None, files, step).step(step + 1, iter("ab")) as taken:  # type: ignore[arg-type]
        assert list(taken) == ["a", "b"]  # a step that is not traced
    return sorted(str(path.relative_to(files.folder)) for path in files.folder.rglob("*.json"))


def test_a_run_that_goes_on_drops_traces_of_steps_that_come_again(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path
) -> None:
    (tmp_path / "trace").mkdir()
    for name in (trace_file_name(2, 0), trace_file_name(3, 1), trace_file_name(7, 0), "mine.json"):
        (tmp_path / "trace" / name).write_text("{}")
    left = fresh_ranks.run(1, trace_nothing, two_ranks(corpus, tmp_path).model_dump_json(), 2)[0]
    assert left == ["trace/mine.json", f"trace/{trace_file_name(2, 0)}"]
    with pytest.raises(RankError, match=r"output.trace_steps = \[3, 9\]: must be steps up to train.train_iters = 5"):
        settings = two_ranks(corpus, tmp_path, output__trace_steps=[9, 3])
        fresh_ranks.run(1, trace_nothing, settings.model_dump_json(), 2)


def train_and_read_stderr(settings: str) -> tuple[int, str]:
    """In a rank: train; the number of steps, and what was printed to stderr."""
    stderr = io.StringIO()
    with redirect_stderr(stderr):
        lines = train_here(settings)["lines"]
    return len(lines), stderr.getvalue()


def test_a_trace_that_cannot_be_written_is_left_out_and_the_run_goes_on(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path
) -> None:
    (tmp_path / "trace").write_text("a file")
    settings = tiny(corpus, tmp_path, train__train_iters=3, train__lr_warmup_iters=0, output__trace_steps=[1, 2])
    [(steps, stderr)] = fresh_ranks.run(1, train_and_read_stderr, settings.model_dump_json())
    assert steps == 3
    lines = [line for line in stderr.splitlines() if "trace" in line]
    assert lines == [f"rank 0: {tmp_path}/trace: a trace cannot be written (File exists)"] * 2
    assert not find_trace_files(tmp_path)
    with pytest.raises(ConfigError, match=r"has no traces of steps; set output.trace_steps"):
        read_traced_steps(tmp_path)
