"""The benchmark of balance runs, on next to nothing."""

from __future__ import annotations

import sys

import pytest

from benchmarks import balance
from benchmarks.pool import WAYS

SMALL = "--lengths lognormal --batches 1 --replicas 2 --micro-batches 1 --context 8192 --ranks 2 --pool-contexts 8192"


def test_every_method_and_every_way_has_its_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["balance", *SMALL.split()])
    balance.main()
    replicas, _, pool = capsys.readouterr().out.partition("pool of")
    for method in balance.methods(False):
        (line,) = (line for line in replicas.splitlines() if line[16:36].strip() == method)
        assert float(line.split()[-5]) >= 1, "slowest over mean"
    (row,) = (line.split() for line in pool.splitlines() if line.startswith("    8192 lognormal"))
    times = [float(cell) for cell in row[2 : 2 + 2 * len(WAYS) : 2]]
    assert min(times) >= 1 and times[3] in times[1:3]
