"""mindspeed-cp calibrate: it measures this CPU, writes a preset that loads, and refuses what is wrong."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mindspeed_cp.cli.main import run
from mindspeed_cp.cluster import load_cluster
from mindspeed_cp.errors import PeerError
from tests.limits import HANG
from tests.ports import free_port
from tests.processes import preload
from tests.programs import forked_processes, run_programs

preload("mindspeed_cp.doctor.calibrate", "mindspeed_cp.engine")

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = (
    "--device",
    "cpu",
    "--seconds",
    "0.2",
    "--longest",
    "512",
    "--heads",
    "2",
    "--head-dim",
    "32",
    "--dtype",
    "fp32",
)
CSV = """kind,seconds,flops,short_side,calls,bytes
attention,0.0011,1e9,100,1,
attention,0.0101,1e10,1000,1,
attention,0.1001,1e11,100000,1,
linear,0.001,2e9,,,
linear,0.01,2e10,,,
"""
LINKS = """in_node,1.1e-5,,,,1e6
in_node,1.01e-4,,,,1e7
in_node_all,1e-4,,,,3e7
network,2e-4,,,,1e6
network,1.1e-3,,,,1e7
network_all,1.1e-3,,,,5e6
"""


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-m", "mindspeed_cp", "calibrate", *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **settings}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A preset of this CPU, and what the command says of it."""
    path = tmp_path_factory.mktemp("calibrate") / "mine.yaml"
    [done] = run_programs(run, ["calibrate", str(path), *SMALL, "--json"], [{"OMP_NUM_THREADS": "1"}])
    assert done.returncode == 0, done.stderr
    return path, json.loads(done.stdout)


def test_this_cpu_is_measured_and_its_preset_loads(measured: tuple[Path, dict[str, Any]]) -> None:
    path, report = measured
    cluster = load_cluster(str(path))
    assert cluster.name == "mine" and cluster.ranks_per_node == 2 and cluster.fabric == "switch"
    for key, value in report["cluster"].items():
        assert getattr(cluster, key) == value
        assert report["sources"][key]
        line = next(line for line in path.read_text().splitlines() if line.startswith(f"{key}:"))
        assert line.endswith(f"# {report['sources'][key]}")
    assert cluster.communication_efficiency == 1 and 1e7 < cluster.pair_bandwidth < 1e12
    assert 1e8 < cluster.peak_flops < 1e15 and 0 < cluster.attention_efficiency <= 1 and cluster.linear_efficiency > 0
    assert max(cluster.attention_efficiency, cluster.linear_efficiency) == 1, "the peak is the highest rate measured"
    assert report["sources"]["nic_bandwidth"].startswith("assumed") and report["sources"]["launch"] == "measured"


def test_the_error_of_the_fit_is_shown(measured: tuple[Path, dict[str, Any]]) -> None:
    from mindspeed_cp.cluster.calibration import MeasuredFits, Measurement

    _, report = measured
    assert set(report["fits"]) == {"attention", "linear", "in_node"}
    again = MeasuredFits.from_measurements([Measurement(**measurement) for measurement in report["measurements"]])
    assert again.table() == report["fits"]
    for error in report["fits"].values():
        assert error["points"] >= 2 and 0 <= error["median_error"] <= error["largest_error"]


def calibrated(tmp_path: Path, csv: str, *arguments: str) -> tuple[int, Path]:
    (tmp_path / "given.csv").write_text(csv)
    out = tmp_path / "out.yaml"
    return run(["calibrate", str(out), "--device", "cpu", "--csv", str(tmp_path / "given.csv"), *arguments]), out


def test_measurements_of_a_file_are_fitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = calibrated(tmp_path, CSV + LINKS, "--nproc", "4", "--name", "a wire")
    shown = capsys.readouterr().out
    assert code == 0 and "Fit: |modelled / measured - 1|" in shown and f"written: {out}" in shown
    cluster = load_cluster(out)
    assert (cluster.name, cluster.ranks_per_node, cluster.fabric) == ("a wire", 4, "mesh")
    assert cluster.pair_bandwidth == pytest.approx(1e11, rel=1e-3) and cluster.in_node_latency == pytest.approx(
        1e-6, rel=1e-2
    )
    assert cluster.rank_bandwidth == pytest.approx(3e11, rel=1e-3), "all links of a rank at once"
    assert cluster.network_latency == pytest.approx(1e-4, rel=1e-3)
    assert cluster.nics_per_node == 2, "four ranks send 20 MB in the time in which one alone sends 10"
    assert cluster.nic_bandwidth == pytest.approx(20e6 / 1.1e-3 / 2, rel=1e-3)
    assert cluster.peak_flops == pytest.approx(2e12, rel=1e-3) and cluster.linear_efficiency == 1
    assert cluster.attention_efficiency == pytest.approx(0.5, rel=1e-3) and cluster.launch == pytest.approx(
        1e-4, rel=0.05
    )
    assert "given.csv" in next(line for line in out.read_text().splitlines() if line.startswith("tile_rows"))


def test_posting_of_a_file_is_not_measured_again(tmp_path: Path) -> None:
    """With and without links of the file: the value is the file's, and so is its source."""
    posting = "posting,6e-6,,,2,\nposting,9e-6,,,3,\n"
    for links, ranks in ((LINKS, "4"), ("", "2")):
        code, out = calibrated(tmp_path, CSV + links + posting, "--nproc", ranks, "--overwrite")
        line = next(line for line in out.read_text().splitlines() if line.startswith("posting"))
        assert code == 0 and load_cluster(out).posting == pytest.approx(3e-6) and "given.csv" in line


def test_a_base_gives_what_is_not_measured(tmp_path: Path) -> None:
    code, out = calibrated(tmp_path, CSV, "--base", "a800", "--nproc", "1")
    made, base = load_cluster(out), load_cluster("a800")
    assert code == 0 and made.attention_efficiency == pytest.approx(1e12 / base.peak_flops, rel=1e-3)
    own = {
        key: getattr(made, key) for key in ("name", "attention_efficiency", "tile_rows", "linear_efficiency", "launch")
    }
    assert made == base.with_values(**own), "all else is the base's"
    code, out = calibrated(tmp_path, CSV + LINKS.split("network")[0], "--base", "a800", "--nproc", "4", "--overwrite")
    made = load_cluster(out)
    assert code == 0 and made.communication_efficiency == 1 and made.nics_per_node == 2
    assert made.nic_bandwidth == base.effective_nic, "measured and nominal bandwidths do not mix"


@pytest.mark.thorough
def test_several_nodes_are_measured_under_a_launcher(tmp_path: Path) -> None:
    launcher = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    launcher |= {"MASTER_PORT": free_port(), "GLOO_SOCKET_IFNAME": "lo"}
    command = (str(tmp_path / "two.yaml"), *SMALL, "--base", "a2", "--json")
    processes = [start(*command, RANK=str(rank), **launcher) for rank in range(2)]
    ended = [process.communicate(timeout=HANG) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ended
    report = json.loads(ended[0][0])
    assert ended[1][0] == "", "one rank tells"
    assert set(report["fits"]) == {"attention", "linear", "network"}
    assert report["sources"]["network_latency"] == "measured" and report["cluster"]["ranks_per_node"] == 1
    assert load_cluster(tmp_path / "two.yaml").nics_per_node == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["out.txt"], "out.txt: must end in .yaml"),
        (["no/out.yaml"], "the folder no does not exist"),
        (["there.yaml"], "there.yaml: is there already; give another name, or --overwrite"),
        (["out.yaml", "--device", "gpu"], "--device gpu: cannot be calibrated; valid: auto, cpu, npu"),
        (["out.yaml", "--dtype", "fp8"], "--dtype fp8: valid: bf16, fp16, fp32"),
        (["out.yaml", "--nproc", "0"], "--nproc 0: must be 1 or more"),
        (["out.yaml", "--nproc", "1"], "--nproc 1: links cannot be measured with one rank; give --nproc 2"),
        (["out.yaml", "--nproc", "9", "--base", "a2"], "a node of cluster a2 has 8 ranks"),
        (["out.yaml", "--base", "a9"], "cluster 'a9': no such preset"),
        (["out.yaml", "--csv", "none.csv"], "none.csv: no such file"),
        (["out.yaml", "--csv", "bad.csv"], "bad.csv:2: kind 'wire'"),
        (["out.yaml", "--csv", "links.csv"], "has rows of links, but not of how many ranks of a node; give --nproc"),
        (["out.yaml", "--csv", "kernels.csv", "--base", "a2", "--nproc", "1", "--peak-flops", "1e12"], "linear was measured at 2e"),
        (["out.yaml", "--peak-flops", "-1"], "--peak-flops -1"),
        (["out.yaml", "--heads", "8", "--kv-heads", "3"], "--kv-heads 3: must divide --heads 8"),
        (["out.yaml", "--longest", "100"], "--longest 100: must be 256 or more"),
        (["out.yaml", "--seconds", "0"], "--seconds 0: must be above 0"),
        (["out.yaml", "--nproc", "x"], "'--nproc'"),
        ([], "Missing argument"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.yaml").touch()
    Path("bad.csv").write_text("kind,seconds\nwire,1\n")
    Path("links.csv").write_text(CSV + LINKS)
    Path("kernels.csv").write_text(CSV)
    device = [] if "--device" in arguments else ["--device", "cpu"]
    assert run(["calibrate", *arguments, *device]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and not captured.out
    assert not Path("out.yaml").exists()


def test_nproc_under_a_launcher_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run(["calibrate", str(tmp_path / "out.yaml"), "--device", "cpu", "--nproc", "2"]) == 2
    assert "the launcher has set the number of ranks" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="needs a rank that cannot start")
def test_a_rank_that_cannot_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from mindspeed_cp.doctor.links import measure_local_links

    monkeypatch.setattr("mindspeed_cp.comm.local_ranks.mp", forked_processes())
    with pytest.raises(PeerError, match=r"calibrate: rank [01]: ConfigError: --device npu: torch_npu is not installed"):
        measure_local_links("npu", 2)
