"""The whole command on two processes, started as torchrun starts them."""

from __future__ import annotations

import json
import platform
import re
import tarfile
from pathlib import Path

import pytest

from mindspeed_cp.algorithms import ALGORITHMS
from mindspeed_cp.cluster import load_cluster
from mindspeed_cp.cluster_check.batches import BATCHES
from tests.ports import free_port
from tests.processes import preload
from tests.programs import run_programs

preload("mindspeed_cp.engine")

SMALL = ("--tokens-per-rank", "64", "--heads", "2", "--head-dim", "16", "--kernel-seconds", "0.1", "--device", "cpu")


def mindspeed_cp(words: list[str]) -> int:
    from mindspeed_cp.cli.main import run

    return run(words)


def run(folder: Path, *options: str, ranks: int = 2) -> list[tuple[int, str, str]]:
    """Exit code, output and messages of each rank."""
    port = str(free_port())
    places = [
        {
            "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
        }
        for rank in range(ranks)
    ]  # fmt: skip
    ended = run_programs(mindspeed_cp, ["doctor", "--cluster", "--folder", str(folder), *SMALL, *options], places)
    return [(done.returncode, done.stdout, done.stderr) for done in ended]


def test_two_ranks_write_a_report_and_an_archive(tmp_path: Path) -> None:
    folder = tmp_path / "report"
    (code, out, messages), (other_code, other_out, _) = run(folder)
    assert code == other_code == 0, messages[-3000:]
    assert "ok: all 21 runs of algorithms agree with the fp64 reference" in out and not other_out
    results = json.loads((folder / "results.json").read_text())
    assert results["finished"] and not results["failures"] and len(results["ranks"]) == 2
    (row,) = results["links"]
    assert row["pair"] == [0, 1] and min(row["there"], row["back"], row["both"]) > 0
    runs = {(row["batch"], row["algorithm"]) for row in results["algorithms"]}
    assert runs == {(batch, name) for batch in BATCHES for name in ALGORITHMS}
    for row in results["algorithms"]:
        assert row["measured"] > 0 and row["predicted"] > 0 and row["wrong"] is None and row["queries"] > 0
        assert sum(row["sent"]) / 2 == pytest.approx(row["predicted_sent"]), row["algorithm"]
    assert load_cluster(folder / "cluster.yaml").ranks_per_node == 2
    page = (folder / "report.html").read_text()
    assert all(f"Algorithms: {batch}" in page for batch in BATCHES) and page.count("data:image/png") == len(BATCHES)
    with tarfile.open(folder / "cluster-report.tar.gz") as archive:
        names = {name.removeprefix("cluster-report/") for name in archive.getnames()}
        assert names == {path.name for path in folder.iterdir()} - {"cluster-report.tar.gz"}
        for name in archive.getnames():
            file = archive.extractfile(name)
            assert file is not None
            text = file.read().decode()
            text = re.sub(r"[A-Za-z0-9+/=]{60,}", "", text)  # pictures
            assert not re.search(rf"(?<![\w.-]){re.escape(platform.node())}(?![\w-])", text), name
            assert str(tmp_path) not in text and "127.0.0.1" not in text, name


@pytest.mark.thorough  # two more starts of torch; tests/cluster_check/test_supervisor.py has the way of the exit code
def test_rank_0_refuses_for_all(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("")
    (code, _, messages), (other_code, _, other_messages) = run(tmp_path)
    assert code == other_code == 2
    assert "holds a report already; give another one, or --overwrite" in messages and "error" not in other_messages


@pytest.mark.parametrize(
    "options, text",
    [
        (["--cluster"], "error: --cluster: RANK is not set; start the ranks with torchrun"),
        (["--heads", "4"], "error: --heads: only for --cluster; give --cluster, or leave --heads out"),
        (["--cluster", "--device", "cuda"], "error: --device cuda: --cluster measures cpu and npu"),
        (["--cluster", "--npu-profile", "f.json"], "error: --npu-profile f.json: not with --cluster; run doctor"),
    ],
)
def test_a_start_that_is_wrong_is_one_line(options: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    from mindspeed_cp.cli.main import run as command

    assert command(["doctor", *options]) == 2
    messages = capsys.readouterr().err
    assert messages.startswith(text) and messages.count("\n") == 1
