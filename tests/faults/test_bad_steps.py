"""A transient fault of one rank, with real processes: the run starts again and ends with the same numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.train.run_files import read_metrics
from tests.ports import free_port
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

CHANGES = {
    "train__train_iters": 4, "train__lr_warmup_iters": 0, "checkpoint__save_interval": 1,
    "context_parallel_suite__context_parallel_size": 2,
}  # fmt: skip


def poisoned_settings(corpus: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Settings:
    """Settings of a run on 2 ranks that fails once in its step 3, and may start again."""
    (folder / "poison.py").write_text(POISON)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    monkeypatch.syspath_prepend(folder)
    return tiny(
        corpus, folder / "run", **CHANGES, **changes, train__max_restarts=1,
        context_parallel_suite__algorithm_modules=["poison"],
    )  # fmt: skip


def commands_of_two_nodes(settings: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[object]]:
    """The commands of two nodes with a rank each, on this machine; their logs are in logs0 and logs1 of the folder."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    where = ["--nproc=1", "--nodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    return [[*COMMAND, settings, *where, f"--node-rank={node}", f"--log-dir={folder}/logs{node}"] for node in (0, 1)]


def assert_same_numbers(folder: Path, plain: list[dict[str, Any]]) -> None:
    """Assert that a run went on once, and gave the numbers of the run without a fault."""
    again = read_metrics(folder / "metrics.jsonl")
    for key in ("step", "loss", "grad_norm", "lr"):
        assert values(again, key) == values(plain, key), key
    assert json.loads((folder / "summary.json").read_text())["restarts"] == 1


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
    plain = curve(fresh_ranks, tiny(corpus, tmp_path / "plain", **CHANGES), 2)
    settings = poisoned_settings(corpus, tmp_path, monkeypatch)
    code, _, errors = start(*COMMAND, write(settings, tmp_path)).end()
    assert code == 0, errors
    (line,) = errors
    assert line.startswith("step 3: the loss is NaN on rank 1 of 2") and line.endswith("again (1 of 1)")
    assert_same_numbers(tmp_path / "run", plain)


@pytest.mark.thorough
@pytest.mark.fault(
    fault="a NaN in one step of one rank of two nodes, `train.max_restarts` > 0",
    happens="each node starts its ranks again, and they meet; the same bits as without the fault",
    lost="the steps since that checkpoint",
    printed="on each node what it saw, and the number of the restart",
)
def test_two_nodes_start_their_ranks_again(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path, start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = curve(fresh_ranks, tiny(corpus, tmp_path / "plain", **CHANGES), 2)
    settings = write(poisoned_settings(corpus, tmp_path, monkeypatch, context_parallel_suite__nodes=2), tmp_path)
    nodes = [start(*command) for command in commands_of_two_nodes(settings, tmp_path, monkeypatch)]
    for code, _, errors in [node.end() for node in nodes]:
        assert code == 0, errors
        assert len(errors) == 1 and errors[0].endswith("starting all ranks again (1 of 1)"), errors
    assert_same_numbers(tmp_path / "run", plain)


@pytest.mark.thorough
@pytest.mark.fault(
    fault="the launcher of one of two nodes is killed",
    happens="all ranks save a checkpoint after their step; the other node fails, or starts its ranks again and waits",
    lost="nothing",
    printed="the ranks whose launcher was killed, the step, and the checkpoint",
)
def test_a_launcher_killed_on_another_node_is_a_fault(
    corpus: Path, tmp_path: Path, start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the command of that node, given again, goes on with the others."""
    folder = tmp_path / "run"
    changes = CHANGES | {"train__train_iters": 100000, "context_parallel_suite__nodes": 2, "train__max_restarts": 1}
    settings = write(tiny(corpus, folder, **changes), tmp_path)
    commands = commands_of_two_nodes(settings, tmp_path, monkeypatch)
    nodes = [start(*command) for command in commands]

    def steps() -> int:
        return len(read_metrics(folder / "metrics.jsonl"))

    nodes[0].wait_for(lambda: (folder / "metrics.jsonl").exists() and steps() >= 2, "step 2")
    nodes[1].process.kill()
    log = tmp_path / "logs0" / "launcher0.log"
    line = nodes[0].wait_for(lambda: log.exists() and log.read_text(), "the end of the first start")
    assert re.search(
        r"^\S+T\S+ rank 0 lost rank 1: .* launcher of rank 1 was killed; all ranks stopped after step \d+, and iter_",
        line,
    )
    before = steps()
    nodes[1] = start(*commands[1])
    nodes[0].wait_for(lambda: steps() >= before + 2, "two steps more")
    nodes[0].process.terminate()
    assert [node.end()[0] for node in nodes] == [0, 0]
