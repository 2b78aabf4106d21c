"""Shares of one document that level the loads of its members (ranks, or groups of nodes)."""

from __future__ import annotations

from collections.abc import Sequence
from operator import gt

#: A member is filled up to this multiple of an equal part of all work before a document is cut over more members.
FILL_LIMIT = 1.01

#: No member takes less than this multiple of an equal share: it would fetch nearly all keys for a few queries.
MIN_SHARE = 0.2

#: A document gets no further members once it is on so many times as many as would do with the tokens that they may
#: still take and no other work, even if these are then filled above FILL_LIMIT: once all are nearly full, what is left
#: of their room would cut it over hundreds of them.
MOST_MEMBERS = 2


def fill_fewest(
    members: Sequence[int], loads: list[float], work: float, overhead: float, fair: float, limits: list[float]
) -> tuple[list[int], list[float]]:
    """Choose the fewest members, from the emptiest on, that have room for a document; those that are allowed next to
    nothing of it come last.

    Args:
        members: ranks or groups of nodes.
        loads: load of each member.
        work, overhead: a member with the share f gets work * f + overhead.
        fair: load up to which a member is filled, before FILL_LIMIT.
        limits: largest share that each member may take.

    Returns:
        The chosen members, ascending, and the shares that level them.
    """
    allowed = _fewest_allowed(limits)
    least = MIN_SHARE / allowed
    most = MOST_MEMBERS * max(allowed, work / fair if fair else 1.0)
    order = sorted(range(len(loads)), key=lambda i: (limits[i] < least, loads[i]))
    room, shares, count = 0.0, 0.0, 0
    for i in order:
        count += 1
        room += max(FILL_LIMIT * fair - loads[i] - overhead, 0.0)
        shares += limits[i]
        if shares >= 1 and (room >= work or count >= most):
            break
    chosen = sorted(order[:count])
    return water_fill_without_crumbs(
        [members[i] for i in chosen], [loads[i] for i in chosen], work, overhead, [limits[i] for i in chosen]
    )


def _fewest_allowed(limits: list[float]) -> int:
    """Return the number of members that can hold a document, those with the largest limits first; at least 1."""
    total, count = 0.0, 0
    for limit in sorted(limits, reverse=True):
        total, count = total + limit, count + 1
        if total >= 1:
            break
    return max(count, 1)


def water_fill_without_crumbs(
    members: list[int], loads: list[float], work: float, overhead: float, limits: list[float]
) -> tuple[list[int], list[float]]:
    """Return members and the shares that level their loads; members that would take next to nothing are left out."""
    while True:
        shares = water_fill(loads, work, limits)
        least = MIN_SHARE / len(members)
        keep = [i for i, share in enumerate(shares) if share >= least]
        if len(keep) == len(members) or not keep or sum(limits[i] for i in keep) < 1:
            positive = [i for i, share in enumerate(shares) if share > 0]
            if not positive:  # next to no work beside the loads
                return [members[loads.index(min(loads))]], [1.0]
            return [members[i] for i in positive], [shares[i] for i in positive]
        members, loads, limits = [members[i] for i in keep], [loads[i] for i in keep], [limits[i] for i in keep]


def water_fill(loads: list[float], work: float, limits: list[float]) -> list[float]:
    """Return the shares of the work, none above its limit, that minimize the highest load."""
    count = len(loads)
    if count == 1 or work <= 0:
        total_share = sum(min(limit, 1.0) for limit in limits)
        return [min(limit, 1.0) / total_share for limit in limits] if total_share >= 1 else [1.0 / count] * count
    total, level = work, 0.0
    for number, load in enumerate(sorted(loads), 1):
        total += load
        if total / number <= load and number > 1:
            break
        level = total / number  # the level if the `number` emptiest members are filled up to it
    shares = [max(level - load, 0.0) / work for load in loads]
    if any(map(gt, shares, limits)):
        return _water_fill_limited(loads, work, limits)
    return shares


def _water_fill_limited(loads: list[float], work: float, limits: list[float]) -> list[float]:
    """Do as `water_fill` where limits bind: between two levels at which a member begins or ends to take work, the work
    taken grows in a straight line."""
    most = [min(limit, 1.0) * work for limit in limits]
    total = sum(most)
    if total <= work:
        return [part / total for part in most] if total else [1.0 / len(loads)] * len(loads)
    changes = [(load, 1) for load in loads] + [(load + part, -1) for load, part in zip(loads, most, strict=True)]
    level, taking, taken = 0.0, 0, 0.0
    for next_level, change in sorted(changes):
        taken += taking * (next_level - level)
        if taken >= work:
            level = next_level - (taken - work) / taking
            break
        level, taking = next_level, taking + change
    parts = [min(max(level - load, 0.0), part) for load, part in zip(loads, most, strict=True)]
    total = sum(parts)
    return [part / total for part in parts]
