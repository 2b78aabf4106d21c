"""Systems that keep each document whole in a group of ranks that split heads."""

from __future__ import annotations

import numpy as np

from benchmarks.published.split_groups import differencing, flexible_groups, group_seconds, split_in_groups
from benchmarks.published.systems.case import Case
from benchmarks.published.timing import Candidate


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
