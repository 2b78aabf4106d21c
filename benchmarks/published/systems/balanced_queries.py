"""MagiAttention: queries are balanced over ranks that have equal numbers of tokens."""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import replace

import numpy as np

from benchmarks.published.systems.even import Case
from benchmarks.published.timing import Candidate
from mindspeed_cp import AttentionConfig, Documents, Topology
from mindspeed_cp.algorithms.kv_fetch.needs import KvFetches, KvOwners, needed_tokens
from mindspeed_cp.algorithms.kv_fetch.programs import programs_of_rounds, staged
from mindspeed_cp.layout import TOKEN_SPAN, Layout, from_spans
from mindspeed_cp.plan import Plan
from mindspeed_cp.plan.parts import combine, select_layout
from mindspeed_cp.plan.problem import run_pairs

#: MagiAttention's chunks in tokens, the part of the ranks among which a chunk takes the nearest one, and stages; None:
#: keys cross to a node once. All are tried.
CHUNKS, NEAREST_OF, DEGREES = (512, 1024, 2048), (0.0, 0.25), (1, 2, 4, None)

#: Shards of queries that move, in tokens, and by how much of the mean a rank may be above it.
MOVED_TOKENS, MOVED_TOLERANCE, MOVED_DEGREES = 512, 0.05, (1, 2)


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


# MagiAttention's dispatch: the packed row cut into equal chunks, equally many for each rank, attention balanced.
#
# The areas of the mask that the queries of chunks see are very different; the largest go first, each to the rank with
# least area that has room for a chunk (a min-heap; `magi_attention/meta/solver/dispatch_solver.py`). Keys that a rank
# needs of others come in stages, each hidden by the computation of the one before::
#
#     step        0           1           2           3
#     computes    own         stage 0     stage 1     stage 2
#     receives    stage 0     stage 1     stage 2


#: Stages whose keys are in flight while those of one are computed.
IN_FLIGHT = 1


def cut_row(documents: Documents, cuts: np.ndarray) -> np.ndarray:
    """Cut the packed row at some tokens, int64 [cuts], and at the borders of documents; records of dtype TOKEN_SPAN,
    all of rank 0."""
    edges = np.unique(np.concatenate([[0], cuts, documents.offsets]))
    pieces = np.zeros(len(edges) - 1, TOKEN_SPAN)
    pieces["start"], pieces["stop"] = edges[:-1], edges[1:]
    pieces["doc"] = documents.document_of(edges[:-1])
    return pieces


def piece_pairs(pieces: np.ndarray, documents: Documents, attention: AttentionConfig) -> np.ndarray:
    """Count the visible (query, key) pairs of runs of queries, fp64 [pieces]."""
    return run_pairs(pieces["doc"], pieces["start"], pieces["stop"], documents, documents, attention)


def dispatched(
    documents: Documents, ranks: int, attention: AttentionConfig, size: int, nearest_of: float = 0.0
) -> Layout:
    """Return which rank has which chunks of the row.

    Args:
        documents: of the row.
        ranks: each gets as many chunks as the others, up to one.
        attention: its mask says what queries see.
        size: tokens of a chunk.
        nearest_of: part of the ranks, those with least area, of which a chunk takes the one that has most of the keys
            that it sees; 0: always the one with least area (`MinHeapDispatchAlg`, `ToppHeapDispatchAlg`).
    """
    pieces = cut_row(documents, np.arange(0, documents.tokens, size))
    chunk = pieces["start"] // size
    chunks = int(chunk[-1]) + 1 if len(chunk) else 0
    area = np.bincount(chunk, piece_pairs(pieces, documents, attention), chunks)
    rank_of = np.zeros(chunks, np.int64)
    room = np.full(ranks, -(-chunks // ranks))
    seen = np.zeros((ranks, len(documents) if nearest_of else 0), np.int64)  # keys of each document, from its first on
    heap = [(0.0, rank) for rank in range(ranks)]
    first = np.searchsorted(chunk, np.arange(chunks + 1))
    choices = max(1, math.ceil(nearest_of * ranks))
    for number in np.argsort(-area, kind="stable").tolist():
        free = [heapq.heappop(heap) for _ in range(min(choices, len(heap)))]
        taken = 0
        own = pieces[first[number] : first[number + 1]]
        keys = own["stop"] - documents.offsets[own["doc"]]
        if nearest_of:
            taken = int(np.argmax([np.minimum(seen[rank, own["doc"]], keys).sum() for _, rank in free]))
        load, rank = free.pop(taken)
        rank_of[number] = rank
        room[rank] -= 1
        if nearest_of:
            seen[rank, own["doc"]] = np.maximum(seen[rank, own["doc"]], keys)
        if room[rank]:
            free.append((load + float(area[number]), rank))
        for entry in free:
            heapq.heappush(heap, entry)
    pieces["rank"] = rank_of[chunk]
    return from_spans(documents, ranks, pieces)


def in_stages(queries: Layout, keys: Layout, attention: AttentionConfig, degree: int) -> KvFetches:
    """Return what ranks fetch of others, packed, in so many stages of about equally many tokens for each rank."""
    fetches = KvOwners.of(keys).fetch_list(needed_tokens(queries, keys, attention))
    fetches = fetches[fetches.src != fetches.dst]
    if not len(fetches):
        return fetches.packed()
    before = np.cumsum(fetches.rows) - fetches.rows
    first = np.searchsorted(fetches.dst, np.arange(keys.ranks + 1))
    total = np.bincount(fetches.dst, fetches.rows, keys.ranks).astype(np.int64)
    own = before - before[np.minimum(first, len(before) - 1)][fetches.dst]
    return replace(fetches, stage=own * degree // total[fetches.dst]).sorted_by_slot()


def chunked_plan(layout: Layout, topology: Topology, attention: AttentionConfig, degree: int | None) -> Plan:
    """Return the plan of a dispatch in which keys alone travel, each to every rank that needs it and to no other.

    Args:
        layout: which rank has which chunks.
        topology, attention: as for a ring.
        degree: stages; None: keys cross to a node once and are passed on there, as MagiAttention's own kernels do it,
            with this project's stages (:mod:`mindspeed_cp.algorithms.kv_fetch.programs`).
    """
    if degree is None:
        programs = staged(layout, layout, attention, topology, routing=True, prefetch=IN_FLIGHT)
    else:
        fetches = in_stages(layout, layout, attention, degree)
        programs = programs_of_rounds(layout, layout, attention, fetches, IN_FLIGHT)
    return Plan("MagiAttention", attention, topology, layout, layout, layout, layout, *programs)


# Attention computed elsewhere than where its tokens lie: runs of queries move, with keys that their ranks lack.
#
# Linear layers have equal runs of the packed row. A run of queries that is too much for its rank is sent to another
# one, which gets the keys that it lacks as well, and sends the outputs back::
#
#     layout (linear layers)     rank 0: tokens 0 .. 4095     rank 1: tokens 4096 .. 8191     ...
#     q_layout_compute           rank 0: 0 .. 4095, 7680 ..   rank 1: 4096 .. 7679            ...
#
# What MagiAttention calls communication of queries and outputs. A run of queries sees all its keys on one rank: partial
# outputs that several ranks would have to merge are no messages of a plan.


def equal_runs(documents: Documents, ranks: int) -> Layout:
    """Cut the packed row into one run for each rank, equal to one token."""
    cuts = np.arange(ranks + 1) * documents.tokens // ranks
    runs = cut_row(documents, cuts)
    runs["rank"] = np.searchsorted(cuts, runs["start"], "right") - 1
    return from_spans(documents, ranks, runs)


def shards_of(home: Layout, size: int) -> np.ndarray:
    """Cut the runs of a layout into shards of so many tokens at most, records of dtype TOKEN_SPAN."""
    spans = home.spans
    count = -(-(spans["stop"] - spans["start"]) // size)
    out = np.repeat(spans, count)
    number = np.arange(len(out)) - np.repeat(np.cumsum(count) - count, count)
    out["start"] += number * size
    out["stop"] = np.minimum(out["stop"], out["start"] + size)
    return out


def balanced_queries(home: Layout, attention: AttentionConfig, size: int, tolerance: float) -> Layout:
    """Move queries from ranks with more attention than the mean to ranks with less.

    Greedy, as MagiAttention's dynamic solver is described: busiest ranks first; each gives away, until it is within the
    tolerance, the shard with most attention for its bytes (queries and outputs, and keys that the other rank does not
    have or need yet), to a rank that is below the mean by as much.

    Args:
        home: where the tokens are.
        attention: its mask and heads.
        size: tokens of a shard.
        tolerance: part of the mean by which ranks may be above it.
    """
    shards, documents = shards_of(home, size), home.documents
    work = piece_pairs(shards, documents, attention)
    rank = shards["rank"].copy()
    load = np.bincount(rank, work, home.ranks)
    mean = float(load.mean())
    slack = tolerance * mean
    width = attention.head_dim + attention.head_dim_v
    query_row, key_row = attention.heads * width, attention.kv_heads * width
    # Keys of each document, from its first one on, that a rank needs anyway.
    needs = np.zeros((home.ranks, len(documents)), np.int64)
    keys = shards["stop"] - documents.offsets[shards["doc"]]
    np.maximum.at(needs, (rank, shards["doc"]), keys)
    cost = (shards["stop"] - shards["start"]) * query_row
    for source in np.argsort(-load, kind="stable").tolist():
        own = np.flatnonzero(rank == source)
        while load[source] > mean + slack:
            targets = np.flatnonzero(load < mean)
            missing = np.maximum(keys[own] - needs[np.ix_(targets, shards["doc"][own])], 0)  # [targets, own]
            fits = (work[own] <= mean + slack - load[targets, None]) & (work[own] <= load[source] - mean + slack)
            gain = np.where(fits, work[own] / (cost[own] + missing * key_row), 0.0)
            if not gain.size or gain.max() <= 0:
                break
            target, moved = np.unravel_index(int(gain.argmax()), gain.shape)
            shard, receiver = own[moved], targets[target]
            rank[shard] = receiver
            needs[receiver, shards["doc"][shard]] = max(needs[receiver, shards["doc"][shard]], keys[shard])
            load[source] -= work[shard]
            load[receiver] += work[shard]
            own = np.delete(own, moved)
    shards["rank"] = rank
    return from_spans(documents, home.ranks, shards)


def moved_plan(
    name: str, home: Layout, computed: Layout, topology: Topology, attention: AttentionConfig, degree: int
) -> Plan:
    """Return the plan in which queries are computed elsewhere. Documents of which all queries stay are a part of their
    own: its first step hides queries on their way out, its other steps outputs on their way back.

    Args:
        name: of the plan.
        home: layout of tokens.
        computed: layout of queries during the steps.
        topology, attention: as for a ring.
        degree: stages in which each rank gets the keys that it lacks.
    """
    moves = _moving_documents(home, computed)
    held = np.bincount(home.spans["doc"], minlength=len(moves)) > 0
    chosen = [docs for docs in (~moves, moves) if (docs & held).any()]
    if len(chosen) < 2:
        return _part(name, home, computed, topology, attention, degree)
    parts = [
        _part(name, select_layout(home, docs), select_layout(computed, docs), topology, attention, degree)
        for docs in chosen
    ]
    orders = (_around(parts[0], parts[1], direction) for direction in ("forward", "backward"))
    return combine(name, parts, *orders)


def _moving_documents(home: Layout, computed: Layout) -> np.ndarray:
    """Return True for documents of which another rank computes some queries, bool [documents]."""
    documents = home.documents
    edges = np.unique(np.concatenate([home.spans["start"], computed.spans["start"]]))
    rank = []
    for layout in (home, computed):
        order = np.argsort(layout.spans["start"])
        rank.append(layout.spans["rank"][order][np.searchsorted(layout.spans["start"][order], edges, "right") - 1])
    out = np.zeros(len(documents), bool)
    out[documents.document_of(edges[rank[0] != rank[1]])] = True
    return out


def _part(
    name: str, home: Layout, computed: Layout, topology: Topology, attention: AttentionConfig, degree: int
) -> Plan:
    computed = home if computed.same_as(home) else computed
    fetches = in_stages(computed, home, attention, degree)
    programs = programs_of_rounds(computed, home, attention, fetches, IN_FLIGHT)
    return Plan(name, attention, topology, home, home, computed, home, *programs)


def _around(outer: Plan, inner: Plan, direction: str) -> tuple[tuple[int, int], ...]:
    """Return the order: the first step of part 0, all of part 1, the other steps of part 0."""
    steps = [getattr(part, direction).steps for part in (outer, inner)]
    return (
        *((0, step) for step in range(min(1, steps[0]))),
        *((1, step) for step in range(steps[1])),
        *((0, step) for step in range(1, steps[0])),
    )
