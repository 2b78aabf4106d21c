"""What the scripts would run, with which environment, on one node and on many; and what they refuse, in one line."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.launch_scripts.scripts import (
    A2,
    A3,
    CONFIG,
    DEVICES,
    EIGHT,
    dry_run,
    parsed,
    rank_table,
    refusal,
    run,
)
from tests.ports import free_port


@pytest.mark.parametrize("script", DEVICES, ids=lambda path: path.name)
def test_one_node_trains_on_its_devices(script: Path) -> None:
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
def test_two_nodes_run_torchrun_by_flags_or_variables(script: Path, by_flags: bool) -> None:
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


def test_variables_of_the_user_stay_and_flags_go_before_them() -> None:
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


@pytest.mark.parametrize(
    ("script", "version"), [(A2, "1.0"), pytest.param(A3, "1.0", marks=pytest.mark.thorough), (A3, "1.2")]
)
def test_a_rank_table_is_handed_on_with_its_full_path(tmp_path: Path, script: Path, version: str) -> None:
    (tmp_path / "table.json").write_text(json.dumps(rank_table(2, DEVICES[script], version)))
    words = ["--dry-run", EIGHT, f"--config={CONFIG}", "--nodes=2", "--node-rank=0", "--master-addr=head"]
    done = run(script, *words, "--rank-table=table.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert parsed(done.stdout).environment["RANK_TABLE_FILE"] == str(tmp_path / "table.json")
    assert (
        parsed(run(script, *words, cwd=tmp_path, RANK_TABLE_FILE="table.json").stdout).source["RANK_TABLE_FILE"]
        == "yours"
    )


def _spoiled(table: dict[str, Any], how: str) -> str:
    if how == "not JSON":
        return json.dumps(table)[:-1]
    if how == "no list":
        return "[]"
    if how == "a device short":
        table["server_list"][1]["device"].pop()
    elif how == "ranks over both nodes":
        first, second = (server["device"][0] for server in table["server_list"])
        first["rank_id"], second["rank_id"] = second["rank_id"], first["rank_id"]
    elif how == "a rank twice":
        table["server_list"][0]["device"][0]["rank_id"] = "1"
    elif how == "version":
        table["version"] = "1.2"
    elif how == "status":
        table["status"] = "initializing"
    return json.dumps(table)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("not JSON", "is not JSON"),
        ("no list", "has no server_list"),
        ("a device short", "has 15 devices, and there are 16 ranks (2 nodes of 8)"),
        ("ranks over both nodes", "ranks are numbered node by node, 0 to 7 first"),
        ("a rank twice", "has rank_id [[1, 1, 2, 3, 4, 5, 6, 7]"),
        ("version", 'has version "1.2"; Atlas 800T A2 takes "1.0"'),
        ("status", 'has status "initializing"'),
    ],
)
def test_a_wrong_rank_table_is_refused(
    tmp_path: Path, how: str, expected: str, check: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "table.json"
    path.write_text(_spoiled(rank_table(2, 8, "1.0"), how))
    words = ["--ranks-per-node=8", "--nodes=2", "--machine=Atlas 800T A2", "--versions=1.0"]
    assert check.main(["rank-table", str(path), *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: RANK_TABLE_FILE = {path}: ") and expected in line


def test_torch_npu_ignores_rank_tables_that_are_missing_or_links(tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text(json.dumps(rank_table(1, 8, "1.0")))
    (tmp_path / "link.json").symlink_to(tmp_path / "table.json")
    assert "is a link" in refusal(run(A2, "--dry-run", EIGHT, f"--rank-table={tmp_path}/link.json"))
    assert "cannot be read (No such file" in refusal(run(A2, "--dry-run", EIGHT, f"--rank-table={tmp_path}/none.json"))


@pytest.mark.parametrize(
    ("words", "environment", "expected"),
    [
        (["--nodez=2"], {}, "option = --nodez: there is no such option; atlas_800t_a2.sh --help"),
        (["--config"], {}, "--config = (nothing): needs a value"),
        (["--device=gpu"], {}, "--device = gpu: must be npu or cpu"),
        (["--ranks-per-node=9"], {}, "--ranks-per-node = 9: must be a whole number from 1 to 8; the devices of a node of Atlas 800T A2"),
        (["--nodes=2", "--node-rank=0"], {}, "--master-addr = (nothing): needed for 2 nodes"),
        (["--nodes=2", "--master-addr=head"], {}, "--node-rank = (nothing): needed for 2 nodes: 0 to 1"),
        (["--nodes=2", "--node-rank=2", "--master-addr=head"], {}, "--node-rank = 2: must be a whole number from 0 to 1"),
        (["--node-rank=1"], {}, "--node-rank = 1: must be a whole number from 0 to 0; --nodes is 1"),
        (["--master-port=80"], {}, "--master-port = 80: must be a whole number from 1024 to 65535"),
        (["--run-id=a/b"], {}, "--run-id = a/b: must be letters"),
        (["--python=no-such-python"], {}, "--python = no-such-python: no such program"),
        (["--cann=/no/such/set_env.sh"], {}, "--cann = /no/such/set_env.sh: no such file"),
        (["--set=train.device=cpu"], {}, "--set = train.device=cpu: use --device"),
        (["--connect-timeout=60"], {}, "HCCL_CONNECT_TIMEOUT = 60: must be a whole number from 120 to 7200"),
        (["--exec-timeout=600"], {}, "HCCL_EXEC_TIMEOUT = 600: must be a whole number from 1 to 599; (--exec-timeout) less than context_parallel_suite.timeout_seconds = 600"),
        ([], {"P2P_HCCL_BUFFSIZE": "0"}, "P2P_HCCL_BUFFSIZE = 0: must be a whole number from 1 to 65536; (--p2p-buffer-mb) MB; with 0"),
        (["--cpu-affinity=3"], {}, "CPU_AFFINITY_CONF = 3: (--cpu-affinity) must be 0, 1, 2"),
        ([], {"TASK_QUEUE_ENABLE": "3"}, "TASK_QUEUE_ENABLE = 3: must be a whole number from 0 to 2"),
        ([], {"HCCL_IF_BASE_PORT": "65530"}, "HCCL_IF_BASE_PORT = 65530: must be a whole number from 1024 to 65520"),
        ([], {"TORCH_HCCL_ASYNC_ERROR_HANDLING": "yes"}, "TORCH_HCCL_ASYNC_ERROR_HANDLING = yes: must be"),
        (["--device=cpu"], {"RANK_TABLE_FILE": "x"}, "--rank-table = x: has no meaning with --device cpu"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(
    words: list[str], environment: dict[str, str], expected: str, no_settings: dict[str, str]
) -> None:
    assert expected in refusal(run(A2, "--dry-run", EIGHT, *words, **no_settings, **environment))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--set=train.lr=fast"], '--set: train.lr = "fast": must be a number'),
        (["--config=no.yaml"], "no.yaml"),
        (["--ranks-per-node=6"], "6 ranks do not fit the settings"),
        (["--set=context_parallel_suite.timeout_seconds=1"], "context_parallel_suite.timeout_seconds = 1: must be at least 2"),
    ],
)  # fmt: skip
def test_bad_settings_are_one_line(words: list[str], expected: str) -> None:
    assert expected in refusal(run(A2, "--dry-run", EIGHT, *words))


def test_a_machine_without_cann_and_devices_is_told_so(tmp_path: Path) -> None:
    """In the order of the checks; a dry run only mentions them."""
    if list(Path("/dev").glob("davinci*")):
        pytest.skip("needs a machine without NPUs; this one has /dev/davinci*")
    words = [EIGHT, f"--set=output.folder={tmp_path}/run"]
    assert dry_run(A2).machine[0].startswith("ASCEND_HOME_PATH = (nothing): source CANN's set_env.sh")
    assert refusal(run(A2, *words)).startswith("error: ASCEND_HOME_PATH = (nothing): source CANN's set_env.sh")
    home = tmp_path / "cann"
    set_env = tmp_path / "set_env.sh"
    set_env.write_text(
        f"export ASCEND_HOME_PATH={home}\nexport LD_LIBRARY_PATH={home}/lib64:$LD_LIBRARY_PATH$UNHEARD_OF\n"
    )
    assert f"ASCEND_HOME_PATH = {home}: no such folder" in refusal(run(A2, *words, f"--cann={set_env}"))
    (home / "lib64").mkdir(parents=True)
    assert "no libascendcl.so there" in refusal(run(A2, *words, f"--cann={set_env}"))
    (home / "lib64" / "libascendcl.so").touch()
    line = refusal(run(A2, *words, f"--cann={set_env}"))
    assert line.startswith("error: --ranks-per-node = 8: 8 ranks, and 0 devices (/dev/davinciN); see `npu-smi info`")
    assert not (tmp_path / "run").exists(), "nothing is written before the checks"


def test_devices_are_counted_as_the_driver_and_the_user_show_them(tmp_path: Path, check: ModuleType) -> None:
    for name in ("davinci0", "davinci1", "davinci2", "davinci3", "davinci_manager"):
        (tmp_path / name).touch()
    assert list(check.device_findings(4, None, tmp_path)) == []
    assert list(check.device_findings(2, "2,3", tmp_path)) == []
    ((setting, value, text),) = check.device_findings(5, None, tmp_path)
    assert (setting, value) == ("--ranks-per-node", "5") and "4 devices" in text
    ((setting, value, text),) = check.device_findings(3, "2,3", tmp_path)
    assert (setting, value) == ("ASCEND_RT_VISIBLE_DEVICES", "2,3") and "2 devices to 3 ranks" in text


def test_a_port_that_is_taken_is_refused_on_node_0_only(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = [
            "--device=cpu",
            "--ranks-per-node=4",
            EIGHT,
            f"--master-port={port}",
            f"--set=output.folder={tmp_path}/run",
        ]
        nodes = ["--nodes=2", "--master-addr=127.0.0.1"]
        line = refusal(run(A2, *words, *nodes, "--node-rank=0"))
        assert line.startswith(f"error: --master-port = {port}: cannot be had (Address already in use)")
        assert dry_run(A2, *words, *nodes, "--node-rank=1").machine == []
        assert len(dry_run(A2, *words, *nodes, "--node-rank=0").machine) == 1
        assert dry_run(A2, *words).machine == [], "one node needs no port"


def test_a_log_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    nodes = ["--nodes=2", "--node-rank=0", "--master-addr=127.0.0.1", "--master-port", free_port()]
    words = ["--device=cpu", "--ranks-per-node=2", EIGHT, "--set=context_parallel_suite.nodes=2"]
    done = run(A2, *words, *nodes, f"--log-dir={tmp_path}/file/logs")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: --log-dir = {tmp_path}/file/logs: must be a folder")


def test_a_context_over_more_nodes_than_the_settings_say_is_mentioned() -> None:
    words = [
        "--dry-run",
        EIGHT,
        "--nodes=2",
        "--master-addr=head",
        "--set=context_parallel_suite.context_parallel_size=16",
        "--set=context_parallel_suite.nodes=1",
    ]
    note = "note: context_parallel_suite.nodes = 1, but with 8 ranks on a node the 16 ranks of a context are on 2"
    assert run(A2, *words, "--node-rank=0").stderr.startswith(note)
    assert run(A2, *words, "--node-rank=1").stderr == ""
    assert run(A2, *words, "--node-rank=0", "--set=context_parallel_suite.nodes=2").stderr == ""
