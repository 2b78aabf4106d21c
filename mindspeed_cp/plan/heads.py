"""Heads split over ranks: which heads each one has, and one program carried over to all of them.

Ulysses, and the inner part of the hybrid (Jacobs et al. 2023; Fang and Zhao 2024). The ranks come in groups of `degree`
neighbours. Among groups, keys and values travel as by any other algorithm, as if a group were one rank; inside a group
every rank has the group's tokens for its own heads.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from mindspeed_cp.layout import Layout
from mindspeed_cp.plan.config import AttentionConfig
from mindspeed_cp.plan.program import Program
from mindspeed_cp.plan.records import Messages, sorted_contents


def head_ranges(attention: AttentionConfig, degree: int) -> tuple[np.ndarray, np.ndarray]:
    """Query heads and kv heads of each of `degree` ranks, int64 [degree, 2] each.

    Query heads are split in order, and as evenly as they go: no rank has two more than another. A rank has the kv heads
    that its query heads read, no others; of all such splits one with the fewest copies of kv heads is taken. Ranks
    beyond the number of heads have none.
    """
    shared = attention.heads // attention.kv_heads
    edges = np.array(_borders(attention.heads, shared, degree))
    first, last = edges[:-1], edges[1:]
    kv_last = np.where(last > first, -(-last // shared), first // shared)
    return np.stack([first, last], 1), np.stack([first // shared, kv_last], 1)


@lru_cache(maxsize=256)
def _borders(heads: int, shared: int, degree: int) -> tuple[int, ...]:
    """First query head of each rank and, last, the number of heads.

    Every border inside a group of `shared` heads is one more copy of a kv head. The first i ranks have i * least heads
    and e more, 0 <= e <= rest: the best way to each (i, e) extends the best way to one of two before it. Among equals
    the extra heads are spread evenly.
    """
    least, rest = divmod(heads, degree)
    even = [i * heads // degree for i in range(degree + 1)]
    if least == 0:
        return tuple(even)
    ways: list[tuple[int, int, tuple[int, ...]] | None] = [(0, 0, (0,)), *[None] * rest]
    for i in range(1, degree + 1):
        found: list[tuple[int, int, tuple[int, ...]] | None] = []
        for extra in range(rest + 1):
            border = i * least + extra
            before = [w for w in (ways[extra], ways[extra - 1] if extra else None) if w is not None]
            copies, uneven = int(border % shared > 0), abs(border - even[i])
            found.append(min(((c + copies, u + uneven, (*e, border)) for c, u, e in before), default=None))
        ways = found
    best = ways[rest]
    assert best is not None, "all ranks and all extra heads: there is a way"
    return best[2]


def cut_among_members(groups: Layout, degree: int) -> Layout:
    """What the members of each group hold before heads are split: the group's rows, in token order, in `degree` equal
    runs (to one row). Every move between two members is then one run of rows."""
    counts = groups.token_counts
    ranks = groups.ranks * degree
    group, member = np.divmod(np.arange(ranks), degree)
    low, high = member * counts[group] // degree, (member + 1) * counts[group] // degree
    spans, row = groups.spans, groups.first_rows
    begin = np.searchsorted(spans["rank"], group)  # spans of a group, for each of its members
    size = np.searchsorted(spans["rank"], group, "right") - begin
    rank = np.repeat(np.arange(ranks), size)
    of = np.arange(len(rank)) - np.repeat(np.cumsum(size) - size, size) + begin[rank]
    out = spans[of]
    out["rank"] = rank
    out["start"] += np.maximum(low[rank] - row[of], 0)
    out["stop"] = np.minimum(out["stop"], spans["start"][of] + high[rank] - row[of])
    return Layout(groups.documents, ranks, out[out["stop"] > out["start"]])


def held_by_members(groups: Layout, ranges: np.ndarray) -> Layout:
    """Every member has all rows of its group, for its own heads."""
    degree = len(ranges)
    sizes = np.repeat(np.diff(groups.bounds), degree)
    rank = np.repeat(np.arange(groups.ranks * degree), sizes)
    first = np.repeat(groups.bounds[:-1], degree)
    out = groups.spans[np.arange(len(rank)) - np.repeat(np.cumsum(sizes) - sizes, sizes) + first[rank]]
    out["rank"] = rank
    return Layout(groups.documents, groups.ranks * degree, out).with_heads(np.tile(ranges, (groups.ranks, 1)))


def spread(program: Program, queries: Layout, has_heads: np.ndarray) -> Program:
    """A program for groups as one for their members: each does, for its heads, what the group does.

    Args:
        program: for groups.
        queries: layout of the queries over the members.
        has_heads: bool [degree]; members without heads neither compute nor send.
    """
    degree = len(has_heads)
    members = np.flatnonzero(has_heads)
    contents = np.repeat(program.contents, len(members))
    contents["rank"] = contents["rank"] * degree + np.tile(members, len(program.contents))
    capacity = np.repeat(program.capacity, degree, axis=0)
    capacity[~np.tile(has_heads, program.ranks), 1:] = 0
    return replace(
        program,
        capacity=capacity,
        q_layout=queries,
        contents=sorted_contents(contents),
        fetch=_messages_of_members(program.fetch, degree, members),
        reduce=_messages_of_members(program.reduce, degree, members),
    )


def _messages_of_members(messages: Messages, degree: int, members: np.ndarray) -> Messages:
    """Every message once for each member, in the same order."""
    items = np.repeat(messages.items, len(members))
    for end in ("src", "dst"):
        items[end] = items[end] * degree + np.tile(members, len(messages.items))
    return Messages(items, messages.runs)
