"""What posting messages costs the host: seconds of a batch of sends and receives, by their number.

    python -m benchmarks.posting                  # two ranks on this CPU, over gloo
    python -m benchmarks.posting --device cuda    # one rank that sends to itself over NCCL

Messages go through the transport of the engine (:class:`mindspeed_cp.comm.GroupTransport`), two tensors each, as keys
and values are. On a device the host's seconds alone are timed: the device is idle before each batch. A rank that sends
to itself posts what two ranks would, and its messages never leave the device. The fit is seconds of a batch, and of
each message in it, a send or a receive.
"""

from __future__ import annotations

import argparse
import os
import time

import numpy as np
import torch
import torch.distributed as dist

from mindspeed_cp.cluster.fit import fit_rate
from mindspeed_cp.comm import GroupTransport, Transfer
from mindspeed_cp.comm.local_ranks import run_local_ranks

COUNTS, REPEATS, TENSORS = (2, 4, 8, 16, 32), 60, 2


def batch_seconds(transport: GroupTransport, device: torch.device, peer: int, count: int) -> tuple[float, float]:
    """Return the median seconds in which the host posts `count` messages, half of them sends, and waits for them."""
    tensors = [torch.zeros(1 << 16, dtype=torch.bfloat16, device=device) for _ in range(count * TENSORS)]
    transfers = [
        Transfer(x, peer, i % (2 * TENSORS) < TENSORS, i // (2 * TENSORS) * TENSORS + i % TENSORS, "posting")
        for i, x in enumerate(tensors)
    ]
    posting, waiting = [], []
    for _ in range(REPEATS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        pending = transport.post(transfers)
        posted = time.perf_counter()
        for work in pending:
            work.wait()
        posting.append(posted - begin)
        waiting.append(time.perf_counter() - posted)
    return float(np.median(posting[REPEATS // 4 :])), float(np.median(waiting[REPEATS // 4 :]))


def run_rank(rank: int, ranks: int, init_method: str, device_type: str) -> list[tuple[int, float, float]]:
    """Return (messages, seconds to post them, seconds to wait for them) of this rank."""
    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device("cpu")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    library = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(library, init_method=init_method, rank=rank, world_size=ranks)
    transport = GroupTransport(None, 60.0, device)
    out = []
    for count in COUNTS:
        dist.barrier()
        out.append((count, *batch_seconds(transport, device, (rank + 1) % ranks, count)))
    dist.destroy_process_group()
    return out


def main() -> None:
    """Print the table and the fit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    device = parser.parse_args().device
    answers = run_local_ranks(run_rank, 1 if device == "cuda" else 2, (device,), limit=300.0)
    rows = answers[0]
    if isinstance(rows, str):
        raise SystemExit(f"benchmarks.posting: {rows}")
    print(f"{'messages':>8} {'post, us':>9} {'wait, us':>9}")
    for count, post, wait in rows:
        print(f"{count:8} {post * 1e6:9.1f} {wait * 1e6:9.1f}")
    fit = fit_rate("posting", np.array([row[0] for row in rows]), np.array([row[1] for row in rows]))
    print(f"fit: a batch {fit.overhead * 1e6:.1f} us, a message {1e6 / fit.rate:.1f} us")


if __name__ == "__main__":
    main()
