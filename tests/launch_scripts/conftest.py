"""What the tests of the scripts share: check.py as a module, and a Slurm that runs here."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest

from tests.launch_scripts.scripts import (
    JOB,
    LAUNCH,
)


@pytest.fixture(scope="module")
def check() -> ModuleType:
    """configs/launch/check.py"""
    spec = importlib.util.spec_from_file_location("launch_check", LAUNCH / "check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def no_settings(tmp_path: Path) -> dict[str, str]:
    """Environment of scripts for which every setting is right: the double of Python prints time-out and output folder."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "${1##*/} $2" = "check.py settings" ] && printf "600\\nruns/quickstart\\n"\n')
    python.chmod(0o755)
    return {"PYTHON": str(python)}


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
