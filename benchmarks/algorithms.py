"""Every algorithm against the ideal, on this machine's CPU, and the bytes that it sends.

    python -m benchmarks.algorithms [--ranks 2 4] [--only ring direct] [--lengths FILE.npz] [--repeat 3] [--json FILE]

Two batches of 32,768 tokens: one causal document; and a packed row of documents, whose lengths are drawn from the array
`lengths` of an .npz file, or else made up (lognormal). bf16, 8 heads x 64, one thread for each rank.

Ideal: the same kernel once for every document on an equal share of the heads, on all ranks at once; no communication,
no merge, no conversion. All are timed in turn, barrier to barrier, forward and backward apart, and compared as a ratio
of medians, because the speed of shared machines drifts. With more ranks than cores, ranks share cores in the ideal as
well, and while one waits another one computes: the ratio then shows what an algorithm does beside its kernels, not how
well it hides transfers.

Bytes are counted where they are handed to torch.distributed. Unless they are just those of the plan, the program fails.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.runs import DIM, HEADS, ideal, packed_lengths, planned, timed
from benchmarks.wire import count_sent_bytes
from mindspeed_cp import AttentionConfig, Documents, Plan, Topology, build_plan
from mindspeed_cp.ops.host_memory import keep_freed_memory
from mindspeed_cp.plan import traffic

TOKENS = 32768

DIRECTIONS = ("forward", "both")

VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "ring": ("ring", {}),
    "double_ring": ("double_ring", {}),
    "ulysses": ("ulysses", {}),
    "hybrid": ("hybrid", {}),
    "all_gather": ("all_gather", {}),
    "direct": ("direct", {}),
    "ring, balanced": ("ring", {"layout": "balanced"}),
    "all_gather, balanced": ("all_gather", {"layout": "balanced"}),
    "direct, balanced": ("direct", {"layout": "balanced"}),
}


def row_of(path: Path, tokens: int) -> list[int]:
    """Draw documents from a file of lengths until the row is full; the last one is cut."""
    lengths = np.load(path)["lengths"].astype(np.int64)
    order = np.random.default_rng(0).permutation(len(lengths))
    row: list[int] = []
    for length in lengths[order].tolist():
        row.append(min(length, tokens - sum(row)))
        if sum(row) == tokens:
            return row
    raise SystemExit(f"--lengths: {path} has {sum(row)} tokens, less than a row of {tokens}")


def plan_of(name: str, lengths: list[int], ranks: int) -> Plan:
    """Return the plan of a variant; 4 ranks and more are two nodes, so that double_ring and hybrid have two levels."""
    algorithm, options = VARIANTS[name]
    nodes = 2 if ranks > 2 and ranks % 2 == 0 else 1
    attention = AttentionConfig(HEADS, HEADS, DIM)
    return build_plan(Documents(lengths), Topology(nodes, ranks // nodes), attention, algorithm, **options)


def same(a: Plan, b: Plan) -> bool:
    """Return True if both do the same, as algorithms do where their ranks, or their documents, leave no choice."""

    def parts(plan: Plan) -> list[np.ndarray]:
        programs = (plan.forward, plan.backward)
        tables = [x for p in programs for x in (p.contents, p.spans, p.fetch.items, p.fetch.runs, p.reduce.items)]
        return [plan.layout.spans, plan.q_layout_compute.spans, *tables]

    heads = [plan.q_layout_compute.heads is None for plan in (a, b)]
    return heads[0] == heads[1] and all(np.array_equal(x, y) for x, y in zip(parts(a), parts(b), strict=True))


def worker(rank: int, folder: str, ranks: int, lengths: list[int], names: list[str], repeat: int) -> None:
    keep_freed_memory()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    plans = {name: plan_of(name, lengths, ranks) for name in names}
    twins = {name: next(candidate for candidate in names if same(plans[name], plans[candidate])) for name in names}
    runs = {name: planned(plans[name], rank) for name in names if twins[name] == name} | {
        "ideal": ideal(lengths, ranks)
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    sent: dict[str, int] = {}
    for i in range(repeat + 1):
        for name, run in runs.items():
            with count_sent_bytes() as bytes_sent:
                milliseconds = timed(run)
            sent[name] = sum(bytes_sent.values())
            if i:  # the first round warms up
                times[name].append(milliseconds)
    sent_by_rank: list[Any] = [None] * ranks
    dist.all_gather_object(sent_by_rank, sent)
    if rank == 0:
        rows = [
            row(name, twins[name], plans[name], times, [sent_of_rank[twins[name]] for sent_of_rank in sent_by_rank])
            for name in names
        ]
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def row(
    name: str, twin: str, plan: Plan, times: dict[str, list[tuple[float, float]]], sent: list[int]
) -> dict[str, Any]:
    """Return the figures of one variant."""
    out: dict[str, Any] = {"algorithm": name, "as": twin, "sent": sent, "planned": traffic(plan, 2)["total"].tolist()}
    for i, direction in enumerate(DIRECTIONS):
        own, best = [t[i] for t in times[twin]], [t[i] for t in times["ideal"]]
        out[direction] = {
            "ms": statistics.median(own),
            "best_ms": min(own),
            "ideal_ms": statistics.median(best),
            "ideal_best_ms": min(best),
            "efficiency": statistics.median(best) / statistics.median(own),
            "best_over_best": min(best) / min(own),
        }
    work = plan.work().sum(1)
    out["imbalance"] = float(work.max() / work.mean())
    return out


def measure(ranks: int, lengths: list[int], names: list[str], repeat: int) -> list[dict[str, Any]]:
    """Return the figures of every variant, on processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (folder, ranks, lengths, names, repeat), nprocs=ranks)
        rows: list[dict[str, Any]] = json.loads(Path(folder, "rows.json").read_text())
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table of one batch and number of ranks."""
    print(f"{'':22}{'forward':>24}{'forward + backward':>24}{'busiest rank':>14}{'MB sent':>10}{'planned':>10}")
    ideals = [f"{row['ideal_ms']:.0f} ms, best {row['ideal_best_ms']:.0f} ms" for row in map(rows[0].get, DIRECTIONS)]
    print(f"{'ideal':22}{ideals[0]:>24}{ideals[1]:>24}")
    for row in rows:
        cells = [
            f"{figures['ms']:.0f} ms {figures['efficiency']:.2f} ({figures['best_over_best']:.2f})"
            for figures in map(row.get, DIRECTIONS)
        ]
        megabytes = [f"{sum(row[name]) / 1e6:10.3f}" for name in ("sent", "planned")]
        twin = f"  as {row['as']}" if row["as"] != row["algorithm"] else ""
        busiest = f"{row['imbalance']:.2f}"
        print(f"{row['algorithm']:22}{cells[0]:>24}{cells[1]:>24}{busiest:>14}{megabytes[0]}{megabytes[1]}{twin}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--only", nargs="+", choices=VARIANTS, metavar="ALGORITHM", default=list(VARIANTS))
    parser.add_argument("--batches", nargs="+", choices=("one", "packed"), default=["one", "packed"])
    parser.add_argument("--lengths", type=Path, help=".npz with an array `lengths` of document lengths")
    parser.add_argument(
        "--repeat", type=int, default=3, help="rounds of the long document; packed rows take three times as many"
    )
    parser.add_argument("--json", type=Path, help="write all figures there")
    args = parser.parse_args()
    for ranks in args.ranks:
        if ranks < 1 or HEADS % ranks:
            parser.error(
                f"--ranks has {ranks}; valid: divisors of the {HEADS} heads, so that the ideal's shares are equal"
            )
    packed = row_of(args.lengths, args.tokens) if args.lengths else packed_lengths(args.tokens)
    drawn = f"drawn from {args.lengths.name}" if args.lengths else "with made-up lognormal lengths"
    title = f"{len(packed)} documents {drawn}, {min(packed)} to {max(packed)} tokens"
    batches = {
        "one": ("one causal document", [args.tokens], [n for n in args.only if "balanced" not in n], args.repeat),
        "packed": (title, packed, args.only, 3 * args.repeat),
    }
    figures, wrong = [], []
    for ranks in args.ranks:
        for title, lengths, names, repeat in (batches[name] for name in args.batches):
            if not names:
                continue
            print(
                f"\n{args.tokens} tokens: {title}; bf16, {HEADS} heads x {DIM}; {ranks} ranks x 1 thread on "
                f"{os.cpu_count()} cores; medians of {repeat} (best over best)",
                flush=True,
            )
            rows = measure(ranks, lengths, names, repeat)
            show(rows)
            figures.append({"batch": title, "lengths": lengths, "ranks": ranks, "rows": rows})
            wrong += [(ranks, title, row["algorithm"]) for row in rows if row["sent"] != row["planned"]]
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    for ranks, title, name in wrong:
        print(f"{name}, {ranks} ranks, {title}: the bytes sent are not those of the plan", file=sys.stderr)
    if wrong:
        sys.exit(1)
    print("\nEvery rank sent just the bytes that its plan says.")


if __name__ == "__main__":
    main()
