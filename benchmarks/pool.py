"""Rows of `benchmarks.balance`: one pool of all ranks against static replicas, with one packed row a replica.

The simulated time of a layer, forward and backward (mindspeed_cp.simulate), over that of perfect balance: all
documents' work in whole tiles, spread evenly over all ranks, nothing exposed. No way can be faster than that.

in order   row i on replica i
time       documents assigned to replicas by modelled time (data.balance: time)
pool       all documents over all ranks (data.balance: pool, where it is pooled)
chosen     what data.balance: pool takes in that step, by its model
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan
from mindspeed_cp.algorithms.hierarchical import choose_placement
from mindspeed_cp.cluster import LayerCost
from mindspeed_cp.cluster.cluster import cluster_of
from mindspeed_cp.config.derived import TOKENS_OVER_MEAN
from mindspeed_cp.config.suite import TOKEN_CAP_OPTION
from mindspeed_cp.data.balance import DocumentCost
from mindspeed_cp.data.dispatch import Dispatcher, PoolModel
from mindspeed_cp.data.packing import DOC_CHUNK
from mindspeed_cp.plan import Plan
from mindspeed_cp.simulate.simulator import simulate_plan
from mindspeed_cp.simulate.tile_work import COARSE_SPANS

WAYS = ("in order", "one stage", "time", "pool")
Batch = tuple[np.ndarray, np.ndarray]  # lengths of the documents of a global batch, and the row of each


def mean_and_worst(table: np.ndarray) -> str:
    """Return the cells of a row: mean and largest number of each column of [batches, ways]."""
    return "".join(f"{mean:>8.3f} ({worst:.3f})" for mean, worst in zip(table.mean(0), table.max(0), strict=True))


@dataclass(frozen=True)
class PoolCase:
    """Sizes of a comparison.

    Attributes:
        replicas, ranks: data-parallel replicas, and context-parallel ranks of each, a node or a part of one.
        context: most tokens of a row.
        cluster: preset.
        simulated_placements: option of the plans; None: its default.
    """

    replicas: int
    ranks: int
    context: int
    cluster: str
    simulated_placements: int | None

    @property
    def attention(self) -> AttentionConfig:
        """Attention of a layer."""
        return AttentionConfig(heads=32, kv_heads=8, head_dim=128)

    @property
    def options(self) -> dict[str, int]:
        """Options of the plans: those of a training."""
        cap = -(-int(TOKENS_OVER_MEAN * self.context) // self.ranks)
        options = {TOKEN_CAP_OPTION: cap, "simulated_placements": self.simulated_placements}
        return {name: value for name, value in options.items() if value is not None}

    def model(self) -> PoolModel:
        """Return the model by which a step is pooled."""
        node = Topology(1, self.ranks, self.cluster)
        pool = Topology(self.replicas, self.ranks, self.cluster)
        return PoolModel(node, pool, self.attention, LayerCost.for_attention(self.attention), options=self.options)


@dataclass(frozen=True)
class BatchResult:
    """Figures of a global batch.

    Attributes:
        over_perfect: time of each way over perfect balance, by WAYS.
        pooled: the pool was chosen.
        tokens: most tokens of a rank of the pool over the mean.
        seconds: dispatch with the choice, on one core.
    """

    over_perfect: tuple[float, ...]
    pooled: bool
    tokens: float
    seconds: float


@dataclass(frozen=True, eq=False)
class PlannedBatch:
    """A global batch and its plans.

    Attributes:
        lengths: of its documents, int64 [documents], row by row.
        replicas: of "in order" and of "time", the plans of each replica's micro-batches, one after the other.
        pool: plan of all documents over all ranks.
        pooled: the pool is what data.balance: pool takes.
        perfect: seconds of perfect balance.
        seconds: dispatch with the choice, on one core.
    """

    lengths: np.ndarray
    replicas: Mapping[str, Sequence[Sequence[Plan]]]
    pool: Plan
    pooled: bool
    perfect: float
    seconds: float


def plan_batch(case: PoolCase, lengths: np.ndarray, row_of_document: np.ndarray) -> PlannedBatch:
    """Plan a global batch on replicas and on the pool."""
    model = case.model()
    cost = DocumentCost(cluster_of(model.replica), ((case.attention, model.layer),), case.ranks, whole_documents=True)
    order = np.argsort(row_of_document, kind="stable")
    lengths, row_of_document = lengths[order], row_of_document[order]
    rows = []
    for row in range(case.replicas):
        chunks = np.zeros(int((row_of_document == row).sum()), DOC_CHUNK)
        chunks["length"] = lengths[row_of_document == row]
        rows.append(chunks)
    dispatchers = {
        balance: Dispatcher(balance, case.replicas, case.context, cost, cost.per_micro_batch, pool=model)
        for balance in ("none", "time", "pool")
    }
    static = {way: dispatchers[name](rows).micro_batches for way, name in zip(WAYS, ("none", "time"), strict=False)}
    began = time.perf_counter()
    batch = dispatchers["pool"](rows)
    seconds = time.perf_counter() - began
    replicas = {
        way: [[_plan(case, lengths[numbers], model.replica) for numbers in group] for group in groups]
        for way, groups in static.items()
    }
    documents = Documents(lengths)
    perfect = choose_placement(documents, documents, model.pool, case.attention).bound
    return PlannedBatch(lengths, replicas, _plan(case, lengths, model.pool), batch.pooled, perfect, seconds)


def compare_batch(case: PoolCase, lengths: np.ndarray, row_of_document: np.ndarray) -> BatchResult:
    """Compute a global batch in all ways."""
    batch = plan_batch(case, lengths, row_of_document)
    times = [simulated_step(case, batch.replicas[way]) for way in ("in order", "time")]
    times.append(simulated_step(case, [[batch.pool]]))
    times.append(times[2] if batch.pooled else times[1])
    counts = batch.pool.layout.token_counts
    over_perfect = tuple(seconds / batch.perfect for seconds in times)
    return BatchResult(over_perfect, batch.pooled, float(counts.max() / counts.mean()), batch.seconds)


def _plan(case: PoolCase, lengths: np.ndarray, topology: Topology) -> Plan:
    return build_plan(Documents(lengths), topology, case.attention, "hierarchical", **case.options)


def simulated_step(case: PoolCase, groups: Sequence[Sequence[Plan]]) -> float:
    """Return the seconds of the slowest group of ranks.

    Args:
        case: of the plans.
        groups: plans of each group's micro-batches, one after the other.
    """
    layer = case.model().layer
    return max(
        sum(simulate_plan(plan, cluster_of(plan.topology), layer, COARSE_SPANS).total for plan in plans)
        for plans in groups
    )


def print_pool_rows(
    names: Sequence[str],
    draw_batches: Callable[[str, int, int], list[Batch]],
    contexts: Sequence[int],
    case: PoolCase,
) -> None:
    """Print a row for each context and set of lengths.

    Args:
        names: sets of lengths.
        draw_batches: returns global batches of a set, for a context and a number of rows.
        contexts: most tokens of a row.
        case: all other sizes.
    """
    print(
        f"\npool of {case.replicas} replicas x {case.ranks} ranks of {case.cluster}, one row a replica: "
        "time over perfect balance, mean (worst)"
    )
    print(f"{'context':>8} {'lengths':11}" + "".join(f"{way:>16}" for way in WAYS), end="")
    print(f"{'pooled':>8}{'tokens/mean':>13}{'dispatch, ms':>14}")
    for context in contexts:
        for name in names:
            sized = PoolCase(case.replicas, case.ranks, context, case.cluster, case.simulated_placements)
            results = [compare_batch(sized, *batch) for batch in draw_batches(name, context, case.replicas)]
            cells = mean_and_worst(np.array([result.over_perfect for result in results]))
            pooled = np.mean([result.pooled for result in results])
            tokens = max(result.tokens for result in results)
            milliseconds = np.median([result.seconds for result in results]) * 1e3
            print(f"{context:>8} {name:11}{cells}{pooled:>8.0%}{tokens:>13.2f}{milliseconds:>14.0f}", flush=True)
