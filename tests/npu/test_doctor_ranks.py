"""mindspeed-cp doctor --device npu on ranks over the stand-in, on two ranks: HCCL carries the messages, the operators of
torch-npu compute. Speeds are the stand-in's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import HANG
from tests.ports import free_port

ROOT = Path(__file__).resolve().parent.parent.parent
#: The command with a small timed batch.
PROGRAM = """
from dataclasses import replace
from tests.npu.command import main
from mindspeed_cp.doctor import ranks
ranks.DEFAULTS["npu"] = replace(ranks.DEFAULTS["npu"], tokens_per_rank=96)
main()
"""


@pytest.mark.thorough  # over a minute: the timed matrix products on one core
def test_two_npus_write_a_report(tmp_path: Path) -> None:
    port, processes = str(free_port()), []
    command = [sys.executable, "-c", PROGRAM, "doctor", "--device", "npu"]
    for rank in range(2):
        settings = {
            "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT), "HOST_CANN_DEVICES": "2", "HCCL_CONNECT_TIMEOUT": "120",
        }  # fmt: skip
        arguments = [*command, "--report", str(tmp_path / "report.json")]
        processes.append(
            subprocess.Popen(
                arguments,
                cwd=ROOT,
                env=os.environ | settings,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=HANG)[0] for process in processes]
    results = json.loads((tmp_path / "report.json").read_text())
    assert results["finished"] and len(results["links"]) == 1, outputs[0][-3000:]
    assert len(results["algorithms"]) == 7
    assert all(row["seconds"] > 0 and row["wrong"] is None for row in results["algorithms"])
    assert all(rank["device"] == results["ranks"][0]["device"] for rank in results["ranks"])
    assert results["ranks"][0]["environment"]["HCCL_CONNECT_TIMEOUT"] == "120"
    assert results["failures"] == [] and all(row["failed"] == [] for row in results["operator"]), outputs[0][-3000:]
