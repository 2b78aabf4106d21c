"""How evenly each method assigns the documents of a global batch to data-parallel replicas, and how long it takes.

    python -m benchmarks.balance [--lengths wikipedia prolong lognormal] [--replicas 4 8 16] [--micro-batches 1 2 4 8]
                                 [--batches 20] [--context 32768] [--ranks 8] [--cluster a2] [--equal]
                                 [--only replicas pool] [--pool-contexts 32768 131072]

Global batches are drawn from the lengths, chunk_documents at the context and packed into rows as training packs them;
every method gets the same documents. Times are modelled (mindspeed_cp/data/balance.py); planning is measured, on
one core. Of every method: the slowest replica's time over the mean of its replicas, on average over the batches, and
at worst; then the slowest replica's time over that of `bound`, on average. No method can be faster than `bound`: the
mean of all documents' time, or the longest document.

Then rows of one pool against static replicas (benchmarks/pool.py), 8 replicas of one row each.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.arguments import Arguments, positive
from benchmarks.data import real_lengths_folder
from benchmarks.dispatch_baselines import first_fit, in_order, karmarkar_karp
from benchmarks.pool import Batch, PoolCase, print_pool_rows
from mindspeed_cp import AttentionConfig
from mindspeed_cp.cluster import LayerCost, load_cluster
from mindspeed_cp.data.balance import Assignment, DocumentCost, assign
from mindspeed_cp.data.lengths import load_lengths
from mindspeed_cp.data.stream import LOOKAHEAD, Packer

PARTS = ("replicas", "pool")
POOL_REPLICAS = 8
SETS = ("wikipedia", "prolong", "lognormal")
DRAWN = 200_000


def draw_set(name: str) -> tuple[np.ndarray, str]:
    """Draw the documents that batches are packed from, int64 [DRAWN], and say where they come from.

    The packer shuffles by the stream of default_rng(0): lengths need another one, or rows have them in their order.
    """
    random = np.random.default_rng([0, 0, 1])
    if name == "lognormal":  # Megatron's own set: mean 1024, sigma 1.5
        drawn = random.lognormal(np.log(1024) - 1.5**2 / 2, 1.5, DRAWN)
        return np.clip(drawn, 128, 8192).astype(np.int64), "mean 1024, sigma 1.5, clipped to 128 .. 8192"
    folder = real_lengths_folder(name)
    lengths = load_lengths(name, folder).draw(DRAWN, random).astype(np.int64)
    return lengths, "bins of configs/lengths" if folder is None else "real lengths"


def global_batches(lengths: np.ndarray, context: int, rows: int, batches: int) -> list[Batch]:
    """Draw global batches of so many packed rows: lengths of their documents, shuffled, and the row of each."""
    packer, random = Packer(lengths, context, 0, LOOKAHEAD), np.random.default_rng(0)
    result = []
    for _ in range(batches):
        drawn = [packer.next_row()["length"] for _ in range(rows)]
        order = random.permutation(sum(map(len, drawn)))
        row_of_document = np.repeat(np.arange(rows), [len(row) for row in drawn])
        result.append((np.concatenate(drawn)[order], row_of_document[order]))
    return result


def methods(equal: bool) -> dict[str, Callable[..., Assignment]]:
    """Return the methods by name.

    Each takes lengths, cost and replicas, and the keywords token_bound, per_micro_batch and rows.
    """

    def without_rows(method: Callable[..., Assignment], **more: Any) -> Callable[..., Assignment]:
        return lambda *given, rows, **options: method(*given, **options, **more)

    methods_by_name: dict[str, Callable[..., Assignment]] = {
        "in order": in_order,
        "first fit": without_rows(first_fit, decreasing=False),
        "first fit decr.": without_rows(first_fit),
        "Karmarkar-Karp": without_rows(karmarkar_karp),
        "time": assign,
    }
    if equal:
        methods_by_name["time, equal counts"] = partial(assign, equal_counts=True)
    return methods_by_name


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--lengths", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--replicas", type=positive, nargs="+", default=[4, 8, 16])
    parser.add_argument("--micro-batches", type=positive, nargs="+", default=[1, 2, 4, 8], help="rows for each replica")
    parser.add_argument("--batches", type=positive, default=20)
    parser.add_argument("--context", type=positive, default=32768, help="most tokens of a row, and of a document")
    parser.add_argument("--ranks", type=positive, default=8, help="context-parallel ranks of a replica")
    parser.add_argument("--cluster", default="a2")
    parser.add_argument("--equal", action="store_true", help="also with as many micro-batches on every replica")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--pool-contexts", type=positive, nargs="+", default=[32768, 131072], help="contexts of the pool"
    )
    args = parser.parse_args()
    if "replicas" in args.only:
        _print_replica_rows(args)

    def draw_batches(name: str, context: int, rows: int) -> list[Batch]:
        return global_batches(draw_set(name)[0], context, rows, args.batches)

    if "pool" in args.only:
        case = PoolCase(POOL_REPLICAS, args.ranks, args.context, args.cluster)
        print_pool_rows(args.lengths, draw_batches, args.pool_contexts, case)


def _cost(args: argparse.Namespace) -> DocumentCost:
    attention = AttentionConfig(heads=32, kv_heads=8, head_dim=128)
    layers = ((attention, LayerCost.for_attention(attention)),) * 32
    return DocumentCost(load_cluster(args.cluster), layers, args.ranks, whole_documents=True)


def _print_replica_rows(args: argparse.Namespace) -> None:
    cost = _cost(args)
    print(
        f"32 layers of 32 heads, 8 kv heads, width 4096; {args.ranks} context-parallel ranks of {args.cluster}; "
        f"context {args.context}; {args.batches} batches; times of replicas are modelled"
    )
    for name in args.lengths:
        lengths, source = draw_set(name)
        print(f"\n{name}: {source}\n{'replicas x rows':16}{'method':20}{'slowest/mean':>13}{'worst':>8}", end="")
        print(f"{'/ bound':>9}{'micro-batches':>15}{'planning, ms':>14}")
        for replicas in args.replicas:
            for micro_batches in args.micro_batches:
                _compare(lengths, cost, replicas, micro_batches, args)


def _compare(
    lengths: np.ndarray, cost: DocumentCost, replicas: int, micro_batches: int, args: argparse.Namespace
) -> None:
    batches = global_batches(lengths, args.context, replicas * micro_batches, args.batches)
    documents = np.mean([len(batch) for batch, _ in batches])
    label = f"{replicas} x {micro_batches}"
    for name, method in methods(args.equal).items():
        imbalance, over_bound, counts, planning_seconds = [], [], [], []
        for batch, rows in batches:
            start = time.perf_counter()
            assignment = method(
                batch, cost, replicas, token_bound=args.context, per_micro_batch=cost.per_micro_batch, rows=rows
            )
            planning_seconds.append(time.perf_counter() - start)
            seconds, fixed = cost(batch), cost.per_micro_batch
            least = -(-int(batch.sum()) // args.context) * fixed  # as few micro-batches as there can be
            bound = max((seconds.sum() + least) / replicas, seconds.max() + fixed)
            imbalance.append(assignment.seconds.max() / assignment.seconds.mean())
            over_bound.append(assignment.seconds.max() / bound)
            counts.append(sum(assignment.counts))
        print(
            f"{label:16}{name:20}{np.mean(imbalance):13.3f}{np.max(imbalance):8.3f}{np.mean(over_bound):9.3f}"
            f"{np.mean(counts):15.1f}{np.median(planning_seconds) * 1e3:14.1f}",
            flush=True,
        )
        label = ""
    print(f"{'':16}({documents:.0f} documents)")


if __name__ == "__main__":
    main()
