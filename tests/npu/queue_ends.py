"""Tests whose refusal ends torch_npu's queue: they run in a process of their own.

A call that fails in the queue's thread is the last of its process: torch_npu raises the error once, at the next wait for the queue, and
drops all later calls. So it is on a device. With TASK_QUEUE_ENABLE=2 this is every refusal of an operator's arguments, with 1
only of operators of the old way. `@pytest.mark.ends_queue(1, 2)` names the modes.
"""

from __future__ import annotations

import contextlib
import io
import os
from multiprocessing.connection import Connection

import pytest

from tests.host_cann import task_queue
from tests.processes import Ranks, answer, preload, values

ALONE = "HOST_CANN_TEST_ALONE"  # set in such a process
preload("tests.npu.preload", "hypothesis", "tests.npu.operators", "mindspeed_cp.ops.attention")


def needs_process(item: pytest.Item) -> bool:
    """True if the test ends the queue of its process under this mode, and this is not yet its own."""
    marker = item.get_closest_marker("ends_queue")
    return marker is not None and task_queue.mode() in marker.args and ALONE not in os.environ


def run_alone(item: pytest.Item) -> None:
    """Run the test in a process of its own.

    Raises:
        AssertionError: it failed there; with the output.
    """
    processes = Ranks()
    try:
        processes.start(_serve, item.nodeid, str(item.config.rootpath), item.config.getoption("thorough"))
        status, output = values(processes.outcomes(1))[0]
    finally:
        processes.end()
    assert status == pytest.ExitCode.OK, output


def _serve(pipe: Connection, test: str, folder: str, thorough: bool) -> None:
    os.environ[ALONE] = "1"
    os.chdir(folder)
    answer(pipe, _run, test, thorough)
    os._exit(0)  # at once: torch_npu's threads would wait for what failed


def _run(test: str, thorough: bool) -> tuple[int, str]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        full = ["--thorough"] if thorough else []
        status = pytest.main(["-q", "-p", "no:cacheprovider", "--capture=no", *full, test])
    return int(status), output.getvalue()
