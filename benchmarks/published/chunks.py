"""MagiAttention's dispatch: the packed row cut into equal chunks, equally many for each rank, attention balanced.

The areas of the mask that the queries of chunks see are very different; the largest go first, each to the rank with
least area that has room for a chunk (a min-heap; `magi_attention/meta/solver/dispatch_solver.py`). Keys that a rank
needs of others come in stages, each hidden by the computation of the one before::

    step        0           1           2           3
    computes    own         stage 0     stage 1     stage 2
    receives    stage 0     stage 1     stage 2
"""

from __future__ import annotations

import heapq
import math
from dataclasses import replace

import numpy as np

from mindspeed_cp import AttentionConfig, Documents, Topology
from mindspeed_cp.algorithms.kv_fetch.needs import KvFetches, KvOwners, needed_tokens
from mindspeed_cp.algorithms.kv_fetch.programs import programs_of_rounds, staged
from mindspeed_cp.layout import TOKEN_SPAN, Layout, from_spans
from mindspeed_cp.plan import Plan
from mindspeed_cp.plan.pairs import run_pairs

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
