"""mindspeed-cp doctor --device npu over the stand-in: all rows pass, and an operator with a fault is found and named."""

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

from mindspeed_cp.doctor import LONG_CASES, SHORT_CASES
from mindspeed_cp.doctor.kernel_capability import CAPABILITY_CASES
from mindspeed_cp.doctor.operator import OperatorCase, check
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.ops.attention import attention
from mindspeed_cp.ops.attention.npu.fused_operator import loaded_torch_npu
from tests.host_cann.oracle_calls import Call, calls
from tests.host_cann.oracle_faults import COLUMNS, FAULTS, KV_START, MODE_1, TOP_LEFT, UPDATE, UPDATE_OUT, set_fault

ROOT = Path(__file__).resolve().parent.parent.parent


def doctor(program: str = "tests.npu.doctor_command", **environment: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, report and messages."""
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", **environment}
    command = [sys.executable, "-m", program, "doctor", "--device", "npu", "--json"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr[-3000:]
    return done.returncode, json.loads(lines[-1]), done.stderr


@pytest.mark.parametrize(
    "program",
    ["tests.npu.doctor_command", pytest.param("tests.npu.command", marks=pytest.mark.thorough)],
    ids=["some cases", "all cases"],
)
def test_every_row_passes(program: str) -> None:
    code, report, _ = doctor(program, HOST_CANN_DEVICES="4", HOST_HCCL_SYNC="1")
    assert code == 0 and report["ok"]
    assert report["devices"]["npu"]["count"] == 4 and report["versions"]["CANN"] and report["versions"]["torch-npu"]
    assert all(check["backend"] == "npu" and check["ok"] for check in report["checks"])
    assert {check["dtype"] for check in report["checks"]} == {"fp32", "fp16", "bf16"}
    profile = report["npu_profile"]
    names = [report["devices"]["npu"]["names"][0], report["versions"]["torch-npu"], report["versions"]["CANN"]]
    assert [profile["device"], profile["torch_npu"], profile["cann"]] == names
    rows = len(CAPABILITY_CASES) if program == "tests.npu.command" else 1
    assert len(profile["rows"]) == 3 * rows and all(row["ok"] for row in profile["rows"])


def test_an_old_cann_is_told_before_anything_runs() -> None:
    code, report, _ = doctor(HOST_CANN_DEVICES="2", HOST_CANN_VERSION="8.0.RC3")
    assert code == 1
    assert report["requirements"][0]["error"].startswith("CANN is 8.0.RC3, needed is 8.5 or later")
    assert report["checks"] == [] and report["versions"]["CANN"] == "8.0.RC3"


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


@pytest.mark.thorough  # the next tests find every fault, in this process
def test_a_mask_that_is_ignored_is_found_and_named() -> None:
    code, report, _ = doctor(HOST_CANN_DEVICES="1", HOST_CANN_FAULT=COLUMNS)
    failed = {check["case"] for check in report["checks"] if not check["ok"]}
    assert code == 1 and not report["ok"]
    assert {"causal, 2,500 tokens", "packed causal, past 2,048"} <= failed
    assert not {"one causal document", "grouped queries", "full mask"} & failed


@pytest.fixture
def fault() -> Iterator[Callable[[str], None]]:
    yield set_fault
    set_fault(None)


#: Faults in what this project's calls do not use: whether a call does.
UNUSED: dict[str, Callable[[Call], bool]] = {
    KV_START: lambda call: call.starts[1] != 0,
    TOP_LEFT: lambda call: call.sparse_mode == 3 and any(queries != keys for queries, keys in call.sizes),
}


@pytest.fixture
def cases(request: pytest.FixtureRequest) -> list[OperatorCase]:
    """All cases, the quick ones first; without --thorough the first of those past 2,048 rows alone, and plans of a thousand
    rows."""
    if request.config.getoption("thorough"):
        return [*SHORT_CASES, *LONG_CASES]
    return [*SHORT_CASES, *(case for case in LONG_CASES if sum(case.lengths) < 1100), LONG_CASES[0]]


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_of_the_operator_is_found(
    name: str, fault: Callable[[str], None], cases: list[OperatorCase]
) -> None:
    """Or it is a fault in something that no call makes use of."""
    fault(name)
    calls.clear()
    is_noticed = any(not check("npu", "fp32", case)["ok"] for case in cases)
    assert calls and is_noticed == (name not in UNUSED or any(map(UNUSED[name], calls)))


@pytest.mark.parametrize(
    ("name", "option"), [(MODE_1, "npu_lowering: masks"), (UPDATE, "npu_merge: ring_update"), (UPDATE_OUT, "npu_merge: ring_update")]
)  # fmt: skip
def test_a_fault_in_what_one_option_uses_is_found_by_its_row(
    name: str, option: str, fault: Callable[[str], None]
) -> None:
    """In every type, and by no row of the same ring without the option."""
    fault(name)
    [case] = [case for case in LONG_CASES if option in case.name]
    for dtype in ("fp32", "bf16"):
        assert not check("npu", dtype, case)["ok"]
        assert check("npu", dtype, replace(case, npu={}))["ok"]


def test_without_a_fault_nothing_is_found(cases: list[OperatorCase]) -> None:
    """What the doctor finds in the tests above is the fault."""
    for case in cases:
        row = check("npu", "fp32", case, seed=1)
        assert row["ok"], row


@pytest.mark.parametrize("command", ["train", pytest.param("doctor", marks=pytest.mark.thorough)])
def test_a_broken_installation_is_one_line(command: str, tmp_path: Path) -> None:
    """torch-npu is installed and CANN is not, and nothing keeps torch from importing torch_npu by itself."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    arguments = {
        "doctor": ["--device", "npu"],
        "train": ["configs/quickstart.yaml", "--set", "train.device=npu", "--set", f"output.folder={tmp_path}"],
    }
    done = subprocess.run(
        [sys.executable, "-m", "mindspeed_cp", command, *arguments[command]],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2 and len(errors) == 1, done.stderr
    assert "a library of CANN, is not found); install CANN" in errors[0] and "Traceback" not in done.stderr
