"""mindspeed-cp calibrate: it measures this CPU, writes a preset that loads, and refuses what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mindspeed_cp import AttentionConfig, ConfigError
from mindspeed_cp.cli.main import run
from mindspeed_cp.cluster import load_cluster
from mindspeed_cp.cluster.calibration import MeasuredFits, Measurement
from mindspeed_cp.config import SuiteSettings
from mindspeed_cp.doctor import calibrate, kernel_timing
from mindspeed_cp.doctor.links import Launch
from mindspeed_cp.ops.attention import backends
from mindspeed_cp.ops.attention.backends import BACKENDS, backend_from_settings
from mindspeed_cp.ops.attention.cuda.backend import CudaAttention
from tests.ops.flash_double import DoubleFlash
from tests.ports import free_port
from tests.processes import preload
from tests.programs import run_programs

preload("mindspeed_cp.doctor.calibrate", "mindspeed_cp.engine")

SMALL = (
    *("--device", "cpu", "--seconds", "0.2", "--longest", "512"),
    *("--heads", "2", "--head-dim", "32", "--dtype", "fp32"),
)
KERNELS = [
    *(Measurement("attention", seconds, flops=flops, short_side=side) for seconds, flops, side in
      ((0.0011, 1e9, 100), (0.0101, 1e10, 1000), (0.1001, 1e11, 100000))),
    *(Measurement("linear", seconds, flops=flops) for seconds, flops in ((0.001, 2e9), (0.01, 2e10))),
]  # fmt: skip
IN_NODE = [
    Measurement("in_node", 1.1e-5, bytes=1e6), Measurement("in_node", 1.01e-4, bytes=1e7),
    Measurement("in_node_all", 1e-4, bytes=3e7),
]  # fmt: skip
NETWORK = [
    Measurement("network", 2e-4, bytes=1e6), Measurement("network", 1.1e-3, bytes=1e7),
    Measurement("network_all", 1.1e-3, bytes=5e6),
]  # fmt: skip


def launched(ranks_per_node: int) -> list[dict[str, str]]:
    """Environments of two ranks, as torchrun sets them."""
    both = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": str(ranks_per_node), "MASTER_ADDR": "127.0.0.1"}
    both |= {"MASTER_PORT": free_port(), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return [{**both, "RANK": str(rank), "LOCAL_RANK": str(rank % ranks_per_node)} for rank in range(2)]


def test_this_cpu_is_measured_and_its_preset_loads(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    done, other = run_programs(run, ["calibrate", str(path), *SMALL, "--json"], launched(ranks_per_node=2))
    assert done.returncode == other.returncode == 0, done.stderr
    assert other.stdout == "", "one rank tells"
    report = json.loads(done.stdout)
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
    assert set(report["fits"]) == {"attention", "linear", "in_node"}
    again = MeasuredFits.from_measurements([Measurement(**measurement) for measurement in report["measurements"]])
    assert again.table() == report["fits"]
    for error in report["fits"].values():
        assert error["points"] >= 2 and 0 <= error["median_error"] <= error["largest_error"]


def calibrated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, links: list[Measurement], *arguments: str
) -> tuple[int, Path]:
    """Calibrate with given measurements in place of those of this process, and of a launch of four ranks a node."""
    monkeypatch.setattr(calibrate, "measure_kernels", lambda device, sizes: KERNELS)
    monkeypatch.setattr(calibrate, "is_launched", lambda: bool(links))
    monkeypatch.setattr(calibrate, "_measure_links", lambda kind: (links, Launch(0, 8, 0, 4)))
    out = tmp_path / "out.yaml"
    return run(["calibrate", str(out), "--device", "cpu", *arguments]), out


def test_measurements_are_fitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = calibrated(monkeypatch, tmp_path, IN_NODE + NETWORK)
    shown = capsys.readouterr().out
    assert code == 0 and "Fit: |modelled / measured - 1|" in shown and f"written: {out}" in shown
    cluster = load_cluster(out)
    assert (cluster.name, cluster.ranks_per_node, cluster.fabric) == ("out", 4, "mesh")
    assert cluster.pair_bandwidth == pytest.approx(1e11, rel=1e-3)
    assert cluster.in_node_latency == pytest.approx(1e-6, rel=1e-2)
    assert cluster.rank_bandwidth == pytest.approx(3e11, rel=1e-3), "all links of a rank at once"
    assert cluster.network_latency == pytest.approx(1e-4, rel=1e-3)
    assert cluster.nics_per_node == 2, "four ranks send 20 MB in the time in which one alone sends 10"
    assert cluster.nic_bandwidth == pytest.approx(20e6 / 1.1e-3 / 2, rel=1e-3)
    assert cluster.peak_flops == pytest.approx(2e12, rel=1e-3) and cluster.linear_efficiency == 1
    assert cluster.attention_efficiency == pytest.approx(0.5, rel=1e-3)
    assert cluster.launch == pytest.approx(1e-4, rel=0.05)


def test_a_base_gives_what_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out = calibrated(monkeypatch, tmp_path, [], "--base", "a800")
    made, base = load_cluster(out), load_cluster("a800")
    assert code == 0 and made.attention_efficiency == pytest.approx(1e12 / base.peak_flops, rel=1e-3)
    own = {
        key: getattr(made, key) for key in ("name", "attention_efficiency", "tile_rows", "linear_efficiency", "launch")
    }
    assert {"launch", "linear_efficiency", "communication_efficiency", "posting"} <= set(made.ranges)
    least, most = made.ranges["launch"]
    assert least <= made.launch <= most and made.ranges["posting"] == base.ranges["posting"], (
        "by the fit, and the base's"
    )
    assert made == base.with_values(**own, ranges=made.ranges), "all else is the base's"
    code, out = calibrated(monkeypatch, tmp_path, IN_NODE, "--base", "a800")
    made = load_cluster(out)
    assert code == 0 and made.communication_efficiency == 1 and made.nics_per_node == 2
    assert made.nic_bandwidth == base.effective_nic, "measured and nominal bandwidths do not mix"
    assert "communication_efficiency" not in made.ranges and "in_node_latency" in made.ranges


class DoubledKernels(CudaAttention):
    """Two kernels of the cuda backend on a CPU: the tiles', and a double of flash attention."""

    def __init__(self, kernel: str = "auto") -> None:
        super().__init__(kernel, DoubleFlash())

    def kernels_for(self, attention: AttentionConfig, dtype: torch.dtype) -> tuple[str, ...]:
        return ("flash", "tiles")


def test_kernels_of_a_gpu_are_compared_and_its_preset_is_for_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, which only the names of a GPU are given to."""
    monkeypatch.setattr(calibrate, "rank_device", lambda kind, rank: torch.device("cpu"))
    monkeypatch.setattr(calibrate, "device_name", lambda device: "H300")
    monkeypatch.setattr(kernel_timing, "CudaAttention", DoubledKernels)
    options = ("--device", "cuda", "--longest", "450", "--heads", "2", "--head-dim", "32")
    code, out = calibrated(monkeypatch, tmp_path, IN_NODE, *options)
    cluster = load_cluster(str(out))
    assert (
        code == 0 and cluster.device == "H300" and {time.kernel for time in cluster.kernel_times} == {"flash", "tiles"}
    )
    assert [(time.rows, time.keys) for time in cluster.kernel_times[::2]] == [
        (56, 84),
        (56, 450),
        (225, 340),
        (450, 450),
    ]
    assert all(0 < time.forward < 1 and 0 < time.backward < 1 for time in cluster.kernel_times)

    suite, config = SuiteSettings(cluster=str(out)), AttentionConfig(2, head_dim=32)
    for name in ("H300", "H100"):
        backends._cuda.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None, name=name: name)
        if name == "H300":
            backend = backend_from_settings(suite, "cuda", config, torch.bfloat16)
            assert isinstance(backend, CudaAttention) and backend.kernel_times == cluster.kernel_times
        else:
            with pytest.raises(
                ConfigError, match="was calibrated on H300, and this GPU is H100; run `mindspeed-cp cal"
            ):
                backend_from_settings(suite, "cuda", config, torch.bfloat16)
    assert backend_from_settings(SuiteSettings(cluster="h200"), "cuda", config, torch.bfloat16) is BACKENDS["cuda"]


def test_a_peak_below_what_was_measured_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--base", "a2", "--peak-flops", "1e12")
    assert calibrated(monkeypatch, tmp_path, [], *arguments)[0] == 2
    assert "linear was measured at 2e" in capsys.readouterr().err


@pytest.mark.thorough
def test_several_nodes_are_measured_under_a_launcher(tmp_path: Path) -> None:
    words = ["calibrate", str(tmp_path / "two.yaml"), *SMALL, "--base", "a2", "--json"]
    done, other = run_programs(run, words, launched(ranks_per_node=1))
    assert done.returncode == other.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert set(report["fits"]) == {"attention", "linear", "network"}
    assert report["sources"]["network_latency"] == "measured" and report["cluster"]["ranks_per_node"] == 1
    assert load_cluster(tmp_path / "two.yaml").nics_per_node == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("out.txt", "out.txt: the suffix is '.txt'; valid: a file name with .yaml or .yml"),
        ("no/out.yaml", "there is no folder no; create it"),
        ("settings.yaml", "settings.yaml: is there, and no preset that calibrate wrote; give the name of a new file"),
        ("out.yaml --device gpu", "--device gpu: cannot be calibrated; valid: auto, cpu, npu, cuda"),
        ("out.yaml --dtype fp8", "--dtype fp8: valid: bf16, fp16, fp32"),
        ("out.yaml", "links are measured among ranks; start torchrun --nproc-per-node 2 -m mindspeed_cp calibrate"),
        ("out.yaml --base a9", "cluster 'a9': no such preset"),
        ("out.yaml --peak-flops -1", "--peak-flops -1"),
        ("out.yaml --heads 8 --kv-heads 3", "--kv-heads 3: must divide --heads 8"),
        ("out.yaml --longest 100", "'--longest'"),
        ("out.yaml --seconds 0",  "'--seconds'"),
        ("", "Missing argument"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("settings.yaml").write_text("model: {num_layers: 2}\n")
    device = [] if "--device" in arguments else ["--device", "cpu"]
    assert run(["calibrate", *arguments.split(), *device]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and not captured.out
    assert not Path("out.yaml").exists()
