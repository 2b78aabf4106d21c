"""What the engine's Python costs the host in a ring: messages are there at once, and kernels do nothing.

One process is a rank of torch's "fake" process group, which finishes whatever it is given and moves no byte. All that
`context_parallel_attention` does runs: its checks, autograd, buffers, steps, and its calls of torch.distributed as for
NCCL, one coalesced launch a step. Left out is what a kernel's own call and the network's library take.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan, context_parallel_attention
from mindspeed_cp.engine import agreement, prepare
from mindspeed_cp.ops.attention.backends import get_backend
from mindspeed_cp.ops.attention.contract import AttentionBackend

ROWS = 32  # of each rank: next to nothing


class NoKernels:
    """A backend that makes and places another one's calls, and runs none.

    Args:
        real: the other one.
    """

    def __init__(self, real: AttentionBackend) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def forward(self, *_: object) -> None:
        """Do nothing."""

    def backward(self, *_: object) -> None:
        """Do nothing."""


def host_rows(ranks: int, attention: AttentionConfig, device: torch.device, calls: int = 200) -> list[dict[str, Any]]:
    """Return {"what", "us"}: median microseconds of the host for one step of a ring, a call's beginning and end shared
    out among its steps; and of torch.distributed's part of the forward.

    Args:
        ranks: of the ring.
        attention: of all heads.
        device: of the tensors; its backend's calls are made and not run.
        calls: of each direction, after 20 to warm up.

    Raises:
        ConfigError: the backend does not run there.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    plan = build_plan(Documents([ROWS * ranks]), Topology(1, ranks), attention, "ring")
    backend: Any = NoKernels(get_backend(device.type))
    shapes = [(ROWS, n, attention.head_dim) for n in (attention.heads, *[attention.kv_heads] * 2)]
    leaves = [torch.zeros(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    dout = torch.zeros(shapes[0], device=device, dtype=torch.bfloat16)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    all_equal, agreement._all_equal = (
        agreement._all_equal,
        lambda digests: True,
    )  # the fake group sums nothing
    try:
        prepare(plan, 0, torch.bfloat16, backend, dout.device)
        times: dict[str, list[float]] = {"forward": [], "backward": [], "messages": []}
        steps = {name: getattr(plan, name).steps for name in ("forward", "backward")}
        gc.collect()
        for turn in range(calls + 20):
            out, forward = _timed(lambda: context_parallel_attention(*leaves, plan, backend=backend), device)
            _, backward = _timed(lambda out=out: torch.autograd.grad(out, leaves, dout), device)
            _, messages = _timed(lambda: _exchange(leaves[1:], ranks), device) if ranks > 1 else (None, 0.0)
            if turn >= 20:
                times["forward"].append(forward / steps["forward"])
                times["backward"].append(backward / steps["backward"])
                times["messages"].append(messages)
    finally:
        agreement._all_equal = all_equal
        dist.destroy_process_group()
    us = {name: statistics.median(seconds) for name, seconds in times.items()}
    rows = [
        {"what": f"host time on this CPU, engine, {name}, a step of a ring of {ranks}", "us": us[name]}
        for name in steps
    ]
    return [*rows, {"what": "host time on this CPU, torch.distributed alone, a step forward", "us": us["messages"]}]


def _exchange(tensors: list[torch.Tensor], ranks: int) -> None:
    """Exchange one step's messages of a ring, without the engine."""
    ends = [(dist.isend, 1), (dist.irecv, ranks - 1)]
    operations = [dist.P2POp(start, x.detach(), peer) for start, peer in ends for x in tensors]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _timed(run: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """Return what a call returns, and the microseconds until it did so: a device may still be at work, and is waited
    for after."""
    begin = time.perf_counter()
    result = run()
    us = (time.perf_counter() - begin) * 1e6
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
    return result, us
