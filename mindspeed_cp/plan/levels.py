"""Shares of one document's work that level the loads of the places that share it."""

from __future__ import annotations

from collections.abc import Sequence

#: A rank is filled up to this multiple of an equal part of all work before a document is cut for it.
FULL = 1.01

#: No rank takes a smaller part of an equal share of a document: it would fetch nearly all keys for a few queries.
LEAST = 0.2


def filled(
    places: Sequence[int], loads: list[float], work: float, overhead: float, fair: float, limits: list[float]
) -> tuple[list[int], list[float]]:
    """The fewest places, from the emptiest on, that have room for the work, and the shares that level them.

    Args:
        places: ranks or nodes.
        loads: of each place.
        work, overhead: a place with the share f gets work * f + overhead.
        fair: load up to which a place is filled.
        limits: largest share that each place may take.
    """
    order = sorted(range(len(loads)), key=loads.__getitem__)
    room, shares, count = 0.0, 0.0, 0
    for i in order:
        count += 1
        room += max(FULL * fair - loads[i] - overhead, 0.0)
        shares += limits[i]
        if (room >= work and shares >= 1) or (count == 1 and FULL * fair - loads[i] >= work + overhead and shares >= 1):
            break
    chosen = sorted(order[:count])
    return within_limits(
        [places[i] for i in chosen], [loads[i] for i in chosen], work, overhead, [limits[i] for i in chosen]
    )


def within_limits(
    places: list[int], loads: list[float], work: float, overhead: float, limits: list[float]
) -> tuple[list[int], list[float]]:
    """The shares that level these places; those that would take next to nothing are left out."""
    while True:
        shares = levelled(loads, work, limits)
        least = LEAST / len(places)
        keep = [i for i, share in enumerate(shares) if share >= least]
        if len(keep) == len(places) or not keep or sum(limits[i] for i in keep) < 1:
            some = [i for i, share in enumerate(shares) if share > 0]
            return [places[i] for i in some], [shares[i] for i in some]
        places, loads, limits = [places[i] for i in keep], [loads[i] for i in keep], [limits[i] for i in keep]


def levelled(loads: list[float], work: float, limits: list[float]) -> list[float]:
    """Shares of the work, none above its limit, that make the highest load as low as can be."""
    count = len(loads)
    if min(limits) < 1 and work > 0 and count > 1:
        return level_within(loads, work, limits)
    if count == 1 or work <= 0:
        some = sum(min(limit, 1.0) for limit in limits)
        return [min(limit, 1.0) / some for limit in limits] if some >= 1 else [1.0 / count] * count
    if min(limits) < 1:
        return level_within(loads, work, limits)
    total, level = work, 0.0
    for lowest, load in enumerate(sorted(loads), 1):
        total += load
        if total / lowest <= load and lowest > 1:
            break
        level = total / lowest  # with the emptiest places filled up to it
    return [max(level - load, 0.0) / work for load in loads]


def level_within(loads: list[float], work: float, limits: list[float]) -> list[float]:
    """As `levelled`, by bisection on the level, for places that may not take all."""
    cap = [min(limit, 1.0) * work for limit in limits]
    if sum(cap) <= work:
        return [x / sum(cap) for x in cap]
    low, high = min(loads), max(loads) + work
    for _ in range(60):
        level = (low + high) / 2
        if sum(min(max(level - load, 0.0), most) for load, most in zip(loads, cap, strict=True)) >= work:
            high = level
        else:
            low = level
    found = [min(max(high - load, 0.0), most) for load, most in zip(loads, cap, strict=True)]
    return [x / sum(found) for x in found]
