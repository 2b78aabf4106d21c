"""mindspeed-cp doctor --npu-profile over the stand-in: a variant that is broken on purpose is left out by the file, and a
training with it goes on, with the losses of a device without the fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_cp import AttentionConfig, ConfigError
from mindspeed_cp.config.suite import SuiteSettings
from mindspeed_cp.device.npu_profile import Need, NpuIdentity, choose_variants, read_profile
from mindspeed_cp.device.select import npu_identity
from mindspeed_cp.doctor.kernel_capability import write_json
from mindspeed_cp.ops.attention import backend_from_settings
from mindspeed_cp.ops.attention.npu.backend import NpuAttention
from tests.device.profiles import profile
from tests.host_cann.oracle_faults import BAND_HANGS, EQUAL_LENGTHS, GAPS, STARTS_FIRST, SUM_OF_ONE
from tests.npu.test_training import SHORT, corpus, train  # noqa: F401  a fixture
from tests.ports import free_port

ROOT = Path(__file__).resolve().parent.parent.parent
FAST = {"lowering": "tnd", "alibi": "shared", "statistics": "lse", "key_gaps": "skipped"}
TWO_STEPS = ("train.device=npu", "train.train_iters=2")


def run_command(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "HOST_CANN_DEVICES": "1"}
    return subprocess.run(
        [sys.executable, "-m", program, *arguments],
        cwd=ROOT,
        env={**os.environ, **settings, **environment},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def is_thorough(request: pytest.FixtureRequest) -> bool:
    """True where rows of the profile run in every type (DOCTOR_TYPES)."""
    return bool(request.config.getoption("thorough"))


def doctor(path: Path, *more: str, **environment: str) -> tuple[int, dict[str, Any]]:
    """Write the profile of the stand-in. Returns exit code and report."""
    arguments = ("doctor", "--device", "npu", "--json", "--npu-profile", str(path), *more)
    done = run_command("tests.npu.doctor_command", *arguments, **environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr[-3000:]
    report = json.loads(lines[-1])
    assert report["npu_profile"] == json.loads(path.read_text())
    return done.returncode, report


def taken(path: Path, **need: Any) -> dict[str, str]:
    """Return what a training in fp32 takes, with ALiBi unless `need` says otherwise."""
    all_features = Need("fp32", alibi=True, window=False, widths=(32, 32), group=2, deterministic=False)
    return choose_variants(read_profile(str(path)), str(path), replace(all_features, **need), {})


def failed(report: dict[str, Any]) -> set[tuple[str, str]]:
    return {(row["option"], row["variant"]) for row in report["npu_profile"]["rows"] if not row["ok"]}


@pytest.mark.parametrize(
    ("fault", "option", "ranks", "settings"),
    [
        (SUM_OF_ONE, "statistics", 2, ()),
        pytest.param(GAPS, "key_gaps", 3, (), marks=pytest.mark.thorough),  # a ring of two has no gaps
        pytest.param(STARTS_FIRST, "alibi", 2, ("model.position_embedding_type=alibi",), marks=pytest.mark.thorough),
    ],
    ids=["statistics", "key gaps", "ALiBi"],
)
def test_a_broken_variant_is_left_out_and_the_losses_are_those_without_the_fault(
    fault: str,
    option: str,
    ranks: int,
    settings: tuple[str, ...],
    is_thorough: bool,
    corpus: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the fast variant, the same device gives other losses or gradients: the fault bites."""
    path = tmp_path / "doctor.json"
    code, report = doctor(path, HOST_CANN_FAULT=fault, DOCTOR_TYPES="all" if is_thorough else "fp32")
    fast, safe = FAST[option], {"statistics": "max_sum", "key_gaps": "copied", "alibi": "split"}[option]
    assert code == 1 and failed(report) == {(option, fast)}
    assert taken(path) == FAST | {option: safe}

    def run(name: str, *more: str) -> list[float]:
        common = (f"data.corpus={corpus}", "context_parallel_suite.algorithm=ring", *TWO_STEPS, *settings)
        lines = train(ranks, tmp_path / name, *common, *more, forked=True)
        return [line[key] for line in lines for key in ("loss", "grad_norm")]

    sound = run("sound")
    monkeypatch.setenv("HOST_CANN_FAULT", fault)
    with_profile = run("profile", f"context_parallel_suite.npu_profile={path}")
    assert len(sound) == 4 and with_profile == pytest.approx(sound, rel=1e-5)
    assert run("fast", f"context_parallel_suite.npu_{option}={fast}") != pytest.approx(sound, rel=1e-3)


@pytest.mark.thorough  # the choice by such a file is in tests/doctor/test_kernel_capability.py
def test_where_packed_calls_fail_the_profile_takes_masks(
    corpus: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "doctor.json"
    code, report = doctor(path, HOST_CANN_FAULT=EQUAL_LENGTHS)
    assert code == 1 and ("lowering", "tnd") in failed(report) and taken(path, alibi=False)["lowering"] == "masks"
    common = (f"data.corpus={corpus}", *TWO_STEPS, "model.kv_channels=128")
    sound = train(1, tmp_path / "sound", *common, forked=True)
    monkeypatch.setenv("HOST_CANN_FAULT", EQUAL_LENGTHS)
    masks = train(1, tmp_path / "masks", *common, f"context_parallel_suite.npu_profile={path}", forked=True)
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in masks] == pytest.approx([line[key] for line in sound], rel=1e-4)


@pytest.mark.thorough  # in quick runs, tests/doctor/test_guarded.py has functions that hang
def test_a_row_that_hangs_is_a_failed_row_and_the_file_is_written(tmp_path: Path) -> None:
    path = tmp_path / "doctor.json"
    code, report = doctor(path, "--row-seconds", "60", HOST_CANN_FAULT=BAND_HANGS)
    rows = [row for row in report["npu_profile"]["rows"] if not row["ok"]]
    assert code == 1 and {row["name"] for row in rows} == {"window, mean below 1,024", "window, equal lengths"}
    reasons = {row["error"].replace("was not made, since one of its kind ", "") for row in rows}
    assert reasons == {"gave no result within 60 s"}
    assert taken(path) == FAST and taken(path, alibi=False, window=True)["lowering"] == "masks"


def test_a_device_without_a_fault_takes_the_fast_variants(is_thorough: bool, tmp_path: Path) -> None:
    path = tmp_path / "doctor.json"
    code, report = doctor(path, DOCTOR_TYPES="all" if is_thorough else "turns")
    assert code == 0 and report["ok"] and not failed(report)
    assert {row["dtype"] for row in report["npu_profile"]["rows"]} == {"fp32", "fp16", "bf16"}
    assert taken(path) == FAST
    suite = SuiteSettings(npu_profile=str(path))
    chosen = backend_from_settings(suite, "npu", AttentionConfig(2, 1, 32, alibi=True), torch.bfloat16)
    assert chosen == NpuAttention(**FAST)


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


def test_a_training_with_a_file_of_another_cann_ends_in_one_line_before_its_first_step(tmp_path: Path) -> None:
    path = tmp_path / "doctor.json"
    write_json("--npu-profile", path, profile().model_dump() | vars(npu_identity()) | {"cann": "8.5.0"})
    settings = ("--set", "train.device=npu", "--set", f"context_parallel_suite.npu_profile={path}")
    folder = ("--set", f"output.folder={tmp_path / 'run'}")
    arguments = (str(ROOT / "configs" / "quickstart.yaml"), *SHORT, *settings, *folder)
    one_rank = ("--set", "context_parallel_suite.context_parallel_size=1")
    place = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    place["MASTER_PORT"] = free_port()
    done = run_command("tests.npu.command", "train", *arguments, *one_rank, **place)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2 and len(errors) == 1, done.stderr[-3000:]
    assert "npu_profile" in errors[0] and "is of CANN 8.5.0, and this machine has 9.0.0" in errors[0]
    assert not (tmp_path / "run" / "metrics.jsonl").exists() and "Traceback" not in done.stderr
