"""Traced steps: what every rank writes of them, what it adds up to, and that a run is the same with and without."""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindspeed_cp.algorithms import build_plan
from mindspeed_cp.config.settings import Settings
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan import traffic
from mindspeed_cp.report.step_trace import (
    MeasuredStep,
    compare_with_prediction,
    predicted_vs_measured_dict,
    read_traced_steps,
    trace_path,
)
from tests.limits import HANG
from tests.train.fresh_ranks import FreshRanks
from tests.train.test_training import curve, tiny, train_here, values

LATE = 0.06  # seconds that rank 0 waits at least for rank 1 in every call of attention


def two_ranks(corpus: Path, folder: Path, **changes: Any) -> Settings:
    return tiny(corpus, folder, train__train_iters=5, context_parallel_suite__context_parallel_size=2, **changes)


def train_late(settings: str) -> None:
    """In a rank: train, where rank 1 starts every call of attention LATE seconds after rank 0 began to wait in it."""
    import os

    from torch.distributed.distributed_c10d import _get_default_store

    from mindspeed_cp.engine.agreement import CallAgreement

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
    settings = two_ranks(corpus, folder, output__trace_steps=[2, 4])
    fresh_ranks.run(2, train_late, settings.model_dump_json())
    return folder


@pytest.fixture(scope="module")
def steps(traced: Path) -> list[MeasuredStep]:
    return read_traced_steps(traced)


def rank_events(step: MeasuredStep, rank: int) -> list[dict[str, Any]]:
    """A rank's complete events, each with the name of its thread without a number."""
    names = {e["tid"]: e["args"]["name"] for e in step.events if e["pid"] == rank and e["name"] == "thread_name"}
    events = [dict(event) for event in step.events if event["pid"] == rank and event["ph"] == "X"]
    return [event | {"thread": re.sub(r" \d+$", "", names[event["tid"]])} for event in events]


def test_named_steps_leave_a_trace_of_all_ranks_that_viewers_read(traced: Path, steps: list[MeasuredStep]) -> None:
    assert [step.number for step in steps] == [2, 4]
    assert sorted((traced / "trace").iterdir()) == [trace_path(traced, step) for step in (2, 4)]  # and no halves
    for step in steps:
        for event in step.events:
            assert event["ph"] in ("X", "M") and event["pid"] in (0, 1) and isinstance(event["tid"], int)
            if event["ph"] == "X":
                assert event["ts"] >= 0 and event["dur"] >= 0 and event["name"] and event["cat"]
        for rank in (0, 1):
            assert {event["thread"] for event in rank_events(step, rank)} == {"compute", "send", "receive", "step"}


def test_spans_of_a_rank_follow_each_other_and_add_up_to_no_more_than_the_step(steps: list[MeasuredStep]) -> None:
    for step in steps:
        for rank in range(step.ranks):
            (whole,) = [event for event in rank_events(step, rank) if event["cat"] == "step"]
            assert whole["dur"] / 1e6 == pytest.approx(step.breakdown.seconds[rank], abs=1e-6)
            spans = sorted((e for e in rank_events(step, rank) if e["thread"] == "compute"), key=lambda e: e["ts"])
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
        expected = np.zeros(2)
        for documents, algorithm, options in step.micro_batches(0):
            suite = step.settings.context_parallel_suite
            assert (algorithm, options) == (suite.algorithm, {})
            for attention, _ in step.layers:
                plan = build_plan(documents, suite.topology, attention, algorithm)
                expected += traffic(plan, 4)["total"]
        assert (step.breakdown.sent == expected).all()
        sides = [
            [(e["name"], e["args"]["bytes"]) for e in rank_events(step, rank) if e["thread"] in ("send", "receive")]
            for rank in (0, 1)
        ]
        assert sorted(sides[0]) == sorted(sides[1])  # what one sends the other gets


def test_trace_has_documents_layers_and_settings(traced: Path, steps: list[MeasuredStep]) -> None:
    lines = [json.loads(line) for line in (traced / "metrics.jsonl").read_text().splitlines()]
    for step in steps:
        line = lines[step.number - 1]
        assert sum(documents.tokens for documents, *_ in step.micro_batches(0)) == line["tokens"]
        assert step.settings.data.seq_length == 517 and len(step.layers) == 2
        assert step.metadata["first_of_start"] is False and step.metadata["device"] == "cpu"
        assert line["seconds"] <= step.breakdown.seconds[0]


def test_report_shows_sums_over_events(traced: Path, steps: list[MeasuredStep]) -> None:
    told = predicted_vs_measured_dict(compare_with_prediction(traced))
    assert told["predicted_is"] == "modelled" and told["cluster"] == "a2"
    for step, said in zip(steps, told["steps"], strict=True):
        for rank, reported in enumerate(said["ranks"]):
            made, dur = reported["measured"], defaultdict(float)
            for event in rank_events(step, rank):
                dur[event["cat"]] += event["dur"] / 1e6
            assert made["attention"] == pytest.approx(dur["attention"])
            assert made["exposed"] == pytest.approx(dur["wait"] + dur["communication"])
            assert made["waiting"] == pytest.approx(dur["batch"] + dur["ranks"])
            assert made["optimizer"] == pytest.approx(dur["optimizer"])
            assert made["seconds"] == pytest.approx(dur["step"])
            assert reported["predicted"]["sent"] == made["sent"]


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
    assert pair.step.ranks == ranks and pair.step.breakdown.sent.sum() > 0
    assert (pair.predicted.sent == pair.step.breakdown.sent).all()
    assert (pair.predicted.seconds > 0).all() and np.ptp(pair.predicted.seconds) == pytest.approx(0, abs=1e-12)
    kinds = {event["args"].get("kind") for event in pair.step.events}
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


def test_a_trace_that_cannot_be_written_is_left_out_and_the_run_goes_on(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path
) -> None:
    (tmp_path / "trace").write_text("a file")
    settings = tiny(corpus, tmp_path, train__train_iters=3, train__lr_warmup_iters=0, output__trace_steps=[1, 2])
    assert len(curve(fresh_ranks, settings, 1)) == 3
    with pytest.raises(ConfigError, match=r"has no traces of steps; set output.trace_steps"):
        read_traced_steps(tmp_path)
