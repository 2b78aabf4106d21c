"""What the scripts would run, and with which environment, on one node and on many."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch_scripts.scripts import (
    A2,
    A3,
    CONFIG,
    DEVICES,
    EIGHT,
    dry_run,
    run,
)


@pytest.mark.parametrize("script", DEVICES, ids=lambda path: path.name)
def test_one_node(script: Path) -> None:
    made = dry_run(script)
    ranks = DEVICES[script]
    assert made.first.endswith(f", node 0 of 1: ranks 0 to {ranks - 1} of {ranks}, on npu")
    assert made.command == [
        *(sys.executable, "-m", "mindspeed_cp", "train", str(CONFIG)),
        *("--set", "train.global_batch_size=8", "--set", "train.device=npu"),
        *("--nproc", str(ranks)),
    ]
    assert made.environment == {
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HCCL_CONNECT_TIMEOUT": "540",
        "HCCL_EXEC_TIMEOUT": "540",
        "TORCH_HCCL_ASYNC_ERROR_HANDLING": "1",
        "HCCL_BUFFSIZE": "200",
        "HCCL_IF_BASE_PORT": "60000",
        "HCCL_WHITELIST_DISABLE": "1",
        "TASK_QUEUE_ENABLE": "1",
        "CPU_AFFINITY_CONF": "1",
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
    }
    assert set(made.source.values()) == {"default"}


@pytest.mark.parametrize("script", DEVICES, ids=lambda path: path.name)
@pytest.mark.parametrize("by_flags", [True, False], ids=["flags", "variables"])
def test_two_nodes(script: Path, by_flags: bool) -> None:
    ranks = DEVICES[script]
    if by_flags:
        words = ["--nodes=2", "--node-rank", "1", "--master-addr", "head", "--master-port", "23456"]
        made = dry_run(script, *words, "--log-dir", "somewhere", "--config", "configs/ring.yaml")
    else:
        named = {"NODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "head", "MASTER_PORT": "23456", "LOG_DIR": "somewhere"}
        made = dry_run(script, CONFIG="configs/ring.yaml", **named)
    assert made.first.endswith(f", node 1 of 2: ranks {ranks} to {2 * ranks - 1} of {2 * ranks}, on npu")
    expected = {"--nnodes": "2", "--node-rank": "1", "--nproc-per-node": str(ranks), "--master-addr": "head"}
    expected |= {"--master-port": "23456", "--log-dir": "somewhere/train"}
    assert {name: made.option(name) for name in expected} == expected
    assert made.command[1:3] == ["-m", "torch.distributed.run"]
    assert made.command[made.command.index("mindspeed_cp") :][1:3] == ["train", "configs/ring.yaml"]
    assert "GLOO_SOCKET_IFNAME" not in made.environment and "HCCL_SOCKET_IFNAME" not in made.environment


def test_the_command_is_understood_and_the_settings_are_those_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    from mindspeed_cp.cli.main import app
    from mindspeed_cp.config.settings import load_settings
    from mindspeed_cp.train import launch

    started: dict[str, Any] = {}
    monkeypatch.setattr(launch, "start_local_ranks", lambda settings, nproc, **rest: started.update(locals()) or 0)
    made = dry_run(A3, "--device=cpu")
    assert made.command[1:3] == ["-m", "mindspeed_cp"] and app(made.command[3:], standalone_mode=False) == 0
    settings, plain = started["settings"], load_settings(CONFIG)
    assert (settings.train.device, settings.train.global_batch_size) == ("cpu", 8)
    assert settings.model == plain.model and settings.context_parallel_suite == plain.context_parallel_suite
    assert started["nproc"] == 16


def test_arguments_of_the_training_command_follow_two_dashes() -> None:
    assert dry_run(A2, "--", "--no-resume", "--json").command[-2:] == ["--no-resume", "--json"]


# the environment


@pytest.mark.parametrize(
    ("seconds", "nodes", "connect", "exec_"),
    [("100", 1, "120", "90"), ("600", 1, "540", "540"), ("1800", 2, "1620", "1620"), ("9000.5", 2, "7200", "8100")],
)
def test_time_outs_of_hccl_follow_that_of_the_settings(seconds: str, nodes: int, connect: str, exec_: str) -> None:
    words = [f"--set=context_parallel_suite.timeout_seconds={seconds}", f"--nodes={nodes}", "--node-rank=0"]
    made = dry_run(A2, *words, "--master-addr=head")
    assert made.environment["HCCL_CONNECT_TIMEOUT"] == connect
    assert made.environment["HCCL_EXEC_TIMEOUT"] == exec_


def test_a_connect_time_out_over_that_of_the_watchdog_is_mentioned() -> None:
    note = "note: HCCL_CONNECT_TIMEOUT = 600 is not less than context_parallel_suite.timeout_seconds = 600"
    assert run(A2, "--dry-run", EIGHT, "--connect-timeout=600").stderr.startswith(note)
    assert run(A2, "--dry-run", EIGHT, "--connect-timeout=599").stderr == ""


def test_what_the_user_has_set_is_kept_and_flags_go_before() -> None:
    theirs = {
        "HCCL_BUFFSIZE": "400",
        "TASK_QUEUE_ENABLE": "",
        "HCCL_ALGO": "level0:NA;level1:ring",
        "P2P_HCCL_BUFFSIZE": "7",
    }
    words = [
        "--p2p-buffer-mb=30",
        "--cpu-affinity",
        "1,npu0:0-23,npu1:24-47",
        "--exec-timeout=30",
        "--connect-timeout=1800",
    ]
    made = dry_run(A2, *words, "--interface=eth3", **theirs)
    expected = {
        "HCCL_BUFFSIZE": "400",
        "HCCL_ALGO": "level0:NA;level1:ring",
        "P2P_HCCL_BUFFSIZE": "30",
        "CPU_AFFINITY_CONF": "1,npu0:0-23,npu1:24-47",
        "HCCL_EXEC_TIMEOUT": "30",
        "HCCL_CONNECT_TIMEOUT": "1800",
    }
    assert {name: made.environment[name] for name in expected} == expected
    assert {made.source[name] for name in expected} == {"yours"}
    assert made.environment["GLOO_SOCKET_IFNAME"] == made.environment["HCCL_SOCKET_IFNAME"] == "eth3"
    assert "TASK_QUEUE_ENABLE" not in made.environment


def test_an_empty_variable_is_taken_out_of_the_ranks_environment() -> None:
    done = run(A2, "--dry-run", EIGHT, TASK_QUEUE_ENABLE="")
    assert "unset TASK_QUEUE_ENABLE  # yours: not set" in done.stdout.splitlines()


def test_on_cpu_nothing_is_said_to_hccl() -> None:
    made = dry_run(A3, "--device", "cpu", "--ranks-per-node=4")
    assert set(made.environment) == {"TORCH_DEVICE_BACKEND_AUTOLOAD", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"}
    assert made.machine == [] and "train.device=cpu" in made.command and made.option("--nproc") == "4"
