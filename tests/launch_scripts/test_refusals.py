"""What the scripts refuse, in one line, before anything is started."""

from __future__ import annotations

import socket
from pathlib import Path
from types import ModuleType

import pytest

from tests.launch_scripts.scripts import (
    A2,
    EIGHT,
    dry_run,
    refusal,
    run,
)
from tests.ports import free_port


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
        (["--connect-timeout=60"], {}, "HCCL_CONNECT_TIMEOUT = 60: must be a whole number from 120 to 7200"),
        ([], {"HCCL_CONNECT_TIMEOUT": "1e3"}, "HCCL_CONNECT_TIMEOUT = 1e3: must be a whole number"),
        (["--exec-timeout=600"], {}, "HCCL_EXEC_TIMEOUT = 600: must be a whole number from 1 to 599; (--exec-timeout) less than context_parallel_suite.timeout_seconds = 600"),
        (["--buffer-mb=0"], {}, "HCCL_BUFFSIZE = 0: must be a whole number from 1"),
        (["--p2p-buffer-mb=-1"], {}, "P2P_HCCL_BUFFSIZE = -1: must be a whole number from 1"),
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
