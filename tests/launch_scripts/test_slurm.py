"""The Slurm script, with a stand-in for srun and scontrol; two nodes of a job train on the CPU."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.launch_scripts.scripts import (
    A2,
    A3,
    DEVICES,
    EIGHT,
    LAUNCH,
    ROOT,
    SLURM,
    parsed,
    refusal,
    run,
)
from tests.limits import HANG
from tests.ports import free_port


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
        expected |= {"--log-dir": "runs/quickstart/logs/slurm-1234567", "--nproc-per-node": str(DEVICES[script])}
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


def tiny(folder: Path, steps: int = 2) -> list[str]:
    """Two ranks on the CPU, and a model for which a step takes no time."""
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": "ring of ranks " * (n % 7 + 1)}) + "\n" for n in range(40)))
    settings = {
        "output.folder": folder / "run",
        "output.log_interval": "0",
        "data.corpus": corpus,
        "data.seq_length": 128,
        "model.hidden_size": 32,
        "train.train_iters": steps,
        "train.lr_warmup_iters": 0,
        "train.threads_per_rank": 1,
        "context_parallel_suite.context_parallel_size": 2,
        "context_parallel_suite.timeout_seconds": HANG,
    }
    return ["--device=cpu", *(f"--set={name}={value}" for name, value in settings.items())]


def steps_of(folder: Path) -> list[int]:
    path = folder / "run" / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def test_two_nodes_of_a_slurm_job_train_together(tmp_path: Path, slurm: dict[str, str]) -> None:
    """Both on this machine, by a double of srun."""
    port = free_port()
    words = [*tiny(tmp_path), "--machine=a3", "--ranks-per-node=1", "--interface=lo", f"--master-port={port}"]
    done = run(SLURM, *words, "--set=context_parallel_suite.nodes=2", cwd=tmp_path, **slurm)
    assert done.returncode == 0, done.stderr
    assert steps_of(tmp_path) == [1, 2]
    assert len(list(tmp_path.glob("run/logs/slurm-1234567/**/stdout.log"))) == 2
