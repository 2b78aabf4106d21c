"""The scripts of configs/launch/, run and read by tests.

Nothing needs an NPU: dry runs show the command for one, and the runs are on the CPU. That ranks reach NPUs by these
commands has been seen on no device.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.limits import HANG

ROOT = Path(__file__).resolve().parent.parent.parent
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
    return subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True, timeout=HANG)


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
    variables = [(match[1], "".join(shlex.split(match[2])), match[3]) for match in exports if match]
    assert len(variables) == len(exports) == len({name for name, _, _ in variables})
    machine = [line.removeprefix("# this machine: ") for line in lines if line.startswith("# this machine: ")]
    return DryRun(
        lines[0],
        {name: value for name, value, _ in variables},
        {name: source for name, _, source in variables},
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


JOB = {"SLURM_JOB_ID": "1234567", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node-[a-b]"}


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
