"""Supervisors of two ranks over a store in one process, with real workers: faults become rows, and the rest goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from mindspeed_cp.cluster_check import supervisor as supervision
from mindspeed_cp.cluster_check.supervisor import MAX_FAILURES, Coordinator, Failure, StageResult, Supervisor
from mindspeed_cp.cluster_check.worker import Worker
from tests.cluster_check.faulty import MEASUREMENTS, Context
from tests.limits import HANG


@contextmanager
def coordinator(silence: float = HANG, ranks: int = 2, following: int = 1) -> Iterator[tuple[Coordinator, list[int]]]:
    """Rank 0 of a check whose other ranks follow in threads; yields it and the exit codes of the others."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=HANG))
    codes: list[int] = []

    def make(rank: int) -> Supervisor:
        return Supervisor(rank, ranks, store, MEASUREMENTS, lambda number: Worker(Context, (rank, number)), silence)

    threads = [
        threading.Thread(target=lambda rank=rank: codes.append(make(rank).follow())) for rank in range(1, following + 1)
    ]
    for thread in threads:
        thread.start()
    first = Coordinator(make(0))
    try:
        yield first, codes
    finally:
        first.stop(0)
        for thread in threads:
            thread.join(HANG)


def by_rank(result: StageResult) -> list[list[int]]:
    return [sorted(rows) for rows in result.rows]


def test_faults_become_rows_and_later_items_run_on_new_workers() -> None:
    """One item of each fault, on rank 1; the other rank would wait for ever in some."""
    items: list[dict[str, Any]] = [{}, {"1": "raise"}, {}, {"1": "die", "0": "wait"}, {}]
    with coordinator() as (first, codes):
        result = first.run("fault", items)
    assert by_rank(result)[0] == by_rank(result)[2] == by_rank(result)[4] == [0, 1]
    assert [rows.get(1, {}).get("generation") for rows in result.rows] == [0, None, 1, None, 2]
    raised, died = result.failures
    assert raised.item == items[1] and raised.errors == {1: "ValueError: a bad cable"}
    assert died.item == items[3] and died.errors == {1: "its process ended with signal 9"}
    assert died.first_error == "rank 1: its process ended with signal 9"
    assert Failure("links", None, {1: "rank 1: sending to rank 0"}).first_error == "rank 1: sending to rank 0"
    assert codes == [0]


def test_a_hang_is_ended_and_is_not_blamed_on_those_who_waited() -> None:
    items: list[dict[str, Any]] = [{"1": "hang"}, {}]
    with coordinator(silence=2.0) as (first, _):
        result = first.run("fault", items)
    (failure,) = result.failures
    assert failure.errors == {1: "no sign of life for 2 s; its process was ended"}
    assert by_rank(result) == [[0], [0, 1]]


def test_a_failure_ends_workers_that_would_hang_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mindspeed_cp.cluster_check.worker.GRACE_SECONDS", 0.5)
    with coordinator() as (first, _):  # no limit but that of a hung test
        result = first.run("fault", [{"0": "hang", "1": "raise"}, {}])
    assert [failure.errors for failure in result.failures] == [{1: "ValueError: a bad cable"}]
    assert by_rank(result) == [[], [0, 1]]


def test_after_many_failures_the_rest_is_left_out_and_said() -> None:
    items = [{"0": "raise"}] * (MAX_FAILURES + 2)
    with coordinator(ranks=1, following=0) as (first, _):
        result = first.run("fault", items)
    assert len(result.failures) == MAX_FAILURES + 1
    assert result.failures[-1].errors[0] == "4 items failed; the 2 after them were not measured"


def test_a_rank_that_never_answers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "JOIN_SECONDS", 1.0)
    with coordinator(following=0) as (first, _):
        result = first.run("fault", [{}])
        later = first.run("fault", [{}])
    assert result.rows == [{0: {"rank": 0, "generation": 0}}]
    assert result.failures[0].errors == {1: "did not start: no sign of life of its process"}
    assert first.lost == [1] and not later.rows[0]
    assert later.failures[0].errors[0].startswith("rank 1 gave no sign of life, so this was not measured")


def test_the_exit_code_reaches_all_ranks() -> None:
    with coordinator() as (first, codes):
        first.stop(2)
        while not codes:
            pass
    assert codes == [2]
