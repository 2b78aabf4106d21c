"""A transient fault of one rank, with real processes: the run starts again and ends with the same numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed_cp.train.run_files import read_metrics
from tests.train.fresh_ranks import FreshRanks
from tests.train.test_launch import COMMAND, Run, write
from tests.train.test_training import curve, tiny, values

#: Row 5 of the first start has a loss that is NaN on rank 1.
POISON = """
import os
from pathlib import Path
import numpy as np
if os.environ.get("RANK") == "1" and not Path(__file__).with_name("poisoned").exists():
    Path(__file__).with_name("poisoned").touch()
    from mindspeed_cp.data.stream import PackedStream
    next_batch = PackedStream.next_batch
    def poisoned(self, *arguments):
        batch = next_batch(self, *arguments)
        for row in batch.rows:
            if row.index == 5:
                row.loss_mask[:] = np.nan
        return batch
    PackedStream.next_batch = poisoned
"""


@pytest.mark.thorough
@pytest.mark.fault(
    fault="a NaN in one step of one rank, `train.max_restarts` > 0",
    happens="all ranks start again from the newest checkpoint; the same bits as without the fault",
    lost="the steps since that checkpoint",
    printed="step, rank, layer, and the number of the restart",
)
def test_a_transient_nan_costs_a_restart_and_nothing_else(
    fresh_ranks: FreshRanks,
    corpus: Path,
    tmp_path: Path,
    start: Callable[..., Run],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "poison.py").write_text(POISON)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.syspath_prepend(tmp_path)
    changes = {
        "train__train_iters": 4, "train__lr_warmup_iters": 0, "checkpoint__save_interval": 1,
        "context_parallel_suite__context_parallel_size": 2,
    }  # fmt: skip
    plain = curve(fresh_ranks, tiny(corpus, tmp_path / "plain", **changes), 2)
    settings = tiny(
        corpus, tmp_path / "run", **changes, train__max_restarts=1,
        context_parallel_suite__algorithm_modules=["poison"],
    )  # fmt: skip
    code, _, errors = start(*COMMAND, write(settings, tmp_path)).end()
    assert code == 0, errors
    (line,) = errors
    assert line.startswith("step 3: the loss is NaN on rank 1 of 2") and line.endswith("again (1 of 1)")
    again = read_metrics(tmp_path / "run" / "metrics.jsonl")
    for key in ("step", "loss", "grad_norm", "lr"):
        assert values(again, key) == values(plain, key), key
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["restarts"] == 1
