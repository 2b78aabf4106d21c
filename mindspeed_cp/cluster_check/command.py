"""The command: every rank follows, and rank 0 goes through the stages and writes the report after each of them."""

from __future__ import annotations

import json
import os
import platform
import secrets
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from mindspeed_cp.cluster_check.launch import Launch, open_store, read_launch
from mindspeed_cp.cluster_check.measurements import MEASUREMENTS, worker_starter
from mindspeed_cp.cluster_check.request import ClusterRequest
from mindspeed_cp.cluster_check.results import CheckResults
from mindspeed_cp.cluster_check.stages import ClusterDay
from mindspeed_cp.cluster_check.supervisor import Coordinator, Supervisor
from mindspeed_cp.cluster_check.verdict import is_ok, verdict_lines
from mindspeed_cp.cluster_check.write import ReportWriter
from mindspeed_cp.errors import ConfigError, PeerError

BAD_INPUT, FAILED = 2, 1
JOIN_SECONDS = 300.0  # until the store has to be there


def run_cluster_check(request: ClusterRequest, *, as_json: bool) -> int:
    """Take part in the check as one of the ranks that torchrun started.

    Args:
        request: arguments of the command, the same on all ranks.
        as_json: True to print the figures as JSON.

    Returns:
        The exit code, on every rank: 0 if nothing failed and every result was right, else 1; 2 on the other ranks if
        rank 0 refuses an argument.

    Raises:
        ConfigError: an argument is not valid, or torchrun did not start this process.
        PeerError: the store of the ranks is gone.
    """
    request.check()
    launch = read_launch(os.environ)
    store = open_store(launch, JOIN_SECONDS)
    start_worker = worker_starter(launch, request.device_type, request.link_limit)
    supervisor = Supervisor(launch.rank, launch.ranks, store, MEASUREMENTS, start_worker, request.silence)
    import torch.distributed as dist

    if launch.rank:
        try:
            return supervisor.follow()
        except dist.DistError as error:
            raise PeerError(f"rank {launch.rank}: the store of the ranks is gone, so rank 0 has ended") from error
    scratch = Path(tempfile.gettempdir(), f"mindspeed-cp-{secrets.token_hex(8)}")
    coordinator = Coordinator(supervisor)
    try:
        code = _coordinate(request, launch, coordinator, scratch, as_json)
    except ConfigError:
        coordinator.stop(BAD_INPUT)
        raise
    except dist.DistError as error:
        raise PeerError(f"rank 0: the store of the ranks is gone; what was measured is in {request.folder}") from error
    except BaseException:
        coordinator.stop(FAILED)
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    coordinator.stop(code)
    return code


def _coordinate(request: ClusterRequest, launch: Launch, coordinator: Coordinator, scratch: Path, as_json: bool) -> int:
    request.check_folder()
    arguments = {**asdict(request), "folder": "", "device": request.device_type, "dtype": request.type_name}
    arguments |= {"tokens_per_rank": request.tokens, "link_seconds": request.link_limit}
    results = CheckResults(arguments, launch.nodes, launch.ranks_per_node)
    writer = ReportWriter(request.folder, (platform.node(), launch.address))

    def note(line: str) -> None:
        print(line, file=sys.stderr if as_json else sys.stdout, flush=True)

    day = ClusterDay(request, launch, coordinator, results, scratch)
    for line in day.stages():  # a stage is over
        note(line)
        writer.write(results, day.comparisons)
    results.finished = True
    archive = writer.finish(results, day.comparisons)
    if as_json:
        print(json.dumps(writer.plain(results)))
        return 0 if is_ok(results) else FAILED
    for line in verdict_lines(results):
        print(line)
    print(f"written: {request.folder / 'report.html'}, and {archive} to attach to a question")
    return 0 if is_ok(results) else FAILED
