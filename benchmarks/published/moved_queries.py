"""Attention computed elsewhere than where its tokens lie: runs of queries move, with keys that their ranks lack.

Linear layers have equal runs of the packed row. A run of queries that is too much for its rank is sent to another one,
which gets the keys that it lacks as well, and sends the outputs back::

    layout (linear layers)     rank 0: tokens 0 .. 4095     rank 1: tokens 4096 .. 8191     ...
    q_layout_compute           rank 0: 0 .. 4095, 7680 ..   rank 1: 4096 .. 7679            ...

What MagiAttention calls communication of queries and outputs, and DistCA its disaggregated core attention. A run of
queries sees all its keys on one rank: partial outputs that several ranks would have to merge are no messages of a plan.
"""

from __future__ import annotations

import math

import numpy as np

from benchmarks.published.chunks import IN_FLIGHT, cut_row, in_stages, piece_pairs
from mindspeed_cp import AttentionConfig, Documents, Topology
from mindspeed_cp.algorithms.kv_fetch.programs import programs_of_rounds
from mindspeed_cp.layout import Layout, assign_to_least_loaded, from_spans
from mindspeed_cp.plan import Plan
from mindspeed_cp.plan.pairs import visible_pairs
from mindspeed_cp.plan.parts import combine, select_layout

#: Tokens that a task's borders are multiples of: blocks of kernels.
TASK_TOKENS = 128


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


def balanced_tasks(
    documents: Documents, ranks: int, attention: AttentionConfig, share: float, tile_rows: float
) -> Layout:
    """Cut the attention of documents into tasks for any ranks: runs of queries with about equal work, so many of a
    document that none is above a share of the mean; largest first, each to the rank with least (Graham 1969).

    Args:
        documents, attention: of the row.
        ranks: how many there are.
        share: of a rank's mean work, that a task has at most, unless it has only `TASK_TOKENS`.
        tile_rows: attention of n queries takes 1 + tile_rows / n of its pairs (:class:`mindspeed_cp.cluster.Cluster`).
    """
    whole = documents.offsets[:-1]
    mean = float(visible_pairs(documents.lengths, documents.lengths, attention).sum()) / ranks
    cuts = []
    for first, length in zip(whole.tolist(), documents.lengths.tolist(), strict=True):
        tasks = min(max(1, math.ceil(length**2 / 2 / max(share * mean, 1.0))), -(-length // TASK_TOKENS))
        blocks = length / TASK_TOKENS * np.sqrt(np.arange(1, tasks) / max(tasks, 1))  # of equal work if causal
        cuts.append(first + np.minimum(np.round(blocks).astype(np.int64) * TASK_TOKENS, length))
    runs = cut_row(documents, np.concatenate([np.zeros(0, np.int64), *cuts]))
    rows = runs["stop"] - runs["start"]
    work = piece_pairs(runs, documents, attention) * (1 + tile_rows / np.maximum(rows, 1))
    order = np.argsort(-work, kind="stable")
    runs["rank"][order] = assign_to_least_loaded(work[order].tolist(), [0.0] * ranks)
    return from_spans(documents, ranks, runs)


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


def tasks_plan(home: Layout, tasks: Layout, topology: Topology, attention: AttentionConfig) -> Plan:
    """Return the plan in which the queries, keys and values of a task go to its rank, which fetches all other keys that
    it sees from their tasks' ranks.

    Args:
        home: layout of tokens.
        tasks: layout of attention.
        topology, attention: as for a ring.
    """
    programs = programs_of_rounds(tasks, tasks, attention, in_stages(tasks, tasks, attention, 1), IN_FLIGHT)
    return Plan("tasks", attention, topology, home, home, tasks, tasks, *programs)


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
