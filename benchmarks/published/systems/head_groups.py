"""Systems that keep each document whole in a group of ranks that split heads."""

from __future__ import annotations

import heapq
from collections.abc import Collection

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
    by a local search in place of its mixed integer program. Its limit of memory is the case's of tokens. Assumed in its
    favour: all groups of a step at once."""
    seconds = {
        size: group_seconds(case.documents, case.topology, case.attention, case.cluster, size)
        for size in (1, *_group_sizes(case))
    }
    groups = flexible_groups(seconds, case.topology.ranks, case.documents.lengths, case.room or np.inf)
    if groups is None:
        return []
    degree, first = groups
    plan = split_in_groups("FlexSP", case.documents, case.topology, case.attention, degree, first)
    sizes = ", ".join(map(str, np.unique(degree)[::-1].tolist()))
    return [Candidate(f"groups of {sizes}", plan)]


def _group_sizes(case: Case) -> list[int]:
    """Return the powers of two of ranks from 2 that the heads and the ranks can be divided into."""
    limit = min(case.topology.ranks, case.attention.heads)
    return [2**i for i in range(1, limit.bit_length()) if case.topology.ranks % 2**i == 0 and 2**i <= limit]


# Documents whole in groups of ranks that split heads: groups of one size (verl), or of several (FlexSP).


#: Of FlexSP's objective: halvings of the interval in which its lower bound lies, and divisions into groups that the
#: search tries.
HALVINGS, MOST_TRIED = 40, 400

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
    links = min(cluster.effective_rank, max(in_node - 1, 1) * cluster.effective_pair)  # of a mesh a rank uses some
    seconds = (in_node - 1) / degree / links
    if degree > ranks_per_node:
        rate = cluster.effective_nic * cluster.nics_per_node / ranks_per_node
        seconds = max(seconds, (1 - ranks_per_node / degree) / rate)
    return np.asarray(work / degree + sent * seconds)


def flexible_groups(
    seconds: dict[int, np.ndarray], ranks: int, tokens: np.ndarray, room: float = np.inf
) -> tuple[np.ndarray, np.ndarray] | None:
    """Choose groups of powers of two of ranks, and documents for them, so that the busiest group is done soonest:
    FlexSP's problem (arXiv 2412.01523, section 4).

    FlexSP solves a mixed integer program for 5 to 15 s. Here a search begins with groups of one size, of each, and
    with those that a bisection over the time opens; it halves a group or joins two, in the end both at once, as long
    as that helps. For given groups, documents are assigned longest first, and then moved and swapped.

    Args:
        seconds: of each document on groups of so many ranks, by that number, fp64 [documents] each.
        ranks: how many there are.
        tokens: of each document, int64 [documents].
        room: tokens that a rank may hold.

    Returns:
        Ranks of each document's group, and the first of them, int64 [documents] each; None if no groups that were
        looked at have room.
    """
    solved: dict[tuple[int, ...], tuple[float, np.ndarray]] = {}

    def until(sizes: tuple[int, ...]) -> float:
        if sizes not in solved:
            of_groups, free = np.stack([seconds[size] for size in sizes]), room * np.array(sizes)
            begin = [_assigned(of_groups, tokens, free), *(group for opened, group in bisected if opened == sizes)]
            results = [_improved(group, of_groups, tokens, free) for group in begin]
            solved[sizes] = min(results, key=lambda result: result[0])
        return solved[sizes][0]

    bisected = _opened(seconds, ranks)
    starts = [(size,) * (ranks // size) for size in seconds] + [sizes for sizes, _ in bisected]
    best = min(starts, key=until)
    for pairs, begin in [(False, start) for start in starts] + [(True, best)]:
        sizes = best if pairs else begin
        while len(solved) < MOST_TRIED:
            near = _neighbours(sizes, seconds)
            if pairs:
                near = {groups for neighbour in near for groups in _neighbours(neighbour, seconds)}
            following = min(near, key=until, default=sizes)
            if until(following) >= until(sizes):
                break
            sizes = following
        best = min(best, sizes, key=until)
    if not np.isfinite(until(best)):
        return None
    degree, group = np.array(best), solved[best][1]
    return degree[group], (np.cumsum(degree) - degree)[group]


def _opened(seconds: dict[int, np.ndarray], ranks: int) -> list[tuple[tuple[int, ...], np.ndarray]]:
    """Return the sizes of groups, descending, that are opened for some times T, halving the interval, and the group of
    each document: documents, longest first, go to the fullest group that has room until T, or open one of the least
    size that is done by T."""
    low, high, out = float(seconds[1].sum()) / ranks, float(seconds[1].sum()), []
    order = np.argsort(-seconds[1], kind="stable").tolist()
    for _ in range(20):
        middle, sizes, load, group_of = (low + high) / 2, list[int](), list[float](), np.zeros(len(order), np.int64)
        for doc in order:
            after = [busy + seconds[size][doc] for busy, size in zip(load, sizes, strict=True)]
            group = max((i for i, time in enumerate(after) if time <= middle), key=after.__getitem__, default=None)
            if group is not None:
                load[group], group_of[doc] = after[group], group
                continue
            group_of[doc] = len(sizes)
            size = next((size for size in sorted(seconds) if seconds[size][doc] <= middle), ranks + 1)
            sizes.append(size)
            load.append(seconds.get(size, seconds[1])[doc])
            if sum(sizes) > ranks:
                break
        if sum(sizes) > ranks:
            low = middle
        else:
            high = middle
            sizes += [1] * (ranks - sum(sizes))
            place = np.argsort(np.argsort(-np.array(sizes), kind="stable"))
            out.append((tuple(sorted(sizes, reverse=True)), place[group_of]))
    return out


def _neighbours(sizes: tuple[int, ...], valid: Collection[int]) -> set[tuple[int, ...]]:
    """Return the groups, their sizes descending, after one is halved or two of one size are joined."""
    out = set()
    for size in set(sizes):
        for taken, put in (((size,), (size // 2,) * 2), ((size,) * 2, (2 * size,))):
            if put[0] in valid and sizes.count(size) >= len(taken):
                first = sizes.index(size)
                out.add(tuple(sorted((*sizes[:first], *sizes[first + len(taken) :], *put), reverse=True)))
    return out


def _assigned(seconds: np.ndarray, tokens: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Return the group of each document, int64 [documents]: longest first, each in the group that is then done soonest,
    the first one where none has room; arguments as `_improved`."""
    load, free = np.zeros(len(seconds)), room.copy()
    group = np.zeros(seconds.shape[1], np.int64)
    for doc in np.argsort(-seconds.min(0), kind="stable").tolist():
        after = np.where(free >= tokens[doc], load + seconds[:, doc], np.inf)
        chosen = int(after.argmin())
        group[doc], load[chosen], free[chosen] = chosen, load[chosen] + seconds[chosen, doc], free[chosen] - tokens[doc]
    return group


def _improved(group: np.ndarray, seconds: np.ndarray, tokens: np.ndarray, room: np.ndarray) -> tuple[float, np.ndarray]:
    """Move a document out of the busiest group, or swap it for another, as long as that helps.

    Args:
        group: of each document, int64 [documents].
        seconds: of each document on each group, fp64 [groups, documents].
        tokens: of each document, int64 [documents].
        room: tokens that each group may hold, fp64 [groups].

    Returns:
        Seconds of the busiest group, infinite where one holds too many tokens, and the group of each document.
    """
    groups, documents = seconds.shape
    group, everything = group.copy(), np.arange(documents)
    load, free = np.bincount(group, seconds[group, everything], groups), room - np.bincount(group, tokens, groups)
    if (free < 0).any():
        return float("inf"), group
    for _ in range(20 * groups):
        busiest = int(load.argmax())
        inside = np.flatnonzero(group == busiest)
        leaves = load[busiest] - seconds[busiest, inside]
        moved = np.maximum(leaves, load[:, None] + seconds[:, inside])  # [groups, inside]
        moved[free[:, None] < tokens[inside]] = np.inf
        moved[busiest] = np.inf
        rest = load[group] - seconds[group, everything]
        swapped = np.maximum(leaves[:, None] + seconds[busiest], rest + seconds[group][:, inside].T)
        more = tokens[inside][:, None] - tokens  # [inside, documents]
        swapped[(more > free[group]) | (-more > free[busiest]) | (group == busiest)] = np.inf
        if min(moved.min(initial=np.inf), swapped.min(initial=np.inf)) >= load[busiest] * (1 - 1e-9):
            break
        if moved.min() <= swapped.min():
            target, index = np.unravel_index(int(moved.argmin()), moved.shape)
            changes = [(inside[index], target)]
        else:
            index, other = np.unravel_index(int(swapped.argmin()), swapped.shape)
            changes = [(inside[index], group[other]), (other, busiest)]
        for doc, target in changes:
            for old, sign in ((group[doc], -1), (target, 1)):
                load[old] += sign * seconds[old, doc]
                free[old] -= sign * tokens[doc]
            group[doc] = target
    return float(load.max()), group


def least_seconds(seconds: dict[int, np.ndarray], ranks: int) -> float:
    """Return a time before which no groups are done: each document takes the fewest rank-seconds of the sizes that are
    done by then, and all together fit into the ranks' time."""
    by_size = np.stack(list(seconds.values()))
    spent = by_size * np.array(list(seconds))[:, None]
    low, high = 0.0, float(seconds[1].sum())
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        enough = np.where(by_size <= middle, spent, np.inf).min(0).sum() <= ranks * middle
        low, high = (low, middle) if enough else (middle, high)
    return low


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
