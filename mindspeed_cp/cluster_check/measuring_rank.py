"""What measurements share in a worker: the device, the process group, barriers and the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
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

    @cached_property
    def device(self) -> torch.device:
        """The device of this rank, made the current one."""
        if self._device_type == "cpu":
            return torch.device("cpu")
        load_npu("--device npu", "--device cpu").set_device(self.launch.local_rank)
        return torch.device("npu", self.launch.local_rank)

    @cached_property
    def transport(self) -> GroupTransport:
        """Transfers over the group of all ranks, which is made here."""
        device = self.device
        if device.type == "npu":
            set_hccl_timeouts(self.link_seconds)
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "cpu:gloo,npu:hccl",
            store=dist.PrefixStore(f"group/{self._generation}", open_store(self.launch, STORE_SECONDS, serve=False)),
            rank=self.launch.rank,
            world_size=self.launch.ranks,
            timeout=timedelta(seconds=self.link_seconds),
        )
        ranks = self.launch.ranks
        warm_up(build_plan(Documents([4 * ranks]), Topology(1, ranks), AttentionConfig(1), "ring"), None, device)
        return GroupTransport(None, self.link_seconds, device)

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
