"""Systems that keep each document whole in a group of ranks that split heads."""

from __future__ import annotations

import heapq

import numpy as np

from benchmarks.published.systems.even import Case
from benchmarks.published.timing import Candidate
from mindspeed_cp import AttentionConfig, Documents, Topology
from mindspeed_cp.algorithms.head_groups import head_groups_part
from mindspeed_cp.cluster import Cluster, ComputeCost
from mindspeed_cp.cluster.compute import ATTENTION_BACKWARD, LINEAR_BACKWARD
from mindspeed_cp.layout import zigzag
from mindspeed_cp.plan import Plan
from mindspeed_cp.plan.parts import combine, select_documents
from mindspeed_cp.plan.problem import visible_pairs


def verl(case: Case) -> list[Candidate]:
    """Build verl's balance: documents whole in groups of neighbouring ranks, chosen by Karmarkar-Karp, Ulysses in each
    group (`verl/utils/seqlen_balancing.py`, `ulysses_sequence_parallel_size`). By tokens and by its workload,
    24,576 s + s^2; of all sizes of a group up to the heads the fastest."""
    lengths, ranks = case.documents.lengths.astype(float), case.topology.ranks
    candidates = []
    for size in _group_sizes(case):
        for what, costs in (("tokens", lengths), ("workload", 24576 * lengths + lengths**2)):
            group = differencing(costs, ranks // size)
            plan = split_in_groups(
                "verl", case.documents, case.topology, case.attention, np.full(len(lengths), size), group * size
            )
            candidates.append(Candidate(f"Ulysses {size}, by {what}", plan))
    return candidates


def flexsp(case: Case) -> list[Candidate]:
    """Build FlexSP (arXiv 2412.01523): groups of several sizes, powers of two, each document whole in one, Ulysses in
    each. Its objective is the time of the busiest group, by this project's speeds of kernels and links; it is minimized
    by bisection in place of its mixed integer program. Assumed in its favour: no limit of memory, all groups of a step
    at once."""
    seconds = {
        size: group_seconds(case.documents, case.topology, case.attention, case.cluster, size)
        for size in (1, *_group_sizes(case))
    }
    degree, first = flexible_groups(seconds, case.topology.ranks)
    plan = split_in_groups("FlexSP", case.documents, case.topology, case.attention, degree, first)
    sizes = ", ".join(map(str, np.unique(degree)[::-1].tolist()))
    return [Candidate(f"groups of {sizes}", plan)]


def _group_sizes(case: Case) -> list[int]:
    """Return the powers of two of ranks from 2 that the heads and the ranks can be divided into."""
    limit = min(case.topology.ranks, case.attention.heads)
    return [2**i for i in range(1, limit.bit_length()) if case.topology.ranks % 2**i == 0 and 2**i <= limit]


# Documents whole in groups of ranks that split heads: groups of one size (verl), or of several (FlexSP).


#: Halvings of the interval in which the least time of FlexSP's groups lies.
HALVINGS = 20

BYTES = 2  # of an element of q, k, v and out


def differencing(costs: np.ndarray, parts: int) -> np.ndarray:
    """Divide items into parts of about equal cost by the largest differencing method (Karmarkar and Karp 1982), as verl
    does (`verl/utils/seqlen_balancing.py`).

    Args:
        costs: of the items, fp64 [items].
        parts: number of parts.

    Returns:
        The part of each item, int64 [items].
    """
    # (-spread, number, parts by cost descending: (cost, items))
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = [
        (-cost, number, [(cost, [number]), *((0.0, []) for _ in range(parts - 1))])
        for number, cost in enumerate(costs.tolist())
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, number, first), (_, _, second) = heapq.heappop(heap), heapq.heappop(heap)
        merged = [(a + b, items + more) for (a, items), (b, more) in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
    out = np.zeros(len(costs), np.int64)
    for part, (_, items) in enumerate(heap[0][2] if heap else []):
        out[items] = part
    return out


def group_seconds(
    documents: Documents, topology: Topology, attention: AttentionConfig, cluster: Cluster, degree: int
) -> np.ndarray:
    """Return the seconds of each document on a group of `degree` ranks that split heads: its work as equal shares, and
    its all-to-alls, forward and backward, nothing hidden, fp64 [documents]."""
    cost, lengths, ranks_per_node = ComputeCost(cluster, attention), documents.lengths, topology.ranks_per_node
    work = cost.attention_seconds(visible_pairs(lengths, lengths, attention), lengths) * (1 + ATTENTION_BACKWARD)
    work = work + cost.linear_layer_seconds(lengths) * (1 + LINEAR_BACKWARD)
    row = attention.heads * (attention.head_dim + attention.head_dim_v)
    row += max(attention.kv_heads, min(degree, attention.heads)) * (attention.head_dim + attention.head_dim_v)
    sent = 2 * BYTES * row * lengths / degree  # by a rank, there and back
    in_node = min(degree, ranks_per_node)
    seconds = (in_node - 1) / degree / cluster.effective_rank
    if degree > ranks_per_node:
        rate = cluster.effective_nic * cluster.nics_per_node / ranks_per_node
        seconds = max(seconds, (1 - ranks_per_node / degree) / rate)
    return np.asarray(work / degree + sent * seconds)


def flexible_groups(seconds: dict[int, np.ndarray], ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Choose groups of powers of two of ranks, and documents for them, so that the busiest group is done soonest:
    FlexSP's problem (arXiv 2412.01523, section 4) without its limit of memory.

    FlexSP solves a mixed integer program for 5 to 15 s. Here the least time T is found by bisection: documents, longest
    first, go to the fullest group that has room until T, or open a new one of the least size that is done by T.

    Args:
        seconds: of each document on groups of so many ranks, by that number, fp64 [documents] each.
        ranks: how many there are.

    Returns:
        Ranks of each document's group, and the first of them, int64 [documents] each.
    """
    order = np.argsort(-seconds[1], kind="stable").tolist()
    low, high = float(seconds[1].sum()) / ranks, float(seconds[1].sum())
    best = _packed(seconds, order, ranks, high)
    assert best is not None, "one rank has room for everything"
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        packed = _packed(seconds, order, ranks, middle)
        if packed is None:
            low = middle
        else:
            best, high = packed, middle
    return best


def _packed(
    seconds: dict[int, np.ndarray], order: list[int], ranks: int, until: float
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return groups that are done until a time, as `flexible_groups`; None if none are found. Sizes of new groups fall,
    so that all begin at a multiple of their size."""
    sizes = sorted(seconds)
    degree_of, first_of = np.zeros((2, len(order)), np.int64)
    degree, first, load = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64), np.zeros(ranks)
    groups = used = 0
    for doc in order:
        by_size = np.zeros(max(sizes) + 1)
        by_size[sizes] = [seconds[size][doc] for size in sizes]
        after = load[:groups] + by_size[degree[:groups]]
        fits = np.flatnonzero(after <= until)
        if len(fits):
            group = int(fits[after[fits].argmax()])
        else:
            size = next((size for size in sizes if by_size[size] <= until and used + size <= ranks), None)
            if size is None:
                return None
            if groups and size > degree[groups - 1]:
                return None  # only for documents whose work and time are not in one order
            group, groups = groups, groups + 1
            degree[group], first[group] = size, used
            used += size
        load[group] += by_size[degree[group]]
        degree_of[doc], first_of[doc] = degree[group], first[group]
    return degree_of, first_of


def split_in_groups(
    name: str,
    documents: Documents,
    topology: Topology,
    attention: AttentionConfig,
    degree: np.ndarray,
    first: np.ndarray,
) -> Plan:
    """Return the plan in which each document's heads are split over a group of neighbouring ranks.

    Args:
        name: of the plan.
        documents, topology, attention: as for a ring.
        degree, first: ranks of each document's group, and the first of them, a multiple of their number, int64
            [documents] each.
    """
    parts = []
    for size in np.unique(degree[documents.lengths > 0]).tolist():
        chosen = select_documents(documents, degree == size)
        groups = zigzag(
            chosen, topology.ranks // size, [[group] for group in (np.where(degree == size, first, 0) // size).tolist()]
        )
        parts.append(head_groups_part(groups, groups, topology, attention))
    return parts[0] if len(parts) == 1 else combine(name, parts)
