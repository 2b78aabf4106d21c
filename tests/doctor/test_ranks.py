"""`doctor` on two processes, started as torchrun starts them; what a launcher says; links; and ranks that fail."""

from __future__ import annotations

import json
import os
import threading
import time
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mindspeed_cp import PeerError
from mindspeed_cp.algorithms import ALGORITHMS
from mindspeed_cp.doctor import SHORT_CASES, ranks
from mindspeed_cp.doctor.links import NO_ANSWER, SILENT, first_error, read_launch
from mindspeed_cp.doctor.ranks import StoreAgreement, link_slots, tournament
from mindspeed_cp.errors import ConfigError
from tests.limits import HANG
from tests.ports import free_port
from tests.processes import preload
from tests.programs import run_programs

preload("mindspeed_cp.doctor.ranks")

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}  # fmt: skip


def mindspeed_cp(words: list[str]) -> int:
    from mindspeed_cp.cli.main import run as command

    return command(words)


def with_a_pair_that_cannot_connect(words: list[str]) -> int:
    time_pair = ranks.RanksCheck._time_pair

    def failing(check: ranks.RanksCheck, pair: tuple[int, int]) -> dict[str, float]:
        if check.launch.rank == 1:
            raise ConnectionError("the cable is\n cut")
        return time_pair(check, pair)

    ranks.RanksCheck._time_pair = failing  # type: ignore[method-assign]
    ranks.DEFAULTS["cpu"] = ranks.DEFAULTS["cpu"]._replace(link_seconds=3.0)
    return mindspeed_cp(words)


def with_a_lost_gradient(words: list[str]) -> int:
    grad = torch.autograd.grad

    def lost(*arguments: Any) -> tuple[torch.Tensor, ...]:
        dq, dk, dv = grad(*arguments)
        return dq, dk.index_fill(0, torch.arange(min(1, len(dk))), 0.0), dv

    ranks.torch.autograd.grad = lost if os.environ["RANK"] == "1" else grad  # type: ignore[assignment]
    return mindspeed_cp(words)


def run(path: Path, program: Any = mindspeed_cp) -> list[tuple[int, str, str]]:
    """Exit code, output and messages of each of two ranks."""
    port = str(free_port())
    places = [
        {
            "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
            "HCCL_BUFFSIZE": str(100 + rank),
        }
        for rank in range(2)
    ]  # fmt: skip
    ended = run_programs(program, ["doctor", "--report", str(path), "--device", "cpu"], places)
    return [(done.returncode, done.stdout, done.stderr) for done in ended]


def test_two_ranks_write_one_report_with_links_and_every_algorithm(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    (code, out, messages), (other_code, other_out, _) = run(path)
    assert code == other_code == 0, messages[-3000:] + out
    assert f"ok: all {len(ALGORITHMS)} runs of algorithms agree with the fp64 reference" in out and not other_out
    assert "note: ranks differ in HCCL_BUFFSIZE: 100 (rank 0); 101 (rank 1)" in out and "written: " in out
    report = json.loads(path.read_text())
    assert report["finished"] and report["running"] is None and not report["failures"] and len(report["ranks"]) == 2
    (row,) = report["links"]
    assert row["pair"] == [0, 1] and min(row["there"], row["back"]) > 0
    assert [row["algorithm"] for row in report["algorithms"]] == list(ALGORITHMS)
    assert all(row["wrong"] is None for row in report["algorithms"])
    assert all(rank["ok"] and len(rank["checks"]) == 3 * len(SHORT_CASES) for rank in report["ranks"])


def test_a_link_that_fails_is_named_and_what_was_measured_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    codes = [code for code, _, _ in run(path, with_a_pair_that_cannot_connect)]
    report = json.loads(path.read_text())
    assert codes == [1, 1] and len(report["ranks"]) == 2 and report["finished"]
    assert [row["stage"] for row in report["failures"]] == ["links", "links"]
    assert report["failures"][0]["error"] == "0 - 1: rank 1: ConnectionError: the cable is cut"
    assert report["failures"][1]["error"] == "not measured after this: join, algorithms"


def test_a_gradient_that_is_lost_on_one_rank_is_found_in_every_algorithm(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    (code, out, _), (other_code, _, _) = run(path, with_a_lost_gradient)
    assert code == other_code == 1
    runs = json.loads(path.read_text())["algorithms"]
    assert len(runs) == len(ALGORITHMS) and all("rank 1: dk differs from fp64" in row["wrong"] for row in runs)
    assert "FAILED: ring: rank 1: dk differs from fp64" in out


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"MASTER_PORT": ""}, r"MASTER_PORT is not set, but RANK and WORLD_SIZE are; start the ranks with torchrun"),
        ({"WORLD_SIZE": "many"}, r"WORLD_SIZE=many.*must be whole numbers"),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, r"WORLD_SIZE is 1.*2 or more"),
        ({"WORLD_SIZE": "6"}, r"rank 5 of 6 is local rank 1 of 4; valid: the same number of ranks on every node"),
        ({"LOCAL_RANK": "3"}, r"numbered node by node"),
        ({"RANK": "5000", "WORLD_SIZE": "8000", "LOCAL_RANK": "0"}, r"ulimit -n = 10000: 8000 ranks need up to"),
    ],
)
def test_a_launch_without_whole_nodes_is_refused(
    change: dict[str, str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (TORCHRUN | change).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("mindspeed_cp.device.open_files.hard_limit", lambda: 10000)
    with pytest.raises(ConfigError, match=text):
        read_launch("doctor")


@pytest.mark.parametrize(
    ("options", "environment", "text"),
    [
        (["--device", "cuda"], TORCHRUN, "error: --device cuda: is not measured over all ranks; valid"),
        (["--npu-profile", "f.json"], TORCHRUN, "error: --npu-profile f.json: not under torchrun; run the doctor in"),
        (["--report", "nowhere/f.json"], {}, "error: --report nowhere/f.json: there is no folder nowhere"),
        (["--report", "f.txt"], {}, "error: --report f.txt: the suffix is '.txt'; valid: a file name with .json"),
    ],
)
def test_a_start_that_is_wrong_is_one_line(
    options: list[str],
    environment: dict[str, str],
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mindspeed_cp.cli.main import run as command

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert command(["doctor", *options]) == 2
    messages = capsys.readouterr().err
    assert messages.startswith(text) and messages.count("\n") == 1


def test_rank_0_names_a_rank_that_gives_no_answer_and_others_hear_of_it() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=HANG))
    answers: list[Any] = []
    other = threading.Thread(
        target=lambda: answers.append(StoreAgreement(store, 1, 3).agree({"x": 1}, lambda rows: None, HANG))
    )
    other.start()
    start = time.monotonic()
    answer = StoreAgreement(store, 0, 3).agree({}, lambda rows: [row.get("error") for row in rows], 1.0)
    other.join(HANG)
    assert answer == [None, None, "no answer within 1 s"] == answers[0] and time.monotonic() - start < HANG


def test_the_error_that_explains_the_others_is_named() -> None:
    """Too many open files at one rank are time-outs at its peers."""
    late = "RuntimeError: HCCL: the connection timed out"
    files = "OSError: [Errno 24] Too many open files"
    assert first_error({0: late, 1: files, 2: NO_ANSWER}) == f"rank 1: {files}"
    assert first_error({0: f"{SILENT} (x)", 1: late}) == f"rank 1: {late}"
    assert first_error({0: late, 1: "ValueError: x"}) == "rank 1: ValueError: x"
    assert first_error({0: f"{NO_ANSWER} within 3 s", 1: late}) == f"rank 1: {late}" and first_error({}) is None


@pytest.mark.parametrize("count", range(1, 9))
def test_a_tournament_has_every_pair_once_in_disjoint_rounds(count: int) -> None:
    rounds = list(tournament(count))
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(count), 2))
    assert all(len({rank for pair in pairs for rank in pair}) == 2 * len(pairs) for pairs in rounds)
    assert len(rounds) <= count


@pytest.mark.parametrize("nodes, per_node", [(1, 2), (2, 1), (2, 2), (3, 4), (4, 3)])
def test_slots_use_a_link_once_and_no_rank_twice(nodes: int, per_node: int) -> None:
    slots = list(link_slots(nodes, per_node))
    pairs = {kind: [pair for name, slot in slots if name == kind for pair in slot] for kind in ("in_node", "network")}
    assert len(set(pairs["in_node"])) == len(pairs["in_node"]) == nodes * per_node * (per_node - 1) // 2
    assert len(set(pairs["network"])) == len(pairs["network"]) == per_node * nodes * (nodes - 1) // 2
    assert all(a // per_node == b // per_node for a, b in pairs["in_node"])
    assert all(a % per_node == b % per_node and a // per_node != b // per_node for a, b in pairs["network"])
    for kind, slot in slots:
        used = [rank // per_node for pair in slot for rank in pair]
        assert len(set(used)) == len(used) // (2 if kind == "in_node" else 1)  # one pair, or one NIC, of a node


def test_a_store_that_is_gone_is_one_error() -> None:
    class Gone(dist.HashStore):
        def set(self, *_: Any) -> None:
            raise dist.DistNetworkError("closed")

    with pytest.raises(PeerError, match="rank 1: the store of the ranks is gone, so rank 0 has ended"):
        StoreAgreement(Gone(), 1, 2).agree({}, lambda rows: None, 1.0)
