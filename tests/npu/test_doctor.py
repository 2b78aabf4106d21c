"""mindspeed-cp doctor --device npu over the stand-in: all rows pass, and an operator or a variant with a fault is found, named
and left out by the file that a training reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_cp import AttentionConfig
from mindspeed_cp.config.suite import SuiteSettings
from mindspeed_cp.device.npu_profile import NpuIdentity
from mindspeed_cp.device.select import npu_identity
from mindspeed_cp.doctor import LONG_CASES, SHORT_CASES
from mindspeed_cp.doctor.kernel_capability import CAPABILITY_CASES, write_json
from mindspeed_cp.doctor.operator import check
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.ops.attention.backends import backend_from_settings
from mindspeed_cp.ops.attention.npu.backend import NpuAttention
from mindspeed_cp.ops.attention.npu.fused_operator import loaded_torch_npu
from mindspeed_cp.ops.attention.operator import attention
from tests.device.profiles import profile
from tests.host_cann.cann_calls import AttentionCall
from tests.host_cann.oracle import calls
from tests.host_cann.oracle_faults import FAULTS, KV_START, MODE_1, SUM_OF_ONE, TOP_LEFT, UPDATE, UPDATE_OUT, set_fault
from tests.npu.commands import command, short_doctor
from tests.npu.test_training import corpus, train  # noqa: F401  a fixture
from tests.programs import run_programs

ROOT = Path(__file__).resolve().parent.parent.parent


def doctor(program: Callable[[list[str]], None], *words: str, **environment: str) -> tuple[int, dict[str, Any]]:
    """Exit code and report."""
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HOST_CANN_DEVICES": "4", "HOST_HCCL_SYNC": "1"}
    [done] = run_programs(program, ["doctor", "--device", "npu", "--json", *words], [settings | environment])
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr[-3000:]
    return done.returncode, json.loads(lines[-1])


@pytest.fixture(scope="module")
def with_a_fault(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any], Path]:
    """Exit code, report and file for a device whose gradient is wrong in one variant."""
    path = tmp_path_factory.mktemp("profile") / "doctor.json"
    return *doctor(short_doctor, "--npu-profile", str(path), HOST_CANN_FAULT=SUM_OF_ONE), path


def test_a_fault_in_one_variant_fails_its_rows_alone_and_the_file_leaves_it_out(
    with_a_fault: tuple[int, dict[str, Any], Path],
) -> None:
    code, report, path = with_a_fault
    assert code == 1 and not report["ok"]
    assert report["devices"]["npu"]["count"] == 4 and report["versions"]["CANN"] and report["versions"]["torch-npu"]
    assert all(row["backend"] == "npu" and row["ok"] for row in report["checks"])
    assert {row["dtype"] for row in report["checks"]} == {"fp32", "fp16", "bf16"}
    written = report["npu_profile"]
    assert written == json.loads(path.read_text())
    names = [report["devices"]["npu"]["names"][0], report["versions"]["torch-npu"], report["versions"]["CANN"]]
    assert [written["device"], written["torch_npu"], written["cann"]] == names
    assert {(row["option"], row["variant"]) for row in written["rows"] if not row["ok"]} == {("statistics", "lse")}
    suite = SuiteSettings(npu_profile=str(path))
    chosen = backend_from_settings(suite, "npu", AttentionConfig(2, 1, 32, alibi=True), torch.float32)
    assert chosen == NpuAttention("tnd", alibi="shared", statistics="max_sum", key_gaps="skipped")


@pytest.mark.thorough
def test_losses_with_the_file_are_those_without_the_fault_which_bites_without_it(
    with_a_fault: tuple[int, dict[str, Any], Path],
    corpus: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(name: str, *more: str) -> list[float]:
        common = (f"data.corpus={corpus}", "context_parallel_suite.algorithm=ring", "train.device=npu")
        lines = train(2, tmp_path / name, *common, "train.train_iters=2", *more)
        return [line[key] for line in lines for key in ("loss", "grad_norm")]

    sound = run("sound")
    monkeypatch.setenv("HOST_CANN_FAULT", SUM_OF_ONE)
    with_profile = run("profile", f"context_parallel_suite.npu_profile={with_a_fault[2]}")
    assert len(sound) == 4 and with_profile == pytest.approx(sound, rel=1e-5)
    assert run("fast", "context_parallel_suite.npu_statistics=lse") != pytest.approx(sound, rel=1e-3)


@pytest.mark.thorough  # minutes
def test_every_row_passes() -> None:
    code, report = doctor(command)
    assert code == 0 and report["ok"]
    rows = report["npu_profile"]["rows"]
    assert len(rows) == 3 * len(CAPABILITY_CASES) and all(row["ok"] for row in [*rows, *report["checks"]])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda ours: replace(ours, device="Ascend910_9392"), "is of device Ascend910_9392, and this machine has Ascend910B1"),
        (lambda ours: replace(ours, torch_npu="2.9.0"), "is of torch-npu 2.9.0, and this machine has 2.13.0"),
        (lambda ours: replace(ours, cann="8.5.0"), "is of CANN 8.5.0, and this machine has 9.0.0"),
    ],
    ids=["device", "torch-npu", "CANN"],
)  # fmt: skip
def test_a_file_of_another_device_is_one_line_at_the_first_attention(
    change: Callable[[NpuIdentity], NpuIdentity], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "doctor.json"
    write_json("--npu-profile", path, profile().model_dump() | vars(change(npu_identity())))
    suite = SuiteSettings(npu_profile=str(path))
    with pytest.raises(ConfigError, match=words):
        backend_from_settings(suite, "npu", AttentionConfig(2), torch.float32)


def test_the_operator_itself_refuses_an_old_cann(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a program that asks neither the doctor nor `train`."""
    x = torch.ones(10, 2, 16, device="npu")
    loaded_torch_npu.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[loaded_torch_npu.__module__], "cann_version", lambda: "8.0.RC3")
        with pytest.raises(ConfigError) as caught:
            attention(x, x, x, [0, 10], [0, 10], backend="npu")
        line = str(caught.value)
        assert (
            line.startswith("backend is 'npu': CANN is 8.0.RC3, needed is 8.5 or later; install") and "\n" not in line
        )
        patch.setattr(sys.modules[loaded_torch_npu.__module__], "cann_version", lambda: None)
        attention(x, x, x, [0, 10], [0, 10], backend="npu")


# faults of the operator


@pytest.fixture
def fault() -> Iterator[Callable[[str], None]]:
    yield set_fault
    set_fault(None)


#: Faults in what this project's calls do not use: whether a call does.
UNUSED: dict[str, Callable[[AttentionCall], bool]] = {
    KV_START: lambda call: any(call.kv_start),
    TOP_LEFT: lambda call: call.sparse_mode == 3 and any(queries != keys for queries, keys in call.sequences),
}
#: In what the cases use by an option alone.
OF_OPTIONS = {MODE_1: "npu_lowering: masks", UPDATE: "npu_merge: ring_update", UPDATE_OUT: "npu_merge: ring_update"}


@pytest.mark.parametrize("name", [name for name in FAULTS if name not in OF_OPTIONS])
def test_every_fault_of_the_operator_is_found(
    name: str, fault: Callable[[str], None], request: pytest.FixtureRequest
) -> None:
    """Or it is a fault in something that no call makes use of. By default a quick case finds it, a ring, or one past 512 rows."""
    [a_ring] = [case for case in LONG_CASES if case.name == "a ring of 3, ALiBi, full mask"]
    long_cases = LONG_CASES if request.config.getoption("thorough") else (a_ring, LONG_CASES[0])
    cases = [*SHORT_CASES, *long_cases]
    fault(name)
    calls.clear()
    is_noticed = any(not check("npu", "fp32", case)["ok"] for case in cases)
    made = [call for call in calls if isinstance(call, AttentionCall)]
    assert made and is_noticed == (name not in UNUSED or any(map(UNUSED[name], made)))


@pytest.mark.parametrize("name", OF_OPTIONS)
def test_a_fault_in_what_one_option_uses_is_found_by_its_row(name: str, fault: Callable[[str], None]) -> None:
    """And by no row of the same ring without the option."""
    fault(name)
    [case] = [case for case in LONG_CASES if OF_OPTIONS[name] in case.name]
    assert not check("npu", "bf16", case)["ok"]
    assert check("npu", "bf16", replace(case, npu={}))["ok"]


def test_a_broken_installation_is_one_line() -> None:
    """torch-npu is installed and CANN is not, and nothing keeps torch from importing torch_npu by itself."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "mindspeed_cp", "doctor", "--device", "npu"]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2 and len(errors) == 1, done.stderr
    assert "a library of CANN, is not found); install CANN" in errors[0] and "Traceback" not in done.stderr
