"""The place of this process among the ranks that torchrun started, and speeds of their links: pairs, and many sizes.

Messages use the transport of the engine (:class:`mindspeed_cp.comm.group_transport.GroupTransport`): HCCL between
NPUs, NCCL between GPUs, gloo between CPUs. `mindspeed-cp calibrate` fits a cluster to the messages of many sizes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mindspeed_cp.algorithms import build_plan
from mindspeed_cp.cluster.calibration import Measurement
from mindspeed_cp.comm.directional_groups import warm_up
from mindspeed_cp.comm.group_transport import GroupTransport, Transfer
from mindspeed_cp.device.open_files import check_open_files, raise_limit
from mindspeed_cp.device.select import set_hccl_timeouts
from mindspeed_cp.doctor.machine import GROUP_LIBRARIES, synchronize
from mindspeed_cp.errors import ConfigError, PeerError
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan import AttentionConfig, Topology

SIZES = tuple(1 << power for power in range(10, 25, 2))  # bytes of a message for the fit: 1 KiB to 16 MiB
BYTES_TO_EACH_PEER = 1 << 23  # when all ranks send at once
BYTES_OF_A_SIZE = 1 << 26  # sent in total for each size, about
POSTED_MESSAGES, ROUNDS_OF_POSTING = 8, 20
TIMEOUT = 90.0  # seconds to wait for a rank

#: Variables that torchrun sets.
LAUNCH_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")

#: Text of a wait in vain, whose cause is another rank, and of rank 0 about a rank that said nothing.
SILENT, NO_ANSWER = "a rank is gone or silent", "no answer"

#: Words by which a rank says that it could not begin, and, the nearest to the cause first, what others then say.
_CAUSES = ("Too many open files", "can't start new thread", "No space left")
_WAITS = (("timeout", "timed out", "Timed out"), (SILENT,), (NO_ANSWER,))


class Launch(NamedTuple):
    """A rank among all.

    Attributes:
        rank, ranks: number of this rank, and of all ranks; ranks are numbered node by node.
        local_rank, ranks_per_node: number of this rank on its node, and of the ranks there.
    """

    rank: int
    ranks: int
    local_rank: int
    ranks_per_node: int

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.ranks // self.ranks_per_node


def is_launched() -> bool:
    """Return True if a launcher has started this process as one of its ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def read_launch(command: str) -> Launch:
    """Read what torchrun tells a rank, and let this process open as many files as all ranks need.

    Args:
        command: words of this command, for errors.

    Raises:
        ConfigError: the process was not started by torchrun, there is one rank only, nodes have different numbers of
            ranks, or a process may open too few files.
    """
    start = f"torchrun --nnodes 2 --nproc-per-node 8 ... -m mindspeed_cp {command}"
    missing = [name for name in (*LAUNCH_NUMBERS, "MASTER_ADDR") if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"{missing[0]} is not set, but RANK and WORLD_SIZE are; start the ranks with {start}, or one process "
            "without these variables"
        )
    try:
        rank, ranks, local_rank, per_node, _ = (int(os.environ[name]) for name in LAUNCH_NUMBERS)
    except ValueError:
        texts = ", ".join(f"{name}={os.environ[name]}" for name in LAUNCH_NUMBERS)
        raise ConfigError(f"{texts}: must be whole numbers; start the ranks with {start}") from None
    if ranks < 2:
        raise ConfigError(f"WORLD_SIZE is {ranks}, and one rank has no links; valid: 2 or more (--nproc-per-node 2)")
    if not 0 <= local_rank < per_node <= ranks or ranks % per_node or rank % per_node != local_rank:
        raise ConfigError(
            f"rank {rank} of {ranks} is local rank {local_rank} of {per_node}; valid: the same number of ranks on "
            "every node, numbered node by node"
        )
    raise_limit()
    check_open_files(ranks)  # with too few, libraries report time-outs
    return Launch(rank, ranks, local_rank, per_node)


def join_process_group(device: torch.device, seconds: float, **arguments: Any) -> None:
    """Join the default process group: that of the environment, or one given by `init_method` or `store`, `rank` and
    `world_size`."""
    if device.type == "npu":
        set_hccl_timeouts(seconds)
    dist.init_process_group(GROUP_LIBRARIES[device.type], timeout=timedelta(seconds=seconds), **arguments)


class LinkTimer:
    """Times messages among the ranks of the default process group; every rank makes one at the same time.

    Args:
        device: device of this rank.
        seconds: limit of a wait.

    Attributes:
        rank, size: number of this rank, and of all.
    """

    def __init__(self, device: torch.device, seconds: float = TIMEOUT) -> None:
        self.device, self.rank, self.size = device, dist.get_rank(), dist.get_world_size()
        ring = build_plan(Documents([4 * self.size]), Topology(1, self.size), AttentionConfig(1), "ring")
        warm_up(ring, None, device)
        self.transport = GroupTransport(None, seconds, device)

    def _buffer(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self.device)

    def transfer(self, transfers: Sequence[Transfer]) -> None:
        """Post transfers and wait for them."""
        for pending in self.transport.post(transfers):
            pending.wait()

    def exchange(self, label: str, targets: Sequence[int], sources: Sequence[int], size: int) -> Callable[[], None]:
        """Return a run that sends so many bytes to each target while it receives as many from each source."""
        sent, *received = (self._buffer(size) for _ in range(1 + len(sources)))

        def run() -> None:
            receives = [Transfer(data, peer, False, 0, label) for peer, data in zip(sources, received, strict=True)]
            self.transfer([*(Transfer(sent, peer, True, 0, label) for peer in targets), *receives])

        return run

    def maximum(self, value: float) -> float:
        """Return the maximum of a number over all ranks; also a barrier.

        Raises:
            PeerError: a rank died or did not answer.
        """
        number = torch.tensor([value], dtype=torch.float64)
        try:
            dist.all_reduce(number, dist.ReduceOp.MAX)
        except RuntimeError as error:
            raise PeerError(f"{SILENT} ({' '.join(str(error).split())[:160]})") from error
        return float(number.item())

    def seconds(self, run: Callable[[], object] | None, repeats: int = 1) -> float:
        """Return the seconds of so many runs on this rank, from a barrier until the device is done; None: only wait."""
        synchronize(self.device)
        self.maximum(0.0)
        if run is None:
            return 0.0
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        synchronize(self.device)
        return time.perf_counter() - start

    def slowest(self, run: Callable[[], None] | None, repeats: int = 1) -> float:
        """Return the seconds of one run on the slowest rank, the least over three rounds of `repeats` runs; one more
        round before them connects."""
        self.maximum(self.seconds(run, repeats))
        return min(self.maximum(self.seconds(run, repeats)) for _ in range(3)) / repeats

    def time_pair(self, size: int) -> dict[str, float]:
        """Return the bytes a second of the link of two ranks, which are the whole group: there alone, and back alone;
        the same on both."""
        peer, rates = [1 - self.rank], dict.fromkeys(("there", "back"), 0.0)
        for source, name in enumerate(rates):
            sends = self.rank == source
            run = self.exchange("the link between two ranks", peer if sends else [], [] if sends else peer, size)
            rates[name] = size / self.slowest(run)
        return rates

    def _round_trip(self, second: int, size: int, label: str, repeats: int) -> float:
        """Return the seconds of a message from rank 0 to another and back while the others wait."""
        data, peer = self._buffer(size), 0 if self.rank else second

        def run() -> None:
            for sends in (self.rank == 0, self.rank != 0):
                self.transfer([Transfer(data, peer, sends, 0, label)])

        return self.slowest(run if self.rank in (0, second) else None, repeats)

    def time_sizes(self, kind: str, second: int, peers: Sequence[int]) -> list[Measurement]:
        """Time messages of many sizes between rank 0 and another, of which each takes half of a round trip; then an
        exchange in which every rank sends to all its peers at once, and receives as much from each."""
        measurements = []
        for size in SIZES:
            repeats = max(4, min(200, BYTES_OF_A_SIZE // size // 8))
            measurements.append(Measurement(kind, self._round_trip(second, size, kind, repeats) / 2, bytes=size))
        size = BYTES_TO_EACH_PEER
        seconds = self.slowest(self.exchange(kind, peers, peers, size) if peers else None, repeats=4)
        return [*measurements, Measurement(f"{kind}_all", seconds, bytes=size * self.maximum(len(peers)))]

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
        return Measurement("posting", self.maximum(min(seconds, default=0.0)), calls=POSTED_MESSAGES)


def measure_links(timer: LinkTimer, local_size: int) -> list[Measurement]:
    """Time messages of many sizes, up to 16 MiB, which take minutes over slow links; every rank calls it.

    Args:
        timer: of the default process group.
        local_size: ranks of each node; ranks are numbered node by node.

    Returns:
        Measurements of "in_node" and "in_node_all" if a node has several ranks, of "network" and "network_all" if there
        are several nodes, and of "posting" between CPUs; the same on every rank.

    Raises:
        PeerError: a rank died or did not answer.
    """
    rank, measurements = timer.rank, []
    if local_size > 1:
        peers = [peer for peer in range(local_size) if peer != rank] if rank < local_size else []
        measurements += timer.time_sizes("in_node", 1, peers)
    if timer.size > local_size:
        peers = [(rank + local_size) % (2 * local_size)] if rank < 2 * local_size else []
        measurements += timer.time_sizes("network", local_size, peers)
    if timer.device.type == "cpu" and timer.size > 1:  # beside a device the host is ahead
        measurements.append(timer.time_posting())
    return measurements


def first_error(errors: Mapping[int, str]) -> str | None:
    """Return the error that explains the others, of errors by rank; None without an error.

    What kept a rank from beginning goes before time-outs, which its peers report, and these before no answer at all.
    """

    def order(rank: int) -> tuple[bool, int, int]:
        is_cause = any(words in errors[rank] for words in _CAUSES)
        waits = (level for level, listed in enumerate(_WAITS, 1) if any(words in errors[rank] for words in listed))
        return not is_cause, max(waits, default=0), rank

    return f"rank {(rank := min(errors, key=order))}: {errors[rank]}" if errors else None


def error_text(error: BaseException) -> str:
    """Return an error as one line, with its type unless it is an error of this package."""
    text = " ".join(str(error).split()) or "without a message"
    return (text if isinstance(error, (ConfigError, PeerError)) else f"{type(error).__name__}: {text}")[:600]
