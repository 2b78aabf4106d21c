"""Systems that balance queries over ranks that have equal numbers of tokens: MagiAttention, and DistCA beyond that."""

from __future__ import annotations

import itertools

from benchmarks.published.chunks import chunked_plan, dispatched
from benchmarks.published.moved_queries import balanced_queries, balanced_tasks, equal_runs, moved_plan, tasks_plan
from benchmarks.published.systems.case import Case
from benchmarks.published.timing import Candidate
from mindspeed_cp import AttentionConfig, Documents, Topology

#: MagiAttention's chunks in tokens, the part of the ranks among which a chunk takes the nearest one, and stages; None:
#: keys cross to a node once. All are tried.
CHUNKS, NEAREST_OF, DEGREES = (512, 1024, 2048), (0.0, 0.25), (1, 2, 4, None)

#: Shards of queries that move, in tokens, and by how much of the mean a rank may be above it.
MOVED_TOKENS, MOVED_TOLERANCE, MOVED_DEGREES = 512, 0.05, (1, 2)

#: Of a rank's mean attention, that a task of DistCA has at most; all are tried.
TASK_SHARES = (0.15, 0.25, 0.35, 0.5, 0.7, 1.0)


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
    return [*candidates, *(_moved(case, degree) for degree in MOVED_DEGREES)]


def dist_ca(case: Case) -> list[Candidate]:
    """Build an upper comparator of DistCA (core-attention disaggregation, arXiv 2510.18121; hao-ai-lab/DistCA): linear
    layers on equal runs of the row, attention in tasks of 128 queries or more on any rank, balanced.

    That each pair of query and key is computed once is proved; the time is none of a plan. It is the work of the
    busiest rank: all bytes of q, k, v and out are hidden, as by its "ping" and "pong" halves of a batch at their best,
    which cost nothing here. So tasks need no regard to where their tokens are, where its scheduler weighs bytes."""
    return [_tasks(case, share) for share in TASK_SHARES]


def _tasks(case: Case, share: float) -> Candidate:
    """Return tasks of attention that have so much of a rank's mean at most."""
    tile_rows = case.cluster.tile_rows

    def make(documents: Documents, topology: Topology, attention: AttentionConfig) -> Candidate:
        tasks = balanced_tasks(documents, topology.ranks, attention, share, tile_rows)
        plan = tasks_plan(equal_runs(documents, topology.ranks), tasks, topology, attention)
        return Candidate(f"tasks of {share:g} of the mean", plan, free_transfers=True)

    return case.once(make, "DistCA", share, tile_rows)


def _chunks(case: Case, size: int, nearest_of: float, degree: int | None) -> Candidate:
    """Return a dispatch of chunks."""
    how = "keys once to a node" if degree is None else f"{degree} stages"
    label = f"chunks of {size}{', nearest' if nearest_of else ''}, {how}"

    def make(documents: Documents, topology: Topology, attention: AttentionConfig) -> Candidate:
        layout = dispatched(documents, topology.ranks, attention, size, nearest_of)
        return Candidate(label, chunked_plan(layout, topology, attention, degree))

    return case.once(make, label)


def _moved(case: Case, degree: int) -> Candidate:
    """Return a plan in which shards of queries move; where they go depends on how many heads queries and keys have."""
    label = f"queries move, {degree} stages"

    def make(documents: Documents, topology: Topology, attention: AttentionConfig) -> Candidate:
        home = equal_runs(documents, topology.ranks)
        computed = balanced_queries(home, attention, MOVED_TOKENS, MOVED_TOLERANCE)
        return Candidate(label, moved_plan("MagiAttention", home, computed, topology, attention, degree))

    return case.once(make, label, case.attention.heads, case.attention.kv_heads)
