"""Whether neighbouring NPUs reach each other: rings over HCCL, and how fast a neighbour is.

One process for each NPU of this machine. Every ring is turned twice over, in one launch for each step and through
lanes, with as many ranks as there are NPUs and, since odd rings have hung with other pairings, with one fewer where
that is odd. Two NPUs turn no odd ring, and none reaches another machine: the rows say the first, the table the second.
"""

from __future__ import annotations

import multiprocessing as mp
import socket
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_cp.comm import Transfer, Transport, close_lanes, open_lanes, warm_up
from mindspeed_cp.devices import hccl_time_outs
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan import AttentionConfig, Topology, build_plan

SECONDS, SECONDS_EACH = 120.0, 15.0  # for all of it, and more for each NPU: a machine's first communicators take long
SILENT = "no answer"
NO_ODD_RING = " (no odd ring: that takes 3 NPUs)"
ROUNDS = 5


def time_limit(devices: int) -> float:
    """Seconds after which the links between so many NPUs are given up."""
    return SECONDS + SECONDS_EACH * devices


def check_links(devices: int, megabytes: int = 64, seconds: float | None = None) -> list[dict[str, Any]]:
    """Rings over the NPUs of this machine.

    Args:
        devices: NPUs; with one there is nothing to check.
        megabytes: of a message when speed is measured.
        seconds: until all of it is given up; None: :func:`time_limit`.

    Returns:
        For each ring {"case", "ok", "error", "gigabytes_per_second"}, the latter the slowest rank's, sent and received
        at once, or None.
    """
    if devices < 2:
        return []
    limit = time_limit(devices) if seconds is None else seconds
    context = mp.get_context("spawn")
    port = _free_port()
    processes, pipes = [], []
    try:
        for rank in range(devices):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, devices, port, megabytes, limit, theirs), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        return _merged(_collect(pipes, limit), limit)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(pipes: list[Connection], limit: float) -> list[Any]:
    """What every rank found, or the text of its error."""
    found: dict[int, Any] = {}
    deadline = time.monotonic() + limit
    while len(found) < len(pipes) and time.monotonic() < deadline:
        for pipe in wait([p for r, p in enumerate(pipes) if r not in found], max(0.0, deadline - time.monotonic())):
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                found[rank] = pipes[rank].recv()
            except EOFError:
                found[rank] = "the process died"
            if isinstance(found[rank], str):  # the others wait for it in vain
                deadline = min(deadline, time.monotonic() + 5)
    return [found.get(rank, SILENT) for rank in range(len(pipes))]


def _merged(found: list[Any], limit: float) -> list[dict[str, Any]]:
    errors = [f"rank {rank}: {each}" for rank, each in enumerate(found) if isinstance(each, str)]
    errors.sort(key=lambda text: SILENT in text)  # who says what happened, before those that waited for it in vain
    if errors:
        if errors[0].endswith(SILENT):  # from nobody but a time-out
            errors[0] += f" within {limit:g} s (--link-seconds)"
        return [{"case": f"rings of {len(found)} NPUs", "ok": False, "error": errors[0], "gigabytes_per_second": None}]
    rows = []
    for number, (case, _, _) in enumerate(found[0]):
        mine = [each[number] for each in found if number < len(each)]
        wrong = [rank for rank, row in enumerate(mine) if not row[1]]
        speeds = [row[2] for row in mine if row[2] is not None]
        error = f"ranks {', '.join(map(str, wrong))} got other data than was sent" if wrong else None
        rows.append(
            {"case": case, "ok": not wrong, "error": error, "gigabytes_per_second": min(speeds) if speeds else None}
        )
    return rows


def _serve(rank: int, size: int, port: int, megabytes: int, limit: float, pipe: Connection) -> None:
    try:
        import torch_npu  # noqa: F401

        device = torch.device("npu", rank)
        npu: Any = torch.npu  # type: ignore[attr-defined]
        npu.set_device(device)
        hccl_time_outs(limit)
        dist.init_process_group(
            "cpu:gloo,npu:hccl",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=limit),
        )
        pipe.send(_rings(rank, size, device, megabytes, limit))
        dist.destroy_process_group()
    except Exception as error:
        traceback.print_exc()
        pipe.send(" ".join(f"{type(error).__name__}: {error}".split())[:300])


def _rings(
    rank: int, size: int, device: torch.device, megabytes: int, limit: float
) -> list[tuple[str, bool, float | None]]:
    found = []
    timeout = timedelta(seconds=limit)
    sizes = [size] + ([size - 1] if size > 3 and size % 2 == 0 else [])
    for members in sizes:
        group = dist.new_group(list(range(members)), timeout)
        rest = dist.new_group(list(range(members, size)), timeout) if members < size else None
        mine = group if rank < members else rest
        assert mine is not None
        for lanes in (False, True):
            name = f"ring of {members}, {'lanes' if lanes else 'one launch a step'}{NO_ODD_RING * (size == 2)}"
            if lanes:
                open_lanes(mine, device, timeout)
            good, speed = _turn(mine, device, megabytes, limit) if rank < members else (True, None)
            if lanes:
                close_lanes(mine)
            found.append((name, good, speed))
    return found


def _turn(group: dist.ProcessGroup, device: torch.device, megabytes: int, limit: float) -> tuple[bool, float | None]:
    """Every rank's block goes once round; and how many GB/s a rank sends while it receives as many."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    warm_up(build_plan(Documents([4 * size]), Topology(1, size), AttentionConfig(1), "ring"), group, device)
    transport = Transport(group, limit, device)
    rows = megabytes * (1 << 20) // 4
    held = [torch.full((rows,), float(rank), device=device), torch.empty(rows, device=device)]

    def step(number: int) -> None:
        sending, receiving = held[number % 2], held[(number + 1) % 2]
        for pending in transport.post(
            [
                Transfer(sending, (rank + 1) % size, True, number, "block"),
                Transfer(receiving, (rank - 1) % size, False, number, "block"),
            ]
        ):
            pending.wait()

    good = True
    for number in range(size):
        step(number)
        good &= bool((held[(number + 1) % 2] == float((rank - number - 1) % size)).all())
    npu: Any = torch.npu  # type: ignore[attr-defined]
    npu.synchronize()
    began = time.perf_counter()
    for number in range(ROUNDS):
        step(number)
    npu.synchronize()
    return good, ROUNDS * rows * 4 / (time.perf_counter() - began) / 1e9


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
