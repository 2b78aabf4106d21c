"""Systems that balance queries over ranks that have equal numbers of tokens: MagiAttention, and DistCA beyond that."""

from __future__ import annotations

import itertools
from dataclasses import replace

from benchmarks.published.chunks import chunked_plan, dispatched
from benchmarks.published.moved_queries import balanced_queries, equal_runs, moved_plan
from benchmarks.published.systems.case import Case
from benchmarks.published.timing import Candidate
from mindspeed_cp import AttentionConfig, Documents, Topology

#: MagiAttention's chunks in tokens, the part of the ranks among which a chunk takes the nearest one, and stages; None:
#: keys cross to a node once. All are tried.
CHUNKS, NEAREST_OF, DEGREES = (512, 1024, 2048), (0.0, 0.25), (1, 2, 4, None)

#: Shards of queries that move, in tokens, and by how much of the mean a rank may be above it.
MOVED_TOKENS, MOVED_TOLERANCE, MOVED_DEGREES = 512, 0.05, (1, 2)

#: The same for DistCA; all are tried.
TASK_TOKENS, TASK_TOLERANCES = (128, 512, 1024), (0.0, 0.05)


def magi_attention(case: Case) -> list[Candidate]:
    """Build MagiAttention (SandAI-org/MagiAttention 1.1: its dispatch and overlap solvers and its pages on them). Equal
    chunks of the packed row, equally many a rank, areas balanced by a min-heap; keys are sent to the ranks that need
    them and to no other, in stages. Several sizes of chunks, with and without regard to keys that a rank has already,
    and several numbers of stages are tried.

    Its experimental solver leaves tokens in runs of the row and moves queries and outputs too: here whole shards of
    queries go to ranks with less attention. It may also compute the keys of a query on several ranks and sum partial
    outputs; no plan of this project can say that, and it is left out. Assumed in its favour: chunks may have any size
    (the last one is shorter), keys cross to a node once where that is faster, permutations before and after its
    collectives cost nothing, outputs come back while other documents are computed."""
    candidates = []
    for size, nearest_of in itertools.product(CHUNKS, NEAREST_OF):
        if size * case.topology.ranks > case.documents.tokens:
            continue
        for degree in DEGREES:
            if degree is None and case.topology.nodes == 1:
                continue
            candidates.append(_chunks(case, size, nearest_of, degree))
    if not candidates:  # a short row
        candidates = [_chunks(case, max(1, case.documents.tokens // case.topology.ranks), 0.0, 1)]
    for degree in MOVED_DEGREES:
        candidates.append(_moved(case, "MagiAttention", MOVED_TOKENS, MOVED_TOLERANCE, degree))
    return candidates


def dist_ca(case: Case) -> list[Candidate]:
    """Build an upper comparator of DistCA (core-attention disaggregation, arXiv 2510.18121; hao-ai-lab/DistCA): linear
    layers on equal runs of the row, attention in shards of queries on any rank, balanced by a greedy scheduler.

    That each pair of query and key is computed once is proved; the time is none of a plan. It is the work of the
    busiest rank: all bytes of q, k, v and out are hidden, as by its "ping" and "pong" halves of a batch at their best,
    which cost nothing here. Shards are of 128 tokens and of more, since short tiles are slow in this project's model of
    kernels; several tolerances of the scheduler are tried."""
    candidates = [
        _moved(case, "DistCA", size, tolerance, degree=1)
        for size, tolerance in itertools.product(TASK_TOKENS, TASK_TOLERANCES)
    ]
    return [replace(candidate, free_transfers=True) for candidate in candidates]


def _chunks(case: Case, size: int, nearest_of: float, degree: int | None) -> Candidate:
    """Return a dispatch of chunks."""
    how = "keys once to a node" if degree is None else f"{degree} stages"
    label = f"chunks of {size}{', nearest' if nearest_of else ''}, {how}"

    def make(documents: Documents, topology: Topology, attention: AttentionConfig) -> Candidate:
        layout = dispatched(documents, topology.ranks, attention, size, nearest_of)
        return Candidate(label, chunked_plan(layout, topology, attention, degree))

    return case.once(make, label)


def _moved(case: Case, name: str, size: int, tolerance: float, degree: int) -> Candidate:
    """Return a plan in which shards of queries move. Where they go depends on how slow short tiles are, and on how many
    heads queries and keys have."""
    label = f"queries move, shards of {size}, {tolerance:g} above the mean, {degree} stages"
    tile_rows = case.cluster.tile_rows

    def make(documents: Documents, topology: Topology, attention: AttentionConfig) -> Candidate:
        home = equal_runs(documents, topology.ranks)
        computed = balanced_queries(home, attention, size, tolerance, tile_rows)
        plan = moved_plan(name, home, computed, topology, attention, degree)
        return Candidate(label, plan)

    return case.once(make, name, label, case.attention.heads, case.attention.kv_heads, tile_rows)
