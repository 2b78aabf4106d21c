"""What the check of attention adds to forward and backward of one call, as a share of both.

    python -m benchmarks.attention_check [--tokens 16384] [--repeat 7] [--every 10] [--json FILE]

One causal document in bf16 on 2 ranks. Every time is from barrier to barrier, so that it is that of the slowest rank;
calls and checks take turns, because the speed of shared machines drifts. A model of n layers in which every m-th step
is checked spends a share that is n m times smaller.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.arguments import Arguments
from benchmarks.runs import DIM, HEADS
from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan, context_parallel_attention
from mindspeed_cp.engine.attention_check import AttentionCheck
from mindspeed_cp.ops.host_memory import keep_freed_memory

RANKS = 2


def barrier_time() -> float:
    """Return the time when the slowest rank is there."""
    dist.barrier()
    return time.perf_counter()


def measure(rank: int, folder: str, tokens: int, repeat: int) -> None:
    """Write the median seconds of a call and of a check."""
    keep_freed_memory()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    plan = build_plan(Documents([tokens]), Topology(1, RANKS), AttentionConfig(HEADS, HEADS, DIM))
    rows = int(plan.layout.token_counts[rank])
    q, k, v = (torch.randn(rows, HEADS, DIM, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    seconds: dict[str, list[float]] = defaultdict(list)
    for turn in range(repeat + 1):
        check, times = AttentionCheck(1, (turn,)), [barrier_time()]
        out = context_parallel_attention(q, k, v, plan)
        times.append(barrier_time())
        check.observe(q, k, v, out, plan, rank)
        times.append(barrier_time())
        torch.autograd.grad(out, (q, k, v), out.detach())
        times.append(barrier_time())
        assert check.compare(dist.group.WORLD) is None
        times.append(barrier_time())
        forward, observing, backward, comparing = np.diff(times).tolist()
        if turn:  # the first round warms up
            seconds["call"].append(forward + backward)
            seconds["check"].append(observing + comparing)
    if rank == 0:
        medians = {name: statistics.median(x) for name, x in seconds.items()}
        Path(folder, "seconds.json").write_text(json.dumps(medians))
    dist.destroy_process_group()


def main() -> None:
    parser = Arguments(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384, help="of the document")
    parser.add_argument("--repeat", type=int, default=7, help="of the call")
    parser.add_argument("--every", type=int, default=10, help="steps between two checks")
    parser.add_argument("--json", type=Path, help="write all figures there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (folder, args.tokens, args.repeat), nprocs=RANKS)
        seconds = json.loads(Path(folder, "seconds.json").read_text())
    share = seconds["check"] / seconds["call"] / args.every
    print(
        f"call {1e3 * seconds['call']:.1f} ms, check {1e3 * seconds['check']:.1f} ms, every {args.every} steps: "
        f"{share:.2%} of one layer's attention"
    )
    if args.json is not None:
        args.json.write_text(json.dumps(seconds, indent=1))


if __name__ == "__main__":
    main()
