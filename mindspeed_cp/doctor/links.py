"""Links between the NPUs of this machine: rings over HCCL, and their speed.

One process runs for each NPU. Every ring runs twice, with one coalesced launch per step and over directional groups:
with all NPUs, and, if their number is even and above 3, also with one fewer, since odd rings have hung with other
pairings. Two NPUs allow no odd ring, and no ring reaches another machine.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_cp.algorithms import build_plan
from mindspeed_cp.comm import GroupTransport, Transfer, close_directional_groups, open_directional_groups, warm_up
from mindspeed_cp.comm.local_ranks import NO_ANSWER, run_local_ranks
from mindspeed_cp.device.select import set_hccl_timeouts
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan import AttentionConfig, Topology

#: Default time limit of all rings. The first communicators of a machine take long.
BASE_SECONDS, SECONDS_PER_NPU = 120.0, 15.0

ERROR_GRACE_SECONDS = 5.0  # for other ranks, after one has failed
NO_ODD_RING = " (no odd ring: that takes 3 NPUs)"
TIMED_ROUNDS = 5

#: Name of a ring, True if all data arrived, and GB/s; None on ranks outside the ring.
RingResult = tuple[str, bool, float | None]


def links_time_limit(devices: int) -> float:
    """Return the default time limit in seconds for the rings of a number of NPUs."""
    return BASE_SECONDS + SECONDS_PER_NPU * devices


def check_links(devices: int, megabytes: int = 64, seconds: float | None = None) -> list[dict[str, Any]]:
    """Run rings over the NPUs of this machine.

    Args:
        devices: number of NPUs; one has no links.
        megabytes: size of a message in the speed measurement.
        seconds: time limit of all rings; None: :func:`links_time_limit`.

    Returns:
        For each ring {"case", "ok", "error", "gigabytes_per_second"}. The speed is that of the slowest rank, which
        sends and receives as much at the same time; None if it was not measured.
    """
    if devices < 2:
        return []
    limit = links_time_limit(devices) if seconds is None else seconds
    return _ring_rows(run_local_ranks(_run_rank, devices, (megabytes, limit), limit, ERROR_GRACE_SECONDS), limit)


def _ring_rows(answers: Mapping[int, Any], limit: float) -> list[dict[str, Any]]:
    """Return the rows of the report from the answers of all ranks: lists of RingResult, or the text of an error."""
    errors = [f"rank {rank}: {answers[rank]}" for rank in sorted(answers) if isinstance(answers[rank], str)]
    errors.sort(key=lambda text: NO_ANSWER in text)  # a rank without an answer may have waited for one that failed
    if errors:
        if errors[0].endswith(NO_ANSWER):
            errors[0] += f" within {limit:g} s (--link-seconds)"
        return [
            {"case": f"rings of {len(answers)} NPUs", "ok": False, "error": errors[0], "gigabytes_per_second": None}
        ]
    rows = []
    for number, (case, _, _) in enumerate(answers[0]):
        results = [answers[rank][number] for rank in sorted(answers) if number < len(answers[rank])]
        wrong = [rank for rank, (_, is_right, _) in enumerate(results) if not is_right]
        speeds = [speed for *_, speed in results if speed is not None]
        error = f"ranks {', '.join(map(str, wrong))} got other data than was sent" if wrong else None
        rows.append(
            {"case": case, "ok": not wrong, "error": error, "gigabytes_per_second": min(speeds) if speeds else None}
        )
    return rows


def _run_rank(rank: int, size: int, init_method: str, megabytes: int, limit: float) -> list[RingResult]:
    """Run all rings on the process of one rank."""
    try:
        import torch_npu  # noqa: F401

        device = torch.device("npu", rank)
        torch.npu.set_device(device)  # type: ignore[attr-defined]
        set_hccl_timeouts(limit)
        timeout = timedelta(seconds=limit)
        dist.init_process_group(
            "cpu:gloo,npu:hccl", init_method=init_method, rank=rank, world_size=size, timeout=timeout
        )
        return _run_rings(rank, size, device, megabytes, limit)
    except Exception:
        traceback.print_exc()
        raise


def _run_rings(rank: int, size: int, device: torch.device, megabytes: int, limit: float) -> list[RingResult]:
    results: list[RingResult] = []
    timeout = timedelta(seconds=limit)
    for members in [size] + ([size - 1] if size > 3 and size % 2 == 0 else []):
        ring = dist.new_group(list(range(members)), timeout)
        rest = dist.new_group(list(range(members, size)), timeout) if members < size else None
        group = ring if rank < members else rest
        assert group is not None
        for directional in (False, True):
            launches = "directional groups" if directional else "one launch a step"
            if directional:
                open_directional_groups(group, device, timeout)
            is_right, speed = _run_ring(group, device, megabytes, limit) if rank < members else (True, None)
            if directional:
                close_directional_groups(group)
            results.append((f"ring of {members}, {launches}{NO_ODD_RING * (size == 2)}", is_right, speed))
    return results


def _run_ring(
    group: dist.ProcessGroup, device: torch.device, megabytes: int, limit: float
) -> tuple[bool, float | None]:
    """Send the block of every rank once around the ring. Returns True if all blocks arrived, and the GB/s that this
    rank sends while it receives as much."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    warm_up(build_plan(Documents([4 * size]), Topology(1, size), AttentionConfig(1), "ring"), group, device)
    transport = GroupTransport(group, limit, device)
    rows = megabytes * (1 << 20) // 4
    blocks = [torch.full((rows,), float(rank), device=device), torch.empty(rows, device=device)]

    def step(number: int) -> None:
        sent, received = blocks[number % 2], blocks[(number + 1) % 2]
        for pending in transport.post(
            [
                Transfer(sent, (rank + 1) % size, True, number, "block"),
                Transfer(received, (rank - 1) % size, False, number, "block"),
            ]
        ):
            pending.wait()

    is_right = True
    for number in range(size):
        step(number)
        is_right &= bool((blocks[(number + 1) % 2] == float((rank - number - 1) % size)).all())
    npu: Any = torch.npu  # type: ignore[attr-defined]
    npu.synchronize()
    start = time.perf_counter()
    for number in range(TIMED_ROUNDS):
        step(number)
    npu.synchronize()
    return is_right, TIMED_ROUNDS * rows * 4 / (time.perf_counter() - start) / 1e9
