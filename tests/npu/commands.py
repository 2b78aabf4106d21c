"""`mindspeed-cp` over the stand-in in processes that are forked with everything imported: a start that imports takes seconds.

For tests of what a command computes. Those of how it starts, ends and fails start Python (test_training.py, test_bad_input.py).
"""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from tests.limits import HANG
from tests.npu.ranks import READ_AT_IMPORT
from tests.processes import Outcome, Ranks, answer, preload

preload("tests.npu.preload_training")


def run_commands(words: Sequence[str], environments: Sequence[Mapping[str, str]]) -> list[tuple[int | None, str]]:
    """Run `mindspeed-cp` in one process for each environment, all at once.

    Args:
        words: the arguments of all of them.
        environments: what each has besides this process's environment.

    Returns:
        Exit code, None without one, and standard error of each; standard output is dropped.

    Raises:
        ValueError: an environment has what torch_npu reads when it is imported.
    """
    for environment in environments:
        if late := READ_AT_IMPORT & set(environment):
            raise ValueError(f"{', '.join(sorted(late))}: read before the fork; start Python for it")
    processes = Ranks()
    with tempfile.TemporaryDirectory(prefix="mindspeed-cp-commands-") as folder:
        logs = [Path(folder) / f"stderr{number}" for number in range(len(environments))]
        try:
            for environment, log in zip(environments, logs, strict=True):
                processes.start(_serve, {**os.environ, **environment}, log, list(words))
            outcomes = processes.outcomes(len(environments), HANG)
        finally:
            processes.end()
        ended = zip(outcomes, logs, strict=True)
        return [(outcome.exit if outcome.error else outcome.value, _text(outcome, log)) for outcome, log in ended]


def _text(outcome: Outcome, log: Path) -> str:
    """Return what a process wrote, and the traceback of what it raised."""
    return (log.read_text() if log.exists() else "") + (outcome.error or "")


def _serve(pipe: Connection, environment: Mapping[str, str], log: Path, words: list[str]) -> None:
    os.environ.update(environment)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    has_returned = answer(pipe, _run, words)
    os._exit(not has_returned)  # at once: torch_npu's threads would wait for what failed


def _run(words: list[str]) -> int:
    from mindspeed_cp.cli.main import run

    try:
        return run(words)
    finally:
        atexit._run_exitfuncs()
        sys.stderr.flush()
