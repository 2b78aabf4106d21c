"""Efficiency of the engine on this machine's CPU, and what it takes of the host's time.

    python -m benchmarks.engine [--tokens 16384] [--ranks 2] [--repeat 9] [--skip-packed] [--json FILE]
    python -m benchmarks.engine --device cuda --virtual-ranks 8     see benchmarks/virtual_ranks.py

Ideal: the same kernel once for every document on an equal share of the heads, on all ranks at once; no communication,
no merge, no conversion. Engine and ideal are timed in turn, barrier to barrier, and compared as a ratio of medians,
because the speed of shared machines drifts. Every rank runs one thread and keeps freed memory, as training on the CPU
does.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.arguments import Arguments, new_file, positive
from benchmarks.host import host_rows
from benchmarks.virtual_ranks import IdealWork, add_arguments, report
from mindspeed_cp import AttentionConfig, ConfigError, Documents, Plan, Topology, build_plan, context_parallel_attention
from mindspeed_cp.cli.lengths import draw_batches
from mindspeed_cp.engine import prepare

HEADS, DIM = 8, 64
HOST_RING = 8  # ranks of the ring whose host time is measured


class EngineWork:
    """The engine's forward and backward on this rank of a plan, in bf16."""

    def __init__(self, plan: Plan, rank: int) -> None:
        rows = int(plan.layout.token_counts[rank])
        tensors = (torch.randn(rows, HEADS, DIM, dtype=torch.bfloat16, requires_grad=i < 3) for i in range(4))
        self.plan, (*self.leaves, self.dout) = plan, tensors
        prepare(plan, rank, dtype=torch.bfloat16)

    def forward(self) -> torch.Tensor:
        """Run the forward."""
        return context_parallel_attention(*self.leaves, self.plan)

    def both(self) -> None:
        """Run forward and backward."""
        torch.autograd.grad(self.forward(), self.leaves, self.dout)


def barrier_to_barrier(run: Callable[[], object]) -> float:
    """Return the milliseconds until the slowest rank is done."""
    dist.barrier()
    start = time.perf_counter()
    run()
    dist.barrier()
    return (time.perf_counter() - start) * 1e3


def worker(rank: int, folder: str, ranks: int, cases: dict[str, list[int]], repeat: int) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    rows = []
    for title, lengths in cases.items():
        documents, share = Documents(lengths), AttentionConfig(HEADS // ranks, HEADS // ranks, DIM)
        inputs = [torch.randn(documents.tokens, share.heads, DIM, dtype=torch.bfloat16) for _ in range(3)]
        plan = build_plan(documents, Topology(1, ranks), AttentionConfig(HEADS, HEADS, DIM))
        works = {"ideal": IdealWork(documents, share, inputs), "engine": EngineWork(plan, rank)}
        for direction in ("forward", "both"):
            times: dict[str, list[float]] = {name: [] for name in works}
            for i in range(repeat + 1):
                for name, work in works.items():
                    milliseconds = barrier_to_barrier(getattr(work, direction))
                    if i:  # the first round warms up
                        times[name].append(milliseconds)
            medians = {name: statistics.median(t) for name, t in times.items()}
            rows.append(
                {
                    "case": title, "direction": direction,
                    "ideal_ms": medians["ideal"], "engine_ms": medians["engine"],
                    "efficiency": medians["ideal"] / medians["engine"],
                    "best_over_best": min(times["ideal"]) / min(times["engine"]),
                }
            )  # fmt: skip
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--tokens", type=positive, help="default: 16384; with virtual ranks 65536")
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--repeat", type=positive, default=9)
    parser.add_argument("--skip-packed", action="store_true")
    parser.add_argument("--json", type=new_file, help="write all figures there")
    add_arguments(parser)
    args = parser.parse_args()
    args.tokens = args.tokens or (65536 if args.virtual_ranks else 16384)
    cases = {"one causal document": [args.tokens]}
    try:
        if not args.skip_packed:
            cases[f"packed, {args.lengths}"] = draw_batches(args.lengths, args.tokens, 1, 0)[0].lengths.tolist()
        figures = report(parser, args, cases) if args.virtual_ranks else on_processes(parser, args, cases)
    except ConfigError as error:
        parser.error(str(error))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


def on_processes(parser: Arguments, args: Any, cases: dict[str, list[int]]) -> dict[str, Any]:
    """Measure and print the engine on processes of this CPU."""
    if args.device != "cpu":
        parser.error(f"--device {args.device}: only together with --virtual-ranks")
    if HEADS % args.ranks:
        parser.error(
            f"--ranks is {args.ranks}; valid: a divisor of the {HEADS} heads, so that the ideal's shares are equal"
        )
    figures = {"host": host_rows(HOST_RING, AttentionConfig(HEADS, HEADS, DIM), torch.device("cpu"))}
    for row in figures["host"]:
        print(f"{row['what']:65} {row['us']:9.0f} us", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (folder, args.ranks, cases, args.repeat), nprocs=args.ranks)
        figures["efficiency"] = json.loads(Path(folder, "rows.json").read_text())
    print(f"bf16, {HEADS} heads x {DIM}, {args.tokens} tokens, {args.ranks} ranks x 1 thread, medians of {args.repeat}")
    for row in figures["efficiency"]:
        print(
            f"{row['case']:22} {row['direction']:8} ideal {row['ideal_ms']:8.1f} ms, "
            f"engine {row['engine_ms']:8.1f} ms, efficiency {row['efficiency']:.2f} "
            f"(best over best {row['best_over_best']:.2f})"
        )
    return figures


if __name__ == "__main__":
    main()
