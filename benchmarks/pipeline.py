"""Rows of `benchmarks.balance`: a step of pipeline stages under the 1F1B schedule, over perfect balance.

Perfect balance is the work of all documents, evenly over all replicas and stages, without a bubble. Equal micro-batches
take (m + p - 1) / m times that, with p stages and m micro-batches on each replica. Times are modelled by document
(mindspeed_cp/data/document_cost.py) and by the schedule (mindspeed_cp/data/pipeline.py); of the pool every document is
taken to be spread evenly over its ranks.

in order   row i on replica i % replicas
one stage  assigned by time as for one stage, longest micro-batch first
time       assigned by time, packed and ordered for the schedule (data.balance: time)
pool       the micro-batches of the pool (data.balance: pool, where it is pooled)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from mindspeed_cp.data import DocumentCost, assign
from mindspeed_cp.data.pipeline import BACKWARD, pipeline_time
from mindspeed_cp.data.subpools import assign_to_pools

WAYS = ("in order", "one stage", "time", "pool")
Batch = tuple[np.ndarray, np.ndarray]  # lengths of the documents of a global batch, and the row of each


def step_seconds(costs: np.ndarray, micro_batches: Sequence[np.ndarray], fixed: float, stages: int) -> float:
    """Return when a replica's micro-batches end, in the order given."""
    times = [float(costs[documents].sum()) + fixed for documents in micro_batches]
    return pipeline_time(times, stages) / (stages * (1 + BACKWARD))


def compare_batch(
    cost: DocumentCost, batch: Batch, context: int, replicas: int, stages: int
) -> tuple[list[float], float]:
    """Return the times of a global batch in all ways over perfect balance, and the seconds of the dispatch by time."""
    lengths, rows = batch
    costs, fixed = cost(lengths), cost.per_micro_batch
    count = int(rows.max()) + 1
    perfect = (costs.sum() + count * fixed) / replicas / stages
    in_order = [[np.flatnonzero(rows == row) for row in range(first, count, replicas)] for first in range(replicas)]
    bound = {"token_bound": context, "per_micro_batch": fixed, "rows": rows}
    one_stage = assign(lengths, cost, replicas, **bound)
    began = time.perf_counter()
    staged = assign(lengths, cost, replicas, **bound, stages=stages)
    seconds = time.perf_counter() - began
    pool = assign_to_pools(
        lengths, costs, 1, replicas, context=context, per_micro_batch=fixed, rows=rows, stages=stages
    ).micro_batches[0]
    slowest = [
        max(step_seconds(costs, group, fixed, stages) for group in groups)
        for groups in (in_order, *([each.rows(r) for r in range(replicas)] for each in (one_stage, staged)))
    ]
    slowest.append(step_seconds(costs / replicas, pool, fixed, stages))
    return [seconds_of_way / perfect for seconds_of_way in slowest], seconds


def mean_and_worst(table: np.ndarray) -> str:
    """Return the cells of a row: mean and largest number of each column of [batches, ways]."""
    return "".join(f"{mean:>8.3f} ({worst:.3f})" for mean, worst in zip(table.mean(0), table.max(0), strict=True))


def print_pipeline_rows(
    names: Sequence[str],
    draw_batches: Callable[[str, int, int], list[Batch]],
    contexts: Sequence[int],
    cost: DocumentCost,
    replicas: int,
    stages: int,
) -> None:
    """Print a row for each context, set of lengths and number of rows.

    Args:
        names: sets of lengths.
        draw_batches: returns global batches of a set, for a context and a number of rows.
        contexts: most tokens of a row.
        cost: seconds of documents.
        replicas: data-parallel replicas.
        stages: pipeline stages of each.
    """
    print(f"\n{replicas} replicas of {stages} pipeline stages, 1F1B: time over perfect balance, mean (worst)")
    print(f"{'context':>8} {'lengths':11}{'rows':>5}{'equal':>8}" + "".join(f"{way:>16}" for way in WAYS), end="")
    print(f"{'dispatch, ms':>14}")
    for context in contexts:
        for name in names:
            for rows in (stages, 2 * stages):
                batches = draw_batches(name, context, replicas * rows)
                results = [compare_batch(cost, batch, context, replicas, stages) for batch in batches]
                cells = mean_and_worst(np.array([times for times, _ in results]))
                milliseconds = np.median([seconds for _, seconds in results]) * 1e3
                equal = (rows + stages - 1) / rows
                print(f"{context:>8} {name:11}{rows:>5}{equal:>8.3f}{cells}{milliseconds:>14.0f}", flush=True)
