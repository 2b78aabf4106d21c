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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan
from mindspeed_cp.algorithms.hierarchical import choose_placement
from mindspeed_cp.cluster import LayerCost
from mindspeed_cp.cluster.cluster import cluster_of
from mindspeed_cp.config.derived import TOKENS_OVER_MEAN
from mindspeed_cp.config.suite import TOKEN_CAP_OPTION
from mindspeed_cp.data.balance import DocumentCost
from mindspeed_cp.data.dispatch import Dispatcher, PoolModel
from mindspeed_cp.data.stream import DOC_CHUNK
from mindspeed_cp.plan import Plan
from mindspeed_cp.simulate.simulator import simulate_plan
from mindspeed_cp.simulate.tile_work import COARSE_SPANS

WAYS = ("in order", "time", "pool", "chosen")
Batch = tuple[np.ndarray, np.ndarray]  # lengths of the documents of a global batch, and the row of each


@dataclass(frozen=True)
class PoolCase:
    """Sizes of a comparison.

    Attributes:
        replicas, ranks: data-parallel replicas, and context-parallel ranks of each, a node or a part of one.
        context: most tokens of a row.
        cluster: preset.
    """

    replicas: int
    ranks: int
    context: int
    cluster: str

    @property
    def attention(self) -> AttentionConfig:
        """Attention of a layer."""
        return AttentionConfig(heads=32, kv_heads=8, head_dim=128)

    @property
    def options(self) -> dict[str, int]:
        """Options of the plans: those of a training."""
        cap = -(-int(TOKENS_OVER_MEAN * self.context) // self.ranks)
        return {TOKEN_CAP_OPTION: cap}

    def model(self) -> PoolModel:
        """Return the model by which a step is pooled."""
        node = Topology(1, self.ranks, self.cluster)
        pool = Topology(self.replicas, self.ranks, self.cluster)
        return PoolModel(node, pool, self.attention, LayerCost.for_attention(self.attention), options=self.options)


def compare_batch(
    case: PoolCase, lengths: np.ndarray, row_of_document: np.ndarray
) -> tuple[list[float], bool, float, float]:
    """Compute a global batch in all ways.

    Returns:
        Time of each of WAYS over perfect balance; whether data.balance: pool takes the pool; most tokens of a rank of
        the pool over the mean; seconds of dispatch with the choice, on one core.
    """
    model = case.model()
    cost = DocumentCost(cluster_of(model.replica), ((case.attention, model.layer),), case.ranks, whole_documents=True)
    order = np.argsort(row_of_document, kind="stable")
    lengths, row_of_document = lengths[order], row_of_document[order]
    rows = []
    for row in range(case.replicas):
        chunks = np.zeros(int((row_of_document == row).sum()), DOC_CHUNK)
        chunks["length"] = lengths[row_of_document == row]
        rows.append(chunks)
    none, time_alone, pool = (
        Dispatcher(balance, case.replicas, case.context, cost, cost.per_micro_batch, pool=model)
        for balance in ("none", "time", "pool")
    )
    times = []
    for dispatcher in (none, time_alone):
        groups = dispatcher(rows).micro_batches
        plans = [[_plan(case, lengths[numbers], model.replica) for numbers in group] for group in groups]
        times.append(max(sum(_simulated(case, plan) for plan in of_group) for of_group in plans))
    began = time.perf_counter()
    pooled = pool(rows).pooled
    seconds = time.perf_counter() - began
    plan = _plan(case, lengths, model.pool)
    times.append(_simulated(case, plan))
    times.append(times[2] if pooled else times[1])
    documents = Documents(lengths)
    perfect = choose_placement(documents, documents, model.pool, case.attention).bound
    counts = plan.layout.token_counts
    return [way / perfect for way in times], pooled, float(counts.max() / counts.mean()), seconds


def _plan(case: PoolCase, lengths: np.ndarray, topology: Topology) -> Plan:
    return build_plan(Documents(lengths), topology, case.attention, "hierarchical", **case.options)


def _simulated(case: PoolCase, plan: Plan) -> float:
    return simulate_plan(plan, cluster_of(plan.topology), case.model().layer, COARSE_SPANS).total


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
            sized = replace(case, context=context)
            results = [compare_batch(sized, *batch) for batch in draw_batches(name, context, case.replicas)]
            table, pooled, tokens, seconds = (np.array(column) for column in zip(*results, strict=True))
            cells = "".join(f"{way.mean():>8.3f} ({way.max():.3f})" for way in table.T)
            milliseconds = np.median(seconds) * 1e3
            line = f"{context:>8} {name:11}{cells}{pooled.mean():>8.0%}{tokens.max():>13.2f}{milliseconds:>14.0f}"
            print(line, flush=True)
