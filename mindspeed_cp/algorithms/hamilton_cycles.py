"""Rings that share no link: edge-disjoint directed Hamilton cycles of nodes whose ranks are fully meshed.

One ring uses one outgoing link of each rank. A mesh of n ranks has n - 1 of them, and its n * (n - 1) directed links
fall apart into n - 1 Hamilton cycles for every n except 4 and 6 (Tillson 1980), in which n - 2 of them share no link::

    4 ranks    0 1 3 2    and    0 2 3 1        (of 12 directed links, 4 remain)

Cycles over several nodes of n ranks go through all ranks of a node on a Hamilton path of the mesh, and then to the next
node. The paths begin at different ranks, and end at different ranks: a NIC carries one cycle.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations

import numpy as np

#: Up to this even number of ranks the last cycle is searched; beyond it, n - 2 cycles are used.
MAX_SEARCHED = 16

#: Cycles of the construction that the search replaces, together with the unused links, by one cycle more.
DROPPED = 3

Path = list[int]


@lru_cache(maxsize=64)
def hamilton_cycles(nodes: int, ranks_per_node: int) -> np.ndarray:
    """Return directed cycles over all ranks that share no link and no NIC, int64 [cycles, ranks].

    On one node of n ranks these are n - 1 cycles, or n - 2 for n = 4, n = 6 and even n above `MAX_SEARCHED`. On several
    nodes they are n for even n and n - 1 for odd n > 1, the most that n outgoing NICs or the links allow to pair up.

    Args:
        nodes: number of nodes.
        ranks_per_node: ranks of a node, every two of them with a link of their own in each direction.
    """
    if nodes == 1:
        return np.array(_mesh_cycles(ranks_per_node), np.int64)
    offsets = np.arange(nodes)[:, None] * ranks_per_node
    return np.array([(offsets + np.array(path)).ravel() for path in _mesh_paths(ranks_per_node)], np.int64)


def _zigzag(count: int, first: int) -> Path:
    """Return the Hamilton path first, first + 1, first - 1, first + 2, ... of the ranks modulo an even count. The paths
    from first = 0 to count / 2 - 1 use every undirected link once (Walecki; Lucas 1883)."""
    steps = [(i + 1) // 2 * (1 if i % 2 else -1) for i in range(count)]
    return [(first + step) % count for step in steps]


def _both_ways(paths: list[Path]) -> list[Path]:
    return [way for path in paths for way in (path, path[::-1])]


def _mesh_paths(count: int) -> list[Path]:
    """Return directed Hamilton paths of a mesh that share no link, no first and no last rank."""
    if count == 1:
        return [[0]]
    if count % 2 == 0:
        return _both_ways([_zigzag(count, first) for first in range(count // 2)])
    # Cut each undirected cycle of an odd mesh at its link between ranks i and i + (count - 1) / 2, which cycle i has.
    paths = []
    for first, cycle in enumerate(_odd_cycles(count)):
        ends = {first, first + (count - 1) // 2}
        cut = next(i for i in range(count) if {cycle[i], cycle[(i + 1) % count]} == ends)
        paths.append(cycle[cut + 1 :] + cycle[: cut + 1])
    return _both_ways(paths)


def _odd_cycles(count: int) -> list[Path]:
    """Return the undirected Hamilton cycles of an odd mesh: zigzags over all ranks but the last, closed by it. Zigzag i
    is turned so that it has the link from i to i + (count - 1) / 2."""
    last, half = count - 1, (count - 1) // 2
    middle = [_zigzag(last, 0)[i : i + 2] for i in range(last - 1)]
    shift = next(pair[0] if pair[0] < pair[1] else pair[1] for pair in middle if abs(pair[0] - pair[1]) == half)
    return [[last, *((rank - shift + first) % last for rank in _zigzag(last, 0))] for first in range(half)]


def _mesh_cycles(count: int) -> list[Path]:
    """Return directed Hamilton cycles of one mesh that share no link."""
    if count <= 2:
        return [list(range(count))]
    if count % 2:
        return _both_ways(_odd_cycles(count))
    # Insert the last rank into each undirected cycle of the other ranks, in place of links that form a matching.
    cycles = []
    for cycle in _inserted(_odd_cycles(count - 1), count - 1):
        cycles += [cycle, cycle[::-1]]
    if 6 < count <= MAX_SEARCHED:
        for dropped in combinations(range(len(cycles)), DROPPED):
            kept = [cycle for i, cycle in enumerate(cycles) if i not in dropped]
            others = _decomposed(count, _unused_links(count, kept))
            if others:
                return kept + others
    return cycles


def _inserted(cycles: list[Path], rank: int) -> Iterator[Path]:
    """Yield each cycle with a rank inserted between i and i + half, whose links leave a perfect matching."""
    half = (rank - 1) // 2
    for first, cycle in enumerate(cycles):
        ends = {first, first + half}
        cut = next(i for i in range(len(cycle)) if {cycle[i], cycle[(i + 1) % len(cycle)]} == ends)
        yield [*cycle[: cut + 1], rank, *cycle[cut + 1 :]]


def _unused_links(count: int, cycles: list[Path]) -> list[set[int]]:
    """Return for each rank the ranks that no cycle reaches from it."""
    unused = [set(range(count)) - {rank} for rank in range(count)]
    for cycle in cycles:
        for rank, following in zip(cycle, cycle[1:] + cycle[:1], strict=True):
            unused[rank].remove(following)
    return unused


def _decomposed(count: int, links: list[set[int]]) -> list[Path]:
    """Return Hamilton cycles that use all links given, equally many from and to each rank; empty if there are none."""
    if len(links[0]) == 1:
        return list(_cycles_of(count, links))
    for first in _cycles_of(count, links):
        others = _decomposed(count, _without(links, first))
        if others:
            return [first, *others]
    return []


def _cycles_of(count: int, links: list[set[int]]) -> Iterator[Path]:
    """Yield the Hamilton cycles from rank 0 over some links, depth first."""
    path, choices = [0], [iter(sorted(links[0]))]
    while choices:
        following = next(choices[-1], None)
        if following is None:
            choices.pop()
            path.pop()
        elif following not in path:
            path.append(following)
            if len(path) == count:
                if 0 in links[following]:
                    yield path.copy()
                path.pop()
            else:
                choices.append(iter(sorted(links[following])))


def _without(links: list[set[int]], cycle: Path) -> list[set[int]]:
    out = [set(targets) for targets in links]
    for rank, following in zip(cycle, cycle[1:] + cycle[:1], strict=True):
        out[rank].remove(following)
    return out
