"""Seconds of messages: between two ranks of a node, all ranks of a node at once, two nodes, and all NICs of a node at
once; and of posting them.

Messages use the transport of the engine (:class:`mindspeed_cp.comm.GroupTransport`): HCCL between NPUs, gloo between
CPUs.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_cp.algorithms import build_plan
from mindspeed_cp.cluster.measurements import Measurement
from mindspeed_cp.comm import GroupTransport, Transfer, warm_up
from mindspeed_cp.comm.local_ranks import NO_ANSWER, run_local_ranks
from mindspeed_cp.device.select import load_npu
from mindspeed_cp.errors import ConfigError, PeerError
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan import AttentionConfig, Topology

SIZES = tuple(1 << power for power in range(10, 25, 2))  # bytes of a message: 1 KiB to 16 MiB
BYTES_TO_EACH_PEER = 1 << 23  # when all ranks send at once
BYTES_OF_A_SIZE = 1 << 26  # sent in total for each size, about
POSTED_MESSAGES, ROUNDS_OF_POSTING = 8, 20
TIMEOUT = 90.0  # seconds to wait for a rank


def measure_links(
    device: torch.device,
    local_size: int,
    largest: Mapping[str, int] | None = None,
    sign: Callable[[], None] = lambda: None,
) -> list[Measurement]:
    """Time messages among the ranks of the default process group; every rank calls it.

    Args:
        device: device of this rank.
        local_size: ranks of each node; ranks are numbered node by node.
        largest: bytes of the largest message of "in_node" and of "network"; None: 16 MiB, which take minutes over slow
            links.
        sign: called between rounds.

    Returns:
        Measurements of "in_node" and "in_node_all" if a node has several ranks, of "network" and "network_all" if there
        are several nodes, and of "posting" between CPUs; the same on every rank.

    Raises:
        PeerError: a rank died or did not answer.
        ConfigError: the ranks do not make whole nodes.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if size % local_size:
        raise ConfigError(f"{size} ranks do not make whole nodes of {local_size}; start as many on every node")
    warm_up(build_plan(Documents([4 * size]), Topology(1, size), AttentionConfig(1), "ring"), None, device)
    timer = _LinkTimer(GroupTransport(None, TIMEOUT, device), device, rank, largest, sign)
    measurements: list[Measurement] = []
    if local_size > 1:
        measurements += timer.time_pair("in_node", 0, 1)
        peers = [peer for peer in range(local_size) if peer != rank] if rank < local_size else []
        measurements.append(timer.time_all("in_node_all", peers))
    if size > local_size:
        measurements += timer.time_pair("network", 0, local_size)
        peer = (rank + local_size) % (2 * local_size)
        measurements.append(timer.time_all("network_all", [peer] if rank < 2 * local_size else []))
    if device.type == "cpu" and size > 1:  # beside a device the host is ahead, and its seconds are not the device's
        measurements.append(timer.time_posting())
    return measurements


class _LinkTimer:
    """Times messages of one rank."""

    def __init__(
        self,
        transport: GroupTransport,
        device: torch.device,
        rank: int,
        largest: Mapping[str, int] | None,
        sign: Callable[[], None],
    ) -> None:
        self.transport, self.device, self.rank = transport, device, rank
        self.largest, self.sign = largest or {}, sign

    def time_pair(self, kind: str, first: int, second: int) -> list[Measurement]:
        """Time round trips between two ranks while the others wait; a message takes half of one."""
        measurements = []
        largest = self.largest.get(kind, SIZES[-1])
        for size in (size for size in SIZES if size <= largest):
            repeats = max(4, min(200, BYTES_OF_A_SIZE * largest // SIZES[-1] // size // 8))
            data = torch.zeros(size, dtype=torch.uint8, device=self.device)

            def round_trip(data: torch.Tensor = data) -> None:
                peer = second if self.rank == first else first
                for sends in (True, False) if self.rank == first else (False, True):
                    self._transfer([Transfer(data, peer, sends, 0, kind)])

            seconds = self._slowest_rank(round_trip if self.rank in (first, second) else None, repeats)
            measurements.append(Measurement(kind, seconds / 2, bytes=size))
        return measurements

    def time_all(self, kind: str, peers: Sequence[int]) -> Measurement:
        """Time an exchange in which every rank sends to all its peers at once, and receives as much from each."""
        size = min(BYTES_TO_EACH_PEER, self.largest.get(kind.removesuffix("_all"), SIZES[-1]))
        sent = [torch.zeros(size, dtype=torch.uint8, device=self.device) for _ in peers]
        received = [torch.empty_like(data) for data in sent]

        def exchange() -> None:
            transfers = []
            for peer, source, target in zip(peers, sent, received, strict=True):
                transfers += [Transfer(source, peer, True, 0, kind), Transfer(target, peer, False, 0, kind)]
            self._transfer(transfers)

        seconds = self._slowest_rank(exchange if peers else None, repeats=4)
        return Measurement(kind, seconds, bytes=size * self._max_over_ranks(len(peers)))

    def time_posting(self) -> Measurement:
        """Time the posting of messages of two tensors, as keys and values are, half of them sends, on the first two
        ranks."""
        seconds = []
        for _ in range(ROUNDS_OF_POSTING if self.rank < 2 else 0):
            data = [torch.zeros(64, dtype=torch.uint8) for _ in range(2 * POSTED_MESSAGES)]
            transfers = [
                Transfer(x, 1 - self.rank, i % 4 < 2, i // 4 * 2 + i % 2, "posting") for i, x in enumerate(data)
            ]
            start = time.perf_counter()
            pending = self.transport.post(transfers)
            seconds.append(time.perf_counter() - start)
            for each in pending:
                each.wait()
        return Measurement("posting", self._max_over_ranks(min(seconds, default=0.0)), calls=POSTED_MESSAGES)

    def _transfer(self, transfers: Sequence[Transfer]) -> None:
        for pending in self.transport.post(transfers):
            pending.wait()

    def _slowest_rank(self, run: Callable[[], None] | None, repeats: int) -> float:
        """Return the seconds of one run on the slowest rank, the least of three rounds of `repeats` runs; None: this
        rank only waits."""
        seconds_of_rounds = []
        for round_number in range(4):  # the first one connects
            self.sign()
            self._max_over_ranks(0)
            start = time.perf_counter()
            if run is not None:
                for _ in range(repeats):
                    run()
                if self.device.type != "cpu":
                    getattr(torch, self.device.type).synchronize(self.device)
            seconds = time.perf_counter() - start if run is not None else 0.0
            if round_number:
                seconds_of_rounds.append(self._max_over_ranks(seconds) / repeats)
        return min(seconds_of_rounds)

    def _max_over_ranks(self, value: float) -> Any:
        """Return the maximum over all ranks; also a barrier."""
        number = torch.tensor([value], dtype=torch.float64)
        try:
            dist.all_reduce(number, dist.ReduceOp.MAX)
        except RuntimeError as error:
            raise PeerError(f"calibrate: a rank is gone or silent ({' '.join(str(error).split())[:160]})") from error
        return number.item()


def join_process_group(device: torch.device, **arguments: Any) -> None:
    """Join the process group: that of the environment (torchrun), or one given by init_method, rank and world_size."""
    library = "gloo" if device.type == "cpu" else "cpu:gloo,npu:hccl"
    dist.init_process_group(library, timeout=timedelta(seconds=TIMEOUT), **arguments)


def measure_local_links(device_type: str, ranks: int) -> list[Measurement]:
    """Start ranks on this machine, one process each, and time messages between them.

    Args:
        device_type: "cpu" or "npu"; each rank has an NPU of its own.
        ranks: 2 or more.

    Raises:
        PeerError: a rank failed; names it and its error.
    """
    answers = run_local_ranks(_run_rank, ranks, (device_type,), limit=2 * TIMEOUT)
    for rank, answer in answers.items():
        if isinstance(answer, str):
            limit = f" within {2 * TIMEOUT:g} s" if answer == NO_ANSWER else ""
            raise PeerError(f"calibrate: rank {rank}: {answer}{limit}")
    return list(answers[0])


def _run_rank(rank: int, ranks: int, init_method: str, device_type: str) -> list[Measurement]:
    if sys.platform == "linux":  # whatever the name of the host resolves to: all ranks are on this machine
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = torch.device(device_type) if device_type == "cpu" else npu_device(rank)
    join_process_group(device, init_method=init_method, rank=rank, world_size=ranks)
    return measure_links(device, ranks)


def npu_device(local_rank: int) -> torch.device:
    """Return the NPU of a rank, made the current one."""
    load_npu("--device npu", "--device cpu").set_device(local_rank)
    return torch.device("npu", local_rank)
