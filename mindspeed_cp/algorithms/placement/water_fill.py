"""Shares of one document that level the loads of its members (ranks, or groups of nodes)."""

from __future__ import annotations

from collections.abc import Sequence

#: A member is filled up to this multiple of an equal part of all work before a document is cut over more members.
FILL_LIMIT = 1.01

#: No member takes less than this multiple of an equal share: it would fetch nearly all keys for a few queries.
MIN_SHARE = 0.2


def fill_fewest(
    members: Sequence[int], loads: list[float], work: float, overhead: float, fair: float, limits: list[float]
) -> tuple[list[int], list[float]]:
    """Choose the fewest members, from the emptiest on, that have room for a document.

    Args:
        members: ranks or groups of nodes.
        loads: load of each member.
        work, overhead: a member with the share f gets work * f + overhead.
        fair: load up to which a member is filled, before FILL_LIMIT.
        limits: largest share that each member may take.

    Returns:
        The chosen members, ascending, and the shares that level them.
    """
    order = sorted(range(len(loads)), key=loads.__getitem__)
    room, shares, count = 0.0, 0.0, 0
    for i in order:
        count += 1
        room += max(FILL_LIMIT * fair - loads[i] - overhead, 0.0)
        shares += limits[i]
        fits_on_first = count == 1 and FILL_LIMIT * fair - loads[i] >= work + overhead
        if shares >= 1 and (room >= work or fits_on_first):
            break
    chosen = sorted(order[:count])
    return water_fill_without_crumbs(
        [members[i] for i in chosen], [loads[i] for i in chosen], work, overhead, [limits[i] for i in chosen]
    )


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
            return [members[i] for i in positive], [shares[i] for i in positive]
        members, loads, limits = [members[i] for i in keep], [loads[i] for i in keep], [limits[i] for i in keep]


def water_fill(loads: list[float], work: float, limits: list[float]) -> list[float]:
    """Return the shares of the work, none above its limit, that minimize the highest load."""
    count = len(loads)
    if min(limits) < 1 and work > 0 and count > 1:
        return _water_fill_capped(loads, work, limits)
    if count == 1 or work <= 0:
        total_share = sum(min(limit, 1.0) for limit in limits)
        return [min(limit, 1.0) / total_share for limit in limits] if total_share >= 1 else [1.0 / count] * count
    total, level = work, 0.0
    for number, load in enumerate(sorted(loads), 1):
        total += load
        if total / number <= load and number > 1:
            break
        level = total / number  # the level if the `number` emptiest members are filled up to it
    return [max(level - load, 0.0) / work for load in loads]


def _water_fill_capped(loads: list[float], work: float, limits: list[float]) -> list[float]:
    """Do as `water_fill`, by bisection on the level, for members that may not take the whole document."""
    caps = [min(limit, 1.0) * work for limit in limits]
    if sum(caps) <= work:
        return [cap / sum(caps) for cap in caps]
    low, high = min(loads), max(loads) + work
    for _ in range(60):
        level = (low + high) / 2
        if sum(_taken(loads, caps, level)) >= work:
            high = level
        else:
            low = level
    taken = _taken(loads, caps, high)
    return [part / sum(taken) for part in taken]


def _taken(loads: list[float], caps: list[float], level: float) -> list[float]:
    """Return the work that each member takes if all are filled up to a level or to their caps."""
    return [min(max(level - load, 0.0), cap) for load, cap in zip(loads, caps, strict=True)]
