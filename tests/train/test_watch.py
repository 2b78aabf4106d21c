"""Slow ranks and hanging steps are named: the decision, and the dump of a rank that waits."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from mindspeed_cp.comm import last_wait
from mindspeed_cp.comm.transport import Transfer
from mindspeed_cp.schema.messages import name_ranks
from mindspeed_cp.train.hang_watch import HangWatch
from mindspeed_cp.train.stragglers import ComputeProbe, StragglerWatch
from tests.limits import HANG


def test_a_rank_that_stays_slow_is_named_once() -> None:
    watch, random = StragglerWatch(steps=20), np.random.default_rng(0)
    told = []
    for _ in range(100):
        times = random.normal(1.0, 0.01, 8)
        times[3] *= 1.5
        told.append(watch.add(times))
    assert [i for i, line in enumerate(told) if line] == [19]
    assert "rank 3 is slow" in str(told[19]) and "1.5 times" in str(told[19])


@pytest.mark.parametrize("spread", [0.0, 0.01, 0.3])
def test_noise_hiccups_and_small_differences_name_nobody(spread: float) -> None:
    watch, random = StragglerWatch(steps=20), np.random.default_rng(1)
    for step in range(400):
        times = np.abs(random.normal(1.0, spread, 8))
        times[2] *= 1.1  # for ever, but little
        times[5] *= 30.0 if step % 20 else 1.0  # much, but not long enough
        assert watch.add(times) is None


@pytest.mark.parametrize(("ranks", "slow"), [(2, (0,)), (2, (1,)), (4, (2, 3)), (5, (0, 1))])
def test_half_of_the_ranks_may_be_slow(ranks: int, slow: tuple[int, ...]) -> None:
    """As one node of two, or one rank of two."""
    watch, random = StragglerWatch(steps=5), np.random.default_rng(2)
    told = []
    for _ in range(5):
        times = random.normal(1.0, 0.01, ranks)
        times[list(slow)] *= 2.0
        told.append(watch.add(times))
    assert told[:4] == [None] * 4 and f"{name_ranks(slow, 'is', 'are')} slow" in str(told[4])


def test_a_single_rank_is_never_slow() -> None:
    watch = StragglerWatch(steps=1)
    assert all(watch.add([seconds]) is None for seconds in (0.0, 1.0, 100.0))


def test_the_probe_times_a_computation_that_changes_nothing() -> None:
    probe = ComputeProbe(torch.device("cpu"))
    state = torch.random.get_rng_state()
    assert probe.seconds() > 0 and probe.seconds() > 0
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_hanging_step_is_dumped_once_with_what_it_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "rank1.log"
    transfer = Transfer(torch.zeros(1), 0, False, 7, "K and V, step 3, 40 rows")
    with open(log, "w") as file, HangWatch(1, 0.4) as watch:
        monkeypatch.setattr(sys, "stderr", file)
        last_wait.note_wait(transfer, 4)

        def waits_here() -> None:
            deadline = time.monotonic() + HANG
            while "waits_here" not in log.read_text() and time.monotonic() < deadline:
                time.sleep(0.01)

        with watch.step(12):
            waits_here()
            time.sleep(0.5)  # it is not dumped again
        last_wait.note_arrival()
    text = log.read_text()
    assert text.count("rank 1: step 12 has taken more than") == 1
    assert "it waits for receiving from rank 4, K and V, step 3, 40 rows" in text
    assert "last message of the engine" in last_wait.describe_last_wait()
