"""Seconds of messages between ranks: two of a node, all of a node at once, two nodes, and all NICs of a node at once.

Messages go the way that the engine's go (:class:`mindspeed_cp.comm.Transport`): HCCL between NPUs, gloo between CPUs.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_cp.comm import Transfer, Transport, warm_up
from mindspeed_cp.cost.measurements import Measurement
from mindspeed_cp.errors import ConfigError, PeerError
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan import AttentionConfig, Topology, build_plan

SIZES = tuple(1 << power for power in range(10, 25, 2))  # bytes of a message: 1 KiB to 16 MiB
TOGETHER = 1 << 23  # bytes to each peer when all send at once
BYTES = 1 << 26  # about so many are sent for each size
SECONDS = 90.0  # until a rank that does not answer is given up


def measure_links(device: torch.device, local_size: int) -> list[Measurement]:
    """Time messages among the ranks of the default process group; every rank calls it.

    Args:
        device: of this rank.
        local_size: ranks of each node, numbered node by node.

    Returns:
        Measurements of "in_node" and "in_node_all" where a node has several ranks, and of "network" and "network_all"
        where there are several nodes; the same on every rank.

    Raises:
        PeerError: a rank died or did not answer.
        ConfigError: the ranks do not make whole nodes.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if size % local_size:
        raise ConfigError(f"{size} ranks do not make whole nodes of {local_size}; start as many on every node")
    warm_up(build_plan(Documents([4 * size]), Topology(1, size), AttentionConfig(1), "ring"), None, device)
    links = _Links(Transport(None, SECONDS, device), device, rank)
    found: list[Measurement] = []
    if local_size > 1:
        found += links.between("in_node", 0, 1)
        peers = [other for other in range(local_size) if other != rank] if rank < local_size else []
        found.append(links.together("in_node_all", peers))
    if size > local_size:
        found += links.between("network", 0, local_size)
        like = (rank + local_size) % (2 * local_size)
        found.append(links.together("network_all", [like] if rank < 2 * local_size else []))
    return found


class _Links:
    """Times messages of one rank."""

    def __init__(self, transport: Transport, device: torch.device, rank: int) -> None:
        self.transport, self.device, self.rank = transport, device, rank

    def between(self, kind: str, first: int, second: int) -> list[Measurement]:
        """There and back between two ranks, while the others wait: half of that is a message."""
        found = []
        for size in SIZES:
            turns = max(4, min(200, BYTES // size // 8))
            data = torch.zeros(size, dtype=torch.uint8, device=self.device)

            def there_and_back(data: torch.Tensor = data) -> None:
                peer = second if self.rank == first else first
                for sends in (True, False) if self.rank == first else (False, True):
                    self._run([Transfer(data, peer, sends, 0, kind)])

            mine = self.rank in (first, second)
            seconds = self._slowest(there_and_back if mine else None, turns)
            found.append(Measurement(kind, seconds / 2, bytes=size))
        return found

    def together(self, kind: str, peers: Sequence[int]) -> Measurement:
        """Every rank sends to all its peers at once, and receives as much from each."""
        sent = [torch.zeros(TOGETHER, dtype=torch.uint8, device=self.device) for _ in peers]
        kept = [torch.empty_like(data) for data in sent]

        def exchange() -> None:
            transfers = []
            for peer, out, into in zip(peers, sent, kept, strict=True):
                transfers += [Transfer(out, peer, True, 0, kind), Transfer(into, peer, False, 0, kind)]
            self._run(transfers)

        seconds = self._slowest(exchange if peers else None, turns=4)
        return Measurement(kind, seconds, bytes=TOGETHER * self._most(len(peers)))

    def _run(self, transfers: Sequence[Transfer]) -> None:
        for pending in self.transport.post(transfers):
            pending.wait()

    def _slowest(self, run: Callable[[], None] | None, turns: int) -> float:
        """Seconds of a turn on the slowest rank, the least of three times that many turns; ranks with nothing to do
        wait."""
        taken = []
        for number in range(4):  # the first connects
            self._most(0)
            start = time.perf_counter()
            if run is not None:
                for _ in range(turns):
                    run()
                if self.device.type != "cpu":
                    getattr(torch, self.device.type).synchronize(self.device)
            seconds = time.perf_counter() - start if run is not None else 0.0
            if number:
                taken.append(self._most(seconds) / turns)
        return min(taken)

    def _most(self, value: float) -> Any:
        """The largest over all ranks, who all meet here."""
        number = torch.tensor([value], dtype=torch.float64)
        try:
            dist.all_reduce(number, dist.ReduceOp.MAX)
        except RuntimeError as error:
            raise PeerError(f"calibrate: a rank is gone or silent ({' '.join(str(error).split())[:160]})") from error
        return number.item()


def join(device: torch.device, **where: Any) -> None:
    """Join the process group: of the environment (torchrun), or with init_method, rank and world_size."""
    library = "gloo" if device.type == "cpu" else "cpu:gloo,npu:hccl"
    dist.init_process_group(library, timeout=timedelta(seconds=SECONDS), **where)


def measure_local_links(device_type: str, ranks: int) -> list[Measurement]:
    """Start ranks on this machine, one process each, and time messages between them.

    Args:
        device_type: "cpu" or "npu"; each rank of NPUs has its own.
        ranks: 2 or more.

    Raises:
        PeerError: a rank failed; says which, and with what.
    """
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="mindspeed-cp-") as folder:
        processes, pipes = [], []
        try:
            for rank in range(ranks):
                ours, theirs = context.Pipe()
                arguments = (device_type, rank, ranks, (Path(folder) / "store").as_uri(), theirs)
                process = context.Process(target=_serve, args=arguments, daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            return _first(pipes)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _first(pipes: list[Connection]) -> list[Measurement]:
    """What rank 0 found; an error of any rank."""
    for pipe in wait(pipes, SECONDS * 2):
        assert isinstance(pipe, Connection)
        rank = pipes.index(pipe)
        try:
            found = pipe.recv()
        except EOFError:
            found = "the process died"
        if isinstance(found, str):
            raise PeerError(f"calibrate: rank {rank}: {found}")
        return list(found)
    raise PeerError(f"calibrate: no rank answered within {SECONDS * 2:g} s")


def _serve(device_type: str, rank: int, ranks: int, store: str, pipe: Connection) -> None:
    try:
        if sys.platform == "linux":
            os.environ.setdefault(
                "GLOO_SOCKET_IFNAME", "lo"
            )  # whatever the host's name resolves to: ranks are all here
        device = torch.device(device_type) if device_type == "cpu" else npu_device(rank)
        join(device, init_method=store, rank=rank, world_size=ranks)
        pipe.send(measure_links(device, ranks))
        dist.destroy_process_group()
    except Exception as error:
        pipe.send(" ".join(f"{type(error).__name__}: {error}".split())[:300])


def npu_device(local_rank: int) -> torch.device:
    """The NPU of a rank, made the current one."""
    from mindspeed_cp.devices import load_npu

    load_npu("--device npu", "--device cpu").set_device(local_rank)
    return torch.device("npu", local_rank)
