"""Efficiency of the engine on this machine's CPU, and what its Python costs.

    python -m benchmarks.engine [--tokens 16384] [--ranks 2] [--repeat 9] [--skip-packed] [--json FILE]
    python -m benchmarks.engine --device cuda --virtual-ranks 8     see benchmarks/virtual_ranks.py

Ideal: the same kernel once for every document on an equal share of the heads, on all ranks at once; no communication,
no merge, no conversion. Engine and ideal are timed in turn, barrier to barrier, and compared as a ratio of medians,
because the speed of shared machines drifts. Every rank runs one thread and keeps freed memory, as training on the CPU
does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.host import host_rows
from benchmarks.timing import Arguments, median_us
from benchmarks.virtual_ranks import DIM, HEADS, Run, add_arguments, ideal, packed_lengths, planned, report
from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan, context_parallel_attention
from mindspeed_cp.ops.attention import attention, attention_backward
from mindspeed_cp.ops.host_memory import keep_freed_memory

HOST_RING = 8  # ranks of the ring whose host time is measured
WIDTH = 65  # of what a figure is called


def both(run: Run, backward: bool) -> Callable[[], None]:
    """Run the forward, or both directions, without a barrier between them."""
    return lambda: run.backward(run.forward()) if backward else run.forward()


def barrier_to_barrier(run: Callable[[], None]) -> float:
    """Return the milliseconds until the slowest rank is done."""
    dist.barrier()
    start = time.perf_counter()
    run()
    dist.barrier()
    return (time.perf_counter() - start) * 1e3


def worker(rank: int, folder: str, ranks: int, cases: dict[str, list[int]], repeat: int) -> None:
    keep_freed_memory()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    rows = []
    for title, lengths in cases.items():
        for backward in (False, True):
            plan = build_plan(Documents(lengths), Topology(1, ranks), AttentionConfig(HEADS, HEADS, DIM))
            runs = {
                name: both(run, backward)
                for name, run in (("ideal", ideal(lengths, ranks)), ("engine", planned(plan, rank)))
            }
            times: dict[str, list[float]] = {name: [] for name in runs}
            for i in range(repeat + 1):
                for name, run in runs.items():
                    milliseconds = barrier_to_barrier(run)
                    if i:  # the first round warms up
                        times[name].append(milliseconds)
            medians = {name: statistics.median(t) for name, t in times.items()}
            rows.append(
                {
                    "case": title, "direction": "forward+backward" if backward else "forward",
                    "ideal_ms": medians["ideal"], "engine_ms": medians["engine"],
                    "efficiency": medians["ideal"] / medians["engine"],
                    "best_over_best": min(times["ideal"]) / min(times["engine"]),
                }
            )  # fmt: skip
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def once(run: Callable[[], Any], calls: int = 400) -> float:
    """Return the median microseconds of a call, after 20 to warm up."""
    return median_us(run, calls, warm_up=20)


def overhead() -> list[dict[str, Any]]:
    """Time one engine step without peers on 32 tokens: the kernel is nearly free, so this is the Python around it."""
    torch.set_num_threads(1)
    plan = build_plan(Documents([32]), Topology(), AttentionConfig(HEADS, HEADS, DIM))
    q, k, v, dout = (torch.randn(32, HEADS, DIM) for _ in range(4))
    cu = plan.documents.offsets.astype(np.int32)
    out, lse = attention(q, k, v, cu, cu)
    forward = once(lambda: context_parallel_attention(q, k, v, plan))
    kernel = ideal_us(q, k, v)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    both = once(lambda: torch.autograd.grad(context_parallel_attention(*leaves, plan), leaves, dout))
    backward_operator = once(lambda: attention_backward(dout, q, k, v, out, lse, cu, cu))
    return [
        {"what": "engine, forward, one step, no peers", "us": forward},
        {"what": "of which the flash kernel", "us": kernel},
        {"what": "engine, forward + backward", "us": both},
        {"what": "the attention operator's backward alone", "us": backward_operator},
    ]


def ideal_us(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return once(lambda: flash(q, k, v, 0.0, True))


def latency(rank: int, folder: str, results: str) -> None:
    """Time gloo's own part: 2 ranks exchange two small tensors each way, as a ring step does."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store2", rank=rank, world_size=2)
    out, into = [torch.zeros(16, HEADS, DIM) for _ in range(2)], [torch.zeros(16, HEADS, DIM) for _ in range(2)]
    plan = build_plan(Documents([32]), Topology(1, 2), AttentionConfig(HEADS, HEADS, DIM))
    q, k, v = (torch.randn(16, HEADS, DIM) for _ in range(3))

    def exchange() -> None:
        works = [dist.isend(t, 1 - rank, tag=i) for i, t in enumerate(out)] + [
            dist.irecv(t, 1 - rank, tag=i) for i, t in enumerate(into)
        ]
        for work in works:
            work.wait()

    alone = once(exchange, 200)
    ring = once(lambda: context_parallel_attention(q, k, v, plan), 200)
    if rank == 0:
        Path(results).write_text(
            json.dumps(
                [
                    {"what": "gloo alone: K and V both ways, 2 ranks", "us": alone},
                    {"what": "engine, forward, ring of 2 (two steps, with gloo)", "us": ring},
                ]
            )
        )
    dist.destroy_process_group()


def main() -> None:
    parser = Arguments(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, help="default: 16384; with virtual ranks 65536")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--skip-packed", action="store_true")
    parser.add_argument("--json", type=Path, help="write all figures there")
    add_arguments(parser)
    args = parser.parse_args()
    if args.virtual_ranks:
        report(parser, args)
        return
    if args.device != "cpu":
        parser.error(f"--device {args.device}: only together with --virtual-ranks")
    args.tokens = args.tokens or 16384
    if args.ranks < 1 or HEADS % args.ranks:
        parser.error(
            f"--ranks is {args.ranks}; valid: a divisor of the {HEADS} heads, so that the ideal's shares are equal"
        )
    cases = {"one causal document": [args.tokens]}
    if not args.skip_packed:
        cases["packed documents"] = packed_lengths(args.tokens)
    figures = {"overhead": overhead()}
    figures["host"] = host_rows(HOST_RING, AttentionConfig(HEADS, HEADS, DIM), torch.device("cpu"))
    for row in (*figures["overhead"], *figures["host"]):
        print(f"{row['what']:{WIDTH}} {row['us']:9.0f} us", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(latency, (folder, f"{folder}/latency.json"), nprocs=2)
        figures["latency"] = json.loads(Path(folder, "latency.json").read_text())
        for row in figures["latency"]:
            print(f"{row['what']:{WIDTH}} {row['us']:9.0f} us", flush=True)
        mp.spawn(worker, (folder, args.ranks, cases, args.repeat), nprocs=args.ranks)
        figures["efficiency"] = json.loads(Path(folder, "rows.json").read_text())
    print(f"bf16, {HEADS} heads x {DIM}, {args.tokens} tokens, {args.ranks} ranks x 1 thread, medians of {args.repeat}")
    for row in figures["efficiency"]:
        print(
            f"{row['case']:22} {row['direction']:17} ideal {row['ideal_ms']:8.1f} ms, engine "
            f"{row['engine_ms']:8.1f} ms, "
            f"efficiency {row['efficiency']:.2f} (best over best {row['best_over_best']:.2f})"
        )
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
