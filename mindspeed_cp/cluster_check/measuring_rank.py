"""What measurements share in a worker: the device, the process group, barriers and the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist

from mindspeed_cp.algorithms import build_plan
from mindspeed_cp.cluster_check.launch import Launch, open_store
from mindspeed_cp.comm import GroupTransport, Transfer, warm_up
from mindspeed_cp.device.select import load_npu, set_hccl_timeouts
from mindspeed_cp.errors import PeerError
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan import AttentionConfig, Topology

STORE_SECONDS = 60.0
MEETING_LINKS = 3  # limits of a link that a rank waits for others, which may wait for their own link
MEETING_POLL_SECONDS = 0.002


class OthersSilentError(PeerError):
    """A rank waited for all others in vain: another one is the cause."""

    waited_for_all = True


class MeasuringRank:
    """A worker among the workers of all ranks.

    Args:
        launch: this rank.
        device_type: "cpu" or "npu".
        link_seconds: seconds until a silent link counts as hung.
        generation: number of the workers since the start; each generation has a process group of its own.

    Attributes:
        launch, link_seconds: as given.
        sign: called to tell the supervisor that this worker is at work.
    """

    def __init__(self, launch: Launch, device_type: str, link_seconds: float, generation: int) -> None:
        self.launch, self.link_seconds = launch, link_seconds
        self._device_type, self._generation = device_type, generation
        self.sign: Callable[[], None] = lambda: None
        self._transport: GroupTransport | None = None
        self._meetings = 0

    @cached_property
    def device(self) -> torch.device:
        """The device of this rank, made the current one."""
        if self._device_type == "cpu":
            return torch.device("cpu")
        load_npu("--device npu", "--device cpu").set_device(self.launch.local_rank)
        return torch.device("npu", self.launch.local_rank)

    @cached_property
    def _store(self) -> dist.Store:
        """What the workers of this generation agree over."""
        return dist.PrefixStore(f"workers/{self._generation}", open_store(self.launch, STORE_SECONDS, serve=False))

    @property
    def transport(self) -> GroupTransport:
        """Transfers over the current group: that of a pair inside :meth:`pair`, else that of all ranks, made here."""
        if self._transport is None:
            self._transport = self._join("all", self.launch.rank, self.launch.ranks)
        return self._transport

    @contextmanager
    def pair(self, ranks: Sequence[int]) -> Iterator[int]:
        """Make a group of two ranks the current one, and yield the other one's number in it. A group of all ranks needs
        every link: here a link that is broken spoils no other pair."""
        number = list(ranks).index(self.launch.rank)
        self._leave()
        self._transport = self._join(f"pair {ranks[0]} {ranks[1]}", number, 2)
        yield 1 - number
        self._leave()

    def _join(self, name: str, rank: int, ranks: int) -> GroupTransport:
        device = self.device
        if device.type == "npu":
            set_hccl_timeouts(self.link_seconds)
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "cpu:gloo,npu:hccl",
            store=dist.PrefixStore(name, self._store),
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=self.link_seconds),
        )
        warm_up(build_plan(Documents([4 * ranks]), Topology(1, ranks), AttentionConfig(1), "ring"), None, device)
        return GroupTransport(None, self.link_seconds, device)

    def _leave(self) -> None:
        if self._transport is not None:
            dist.destroy_process_group()
            self._transport = None

    def meet(self) -> None:
        """Wait for all ranks over the store, without a link between them.

        Raises:
            OthersSilentError: a rank did not come within the limit of a link.
        """
        self._meetings += 1
        key = f"meeting/{self._meetings}"
        if self._store.add(f"{key}/count", 1) == self.launch.ranks:
            self._store.set(key, "")
        deadline = time.monotonic() + MEETING_LINKS * self.link_seconds
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise OthersSilentError(f"waited for all ranks for {MEETING_LINKS * self.link_seconds:g} s")
            self.sign()
            time.sleep(MEETING_POLL_SECONDS)

    def transfer(self, transfers: Sequence[Transfer]) -> None:
        """Post transfers and wait for them."""
        for pending in self.transport.post(transfers):
            pending.wait()

    def send(self, data: torch.Tensor, peer: int, label: str) -> None:
        """Send a tensor."""
        self.transfer([Transfer(data, peer, True, 0, label)])

    def receive(self, data: torch.Tensor, peer: int, label: str) -> None:
        """Receive a tensor."""
        self.transfer([Transfer(data, peer, False, 0, label)])

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize(self.device)

    def barrier(self) -> None:
        """Wait for all ranks.

        Raises:
            OthersSilentError: a rank did not come within the limit of a link.
        """
        self.sum(0.0)

    def sum(self, *values: float) -> list[float]:
        """Return the sums of numbers over all ranks; also a barrier."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, value: float) -> float:
        """Return the maximum of a number over all ranks; also a barrier."""
        return self._reduce((value,), dist.ReduceOp.MAX)[0]

    def _reduce(self, values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        _ = self.transport
        numbers = torch.tensor(values, dtype=torch.float64)
        try:
            dist.all_reduce(numbers, operation)
        except RuntimeError as error:
            raise OthersSilentError(f"waited for all ranks: {' '.join(str(error).split())[:200]}") from error
        return list(numbers.tolist())

    def seconds(self, run: Callable[[], None] | None) -> float:
        """Return the seconds of a run on this rank, from a barrier until the device is done; 0 if it only waits."""
        self.synchronize()
        self.barrier()
        start = time.perf_counter()
        if run is None:
            return 0.0
        run()
        self.synchronize()
        return time.perf_counter() - start

    def least_seconds(self, run: Callable[[], None] | None, rounds: int) -> float:
        """Return the least of several runs: other processes only add time."""
        times = []
        for _ in range(rounds):
            self.sign()
            times.append(self.seconds(run))
        return min(times)
