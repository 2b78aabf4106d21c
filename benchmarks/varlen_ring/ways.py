"""Ways to run a global batch: an order of documents over replicas, and a plan for each micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.varlen_ring.mixes import sorted_rows
from mindspeed_cp import AttentionConfig, Documents, Plan, Topology, build_plan
from mindspeed_cp.algorithms.placement.estimate import PlacementModel
from mindspeed_cp.algorithms.ring import ring_programs
from mindspeed_cp.cluster import LayerCost, load_cluster
from mindspeed_cp.cluster.cluster import cluster_of
from mindspeed_cp.config.derived import TOKENS_OVER_MEAN
from mindspeed_cp.config.suite import TOKEN_CAP_OPTION
from mindspeed_cp.data import DocumentCost, assign
from mindspeed_cp.layout import Layout
from mindspeed_cp.layout.layout import TOKEN_SPAN
from mindspeed_cp.layout.sharding import from_spans, row_zigzag, zigzag
from mindspeed_cp.simulate.simulator import simulate_plan
from mindspeed_cp.simulate.tile_work import COARSE_SPANS

#: Softmax attention of MiniMax-Text-01, and the widths of its layers: of 32 experts a token goes to two.
ATTENTION = AttentionConfig(heads=64, kv_heads=8, head_dim=128)
HIDDEN, FFN = 6144, 2 * 9216
LAYER = LayerCost.from_sizes(HIDDEN, FFN, ATTENTION.heads, ATTENTION.kv_heads, ATTENTION.head_dim, ATTENTION.head_dim)


@dataclass(frozen=True)
class Setting:
    """Sizes of a comparison.

    Attributes:
        cluster: preset.
        replicas, ranks: data-parallel replicas, and context-parallel ranks of each, a node or a part of one.
        rows: packed rows of a replica in a global batch.
        context: most tokens of a row.
    """

    cluster: str
    replicas: int
    ranks: int
    rows: int
    context: int

    @property
    def replica(self) -> Topology:
        """The ranks of a replica."""
        return Topology(1, self.ranks, self.cluster)

    @property
    def pool(self) -> Topology:
        """The ranks of all replicas: as many replicas on a node as it has room for."""
        per_node = max(1, min(self.replicas, load_cluster(self.cluster).ranks_per_node // self.ranks))
        while self.replicas % per_node:
            per_node -= 1
        return Topology(self.replicas // per_node, self.ranks * per_node, self.cluster)

    @property
    def options(self) -> dict[str, int]:
        """Options of hierarchical plans: those of a training of these widths."""
        cap = -(-int(TOKENS_OVER_MEAN * self.context) // self.ranks)
        return {TOKEN_CAP_OPTION: cap, "hidden_size": HIDDEN, "ffn_hidden_size": FFN}

    @property
    def cost(self) -> DocumentCost:
        """Modelled seconds of documents on a replica."""
        return DocumentCost(cluster_of(self.replica), ((ATTENTION, LAYER),), self.ranks, whole_documents=True)


def row_slices(documents: Documents, ranks: int) -> Layout:
    """Cut the packed row into equal slices, wherever documents end; rank i takes slice i."""
    cuts = np.arange(ranks + 1) * documents.tokens // ranks
    edges = np.unique(np.concatenate([cuts, documents.offsets]))
    start, stop = edges[:-1], edges[1:]
    spans = np.empty(len(start), TOKEN_SPAN)
    spans["rank"], spans["doc"] = np.searchsorted(cuts, start, "right") - 1, documents.document_of(start)
    spans["start"], spans["stop"] = start, stop
    return from_spans(documents, ranks, spans)


def ring_of(layout: Callable[[Documents, int], Layout]) -> Callable[[Documents, Setting, Topology], Plan]:
    """Return a function that builds a ring over documents that are laid out so."""

    def build(documents: Documents, setting: Setting, topology: Topology) -> Plan:
        layouts = (layout(documents, topology.ranks),) * 2
        programs = ring_programs(*layouts, ATTENTION)
        return Plan("ring", ATTENTION, topology, *layouts, *layouts, *programs)

    return build


def hierarchical(documents: Documents, setting: Setting, topology: Topology) -> Plan:
    """Build this project's plan."""
    return build_plan(documents, topology, ATTENTION, "hierarchical", **setting.options)


#: Micro-batches of each replica, each the lengths of its documents, int64 [documents].
MicroBatches = list[list[np.ndarray]]


def in_order(rows: Sequence[np.ndarray], setting: Setting) -> MicroBatches:
    """Take rows in turn, as they were packed."""
    return [list(rows[replica :: setting.replicas]) for replica in range(setting.replicas)]


def by_length(rows: Sequence[np.ndarray], setting: Setting) -> MicroBatches:
    """Sort the documents of the global batch by length before they are packed; all replicas get neighbours at the same
    time, and a replica without a row waits."""
    return in_order(sorted_rows(rows, setting.context), setting)


def by_time(rows: Sequence[np.ndarray], setting: Setting) -> MicroBatches:
    """Assign documents to replicas by modelled time (data.balance: time), as many micro-batches to each."""
    lengths = np.concatenate(rows)
    row_of_document = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    cost = setting.cost
    bound = {"token_bound": setting.context, "per_micro_batch": cost.per_micro_batch, "equal_counts": True}
    assignment = assign(lengths, cost, setting.replicas, rows=row_of_document, **bound)
    return [[lengths[numbers] for numbers in assignment.rows(replica)] for replica in range(setting.replicas)]


def as_pool(rows: Sequence[np.ndarray], setting: Setting) -> MicroBatches:
    """Put all documents into micro-batches of all ranks, equal in time (data.balance: pool)."""
    lengths, cost = np.concatenate(rows), setting.cost
    row_of_document = np.repeat(np.arange(len(rows)) // setting.replicas, [len(row) for row in rows])
    bound = {"token_bound": setting.context * setting.replicas, "per_micro_batch": cost.per_micro_batch}
    assignment = assign(lengths, cost(lengths) / setting.replicas, 1, rows=row_of_document, **bound)
    return [[lengths[numbers] for numbers in assignment.rows(0)]]


@dataclass(frozen=True)
class Way:
    """How a global batch runs.

    Attributes:
        assign: which documents make which micro-batch of which replica.
        build: the plan of a micro-batch.
        is_pool: all ranks compute every micro-batch together.
    """

    assign: Callable[[Sequence[np.ndarray], Setting], MicroBatches]
    build: Callable[[Documents, Setting, Topology], Plan]
    is_pool: bool = False


BASE = "varlen ring"

#: By the name in the tables.
WAYS = {
    BASE: Way(in_order, ring_of(row_slices)),
    "sorted": Way(by_length, ring_of(row_slices)),
    "zig-zag of rows": Way(in_order, ring_of(row_zigzag)),
    "zig-zag of documents": Way(in_order, ring_of(zigzag)),
    "sorted, zig-zag": Way(by_length, ring_of(zigzag)),
    "by time, zig-zag": Way(by_time, ring_of(zigzag)),
    "hierarchical": Way(in_order, hierarchical),
    "by time, hierarchical": Way(by_time, hierarchical),
    "pool": Way(as_pool, hierarchical, is_pool=True),
}


@dataclass(frozen=True, eq=False)
class Figures:
    """What a way makes of a global batch.

    Attributes:
        step: seconds of the slowest replica, all micro-batches of one layer.
        experts: seconds where replicas wait for each other in every micro-batch.
        replicas: slowest replica over their mean.
        inside: busiest rank over the mean of its micro-batch, mean of the micro-batches.
    """

    step: float
    experts: float
    replicas: float
    inside: float


def run(way: Way, rows: Sequence[np.ndarray], setting: Setting) -> Figures:
    """Simulate a global batch.

    Args:
        way: how it runs.
        rows: lengths of the documents of each packed row, int64.
        setting: where.
    """
    topology = setting.pool if way.is_pool else setting.replica
    assigned = way.assign(rows, setting)
    count = max(map(len, assigned))
    seconds, unevenness = np.zeros((len(assigned), count)), []
    for replica, micro_batches in enumerate(assigned):
        for number, lengths in enumerate(micro_batches):
            plan = way.build(Documents(lengths), setting, topology)
            timeline = simulate_plan(plan, cluster_of(topology), LAYER, COARSE_SPANS)
            busy = timeline.compute + timeline.linear
            seconds[replica, number] = timeline.total
            unevenness.append(float(busy.max() / busy.mean()))
    totals = seconds.sum(1)
    return Figures(
        float(totals.max()),
        float(seconds.max(0).sum()),
        float(totals.max() / totals.mean()),
        float(np.mean(unevenness)),
    )


def perfect_seconds(rows: Sequence[np.ndarray], setting: Setting) -> float:
    """Return the seconds of perfect balance: all documents' work in whole tiles, even over all ranks, nothing
    exposed."""
    documents, pool = Documents(np.concatenate(rows)), setting.pool
    return PlacementModel(documents, documents, pool, ATTENTION, cluster_of(pool), LAYER, routing=True).bound
