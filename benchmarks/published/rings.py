"""Forwarding rings over groups of ranks: documents of one group go round in it, zig-zag, in equal shares.

What systems do that give documents to groups of different sizes. Groups that share no rank run at once and are one
part of the plan, a *wave*; a rank that is in several groups takes its waves one after the other. Documents of one rank
are a part of their own. Two orders::

    in turn      wave 0: all its rounds    wave 1: all its rounds    ...    documents of one rank
    interleaved  round 0 of all waves, some documents of one rank    round 1 of all waves, some more    ...

With "in turn" a transfer is hidden by its own round alone; with "interleaved" by all computation of a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mindspeed_cp import AttentionConfig, Documents, Topology
from mindspeed_cp.algorithms.ring import ring_programs
from mindspeed_cp.algorithms.split_local_block import split_local_block
from mindspeed_cp.cluster import Cluster
from mindspeed_cp.layout import Layout, zigzag
from mindspeed_cp.plan import Plan
from mindspeed_cp.plan.parts import combine, select_documents
from mindspeed_cp.plan.program import Program
from mindspeed_cp.plan.records import CONTENT, Messages, sorted_contents
from mindspeed_cp.simulate.link_queues import LinkQueues

#: Documents of one rank are computed in so many turns at most, beside the rounds of rings.
PORTIONS = 8

#: A group of ranks in the order of its ring.
Group = tuple[int, ...]


def grouped_rings(
    name: str,
    documents: Documents,
    topology: Topology,
    attention: AttentionConfig,
    groups: Sequence[Group],
    interleaved: bool,
) -> Plan:
    """Return a plan of rings.

    Args:
        name: of the plan, for people.
        documents, topology, attention: as for the ring.
        groups: for each document the ranks that share it, in the order of its ring.
        interleaved: True for the second order above.
    """
    waves = _waves({group for group in groups if len(group) > 1})
    parts = []
    for wave in waves:
        in_wave = np.array([group in wave for group in groups])
        parts.append(_wave(select_documents(documents, in_wave), topology, attention, groups, wave, interleaved))
    alone = np.array([len(group) == 1 for group in groups])
    rounds = max((part.forward.steps // 2 for part in parts), default=1) if interleaved else 1
    if alone.any() or not parts:
        layout = _layout(select_documents(documents, alone), topology.ranks, groups)
        parts.append(_alone(layout, topology, attention, min(rounds, PORTIONS)))
    if len(parts) == 1:
        return replace(parts[0], algorithm=name)
    orders = (_order(parts, direction, len(waves), interleaved) for direction in ("forward", "backward"))
    return combine(name, parts, *orders)


def _waves(groups: set[Group]) -> list[set[Group]]:
    """Return the groups, widest first, each in the first wave in which none shares a rank with it."""
    waves: list[set[Group]] = []
    for group in sorted(groups, key=lambda group: (-len(group), group)):
        free = next((wave for wave in waves if not any(set(group) & set(member) for member in wave)), None)
        if free is None:
            free = set()
            waves.append(free)
        free.add(group)
    return waves


def _layout(documents: Documents, ranks: int, groups: Sequence[Group]) -> Layout:
    return zigzag(documents, ranks, list(groups))


def _wave(
    documents: Documents,
    topology: Topology,
    attention: AttentionConfig,
    groups: Sequence[Group],
    wave: set[Group],
    interleaved: bool,
) -> Plan:
    """Return the part of rings that run at once."""
    layout = _layout(documents, topology.ranks, groups)
    programs_by_direction: dict[str, list[tuple[Program, np.ndarray]]] = {"forward": [], "backward": []}
    for group in sorted(wave):
        own = select_documents(documents, np.array([other_group == group for other_group in groups]))
        held = zigzag(own, len(group))
        for programs, program in zip(programs_by_direction.values(), ring_programs(held, held, attention), strict=True):
            programs.append((program, np.array(group)))
    directions = {
        name: _interleaved_with_local(programs, layout, attention) for name, programs in programs_by_direction.items()
    }
    if interleaved:
        directions = {name: _slowly(program) for name, program in directions.items()}
    return Plan(
        "rings", attention, topology, layout, layout, layout, layout, directions["forward"], directions["backward"]
    )


def _interleaved_with_local(
    programs: list[tuple[Program, np.ndarray]], layout: Layout, attention: AttentionConfig
) -> Program:
    """Join the programs of groups that share no rank to one over all ranks."""
    capacity = np.zeros((layout.ranks, max(program.capacity.shape[1] for program, _ in programs)), np.int64)
    contents, spans = [np.empty(0, CONTENT)], [layout.spans]
    fetch: list[Messages] = []
    reduce: list[Messages] = []
    for program, ranks in programs:
        capacity[ranks, : program.capacity.shape[1]] = program.capacity
        part = program.contents.copy()
        part["rank"] = ranks[part["rank"]]
        part["first"] += sum(map(len, spans))
        contents.append(part)
        table = program.spans.copy()
        shift = layout.documents.offsets[table["doc"]] - program.kv_documents.offsets[table["doc"]]
        table["rank"] = ranks[table["rank"]]
        table["start"] += shift
        table["stop"] += shift
        spans.append(table)
        for messages, every in ((program.fetch, fetch), (program.reduce, reduce)):
            items = messages.items.copy()
            for end in ("src", "dst"):
                items[end] = ranks[items[end]]
            every.append(Messages(items, messages.runs))
    capacity[:, 0] = layout.token_counts
    return Program(
        max(program.steps for program, _ in programs),
        capacity,
        layout,
        layout.documents,
        attention,
        sorted_contents(np.concatenate(contents)),
        np.concatenate(spans),
        _joined(fetch, layout.ranks),
        _joined(reduce, layout.ranks),
    )


def _joined(lists: list[Messages], ranks: int) -> Messages:
    """Join several lists of messages."""
    items = [messages.items.copy() for messages in lists]
    before = 0
    for items_of_list, messages in zip(items, lists, strict=True):
        items_of_list["first"] += before
        before += len(messages.runs)
    return Messages(np.concatenate(items), np.concatenate([messages.runs for messages in lists])).in_global_order()


def _slowly(program: Program) -> Program:
    """Split every step in two: one that posts and computes, one that waits. What is put between the two hides the
    wait."""
    contents = program.contents.copy()
    contents["step"] *= 2
    messages = []
    for source in (program.fetch, program.reduce):
        items = source.items.copy()
        items["start"] *= 2
        items["done"] = 2 * items["done"] + 1
        messages.append(Messages(items, source.runs))
    return replace(program, steps=2 * program.steps, contents=contents, fetch=messages[0], reduce=messages[1])


def _alone(layout: Layout, topology: Topology, attention: AttentionConfig, portions: int) -> Plan:
    """Return the part of documents that one rank has alone, computed in portions of equal work."""
    shares = [(step, 1 / portions) for step in range(portions)]
    contents, spans = split_local_block(layout, layout, attention, np.empty(0, CONTENT), layout.spans, shares)
    capacity, none = layout.token_counts[:, None].copy(), Messages.empty()
    program = Program(portions, capacity, layout, layout.documents, attention, contents, spans, none, none)
    return Plan("alone", attention, topology, layout, layout, layout, layout, program, program)


def _order(parts: list[Plan], direction: str, waves: int, interleaved: bool) -> tuple[tuple[int, int], ...]:
    """Return (part, step) in one of the two orders; the part behind the waves is that of single ranks."""
    steps = [getattr(part, direction).steps for part in parts]
    if not interleaved:
        return tuple((part, step) for part, count in enumerate(steps) for step in range(count))
    rounds = max(steps[:waves]) // 2
    portions = steps[waves] if len(steps) > waves else 0
    turns: list[tuple[int, int]] = []
    for round_number in range(rounds):
        active = [part for part in range(waves) if 2 * round_number < steps[part]]
        turns += [(part, 2 * round_number) for part in active]
        turns += [(waves, portion) for portion in range(portions) if portion * rounds // portions == round_number]
        turns += [(part, 2 * round_number + 1) for part in active]
    return tuple(turns)


# Links over which every message between nodes takes all NICs of both: Zeppelin's routing layer, as a model.
#
# The paper (arXiv 2509.21841, section on routing) sends the n bytes of such a message in three hops: to the x ranks of
# its node, over all their NICs, and together again::
#
#     T = b_intra * n * (x - 1) / x  +  b_inter * n / x  +  b_intra * n * (x - 1) / x
#
# Here each part of each hop is a message of its own in the queues of the links, so that several routed messages share
# what they pass. The relays' kernels do not wait for them.


def routing_pays(cluster: Cluster) -> bool:
    """Return True if one message alone takes less time routed than over its own NIC, by the formula above, latencies
    left out. In a mesh the parts of a hop travel side by side, each over its own link."""
    ranks = cluster.ranks_per_node
    inside = (ranks - 1) / cluster.effective_rank
    if cluster.fabric == "mesh":
        inside = max(inside, 1 / cluster.effective_pair)
    routed = (2 * inside + max(1, ranks // cluster.nics_per_node) / cluster.effective_nic) / ranks
    return routed < 1 / cluster.effective_nic


class RoutedLinkQueues(LinkQueues):
    """Links of some nodes, over which messages between nodes are dispatched, cross, and are combined."""

    def serve(
        self, src: np.ndarray, dst: np.ndarray, size: np.ndarray, posted: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return, as :class:`LinkQueues` does, when each message begins to travel and has arrived."""
        per = self.ranks_per_node
        across = np.flatnonzero(src // per != dst // per)
        if not len(across) or per == 1:
            return super().serve(src, dst, size, posted)
        begin, end = np.zeros(len(src)), np.zeros(len(src))
        seat = np.tile(np.arange(per), len(across))
        source = np.repeat(across, per)
        helper, relay = src[source] // per * per + seat, dst[source] // per * per + seat
        part = size[source] / per

        near = np.flatnonzero(src // per == dst // per)
        away, joins = np.flatnonzero(helper != src[source]), np.flatnonzero(relay != dst[source])
        first = super().serve(
            np.concatenate([src[near], src[source][away]]),
            np.concatenate([dst[near], helper[away]]),
            np.concatenate([size[near], part[away]]),
            np.concatenate([posted[near], posted[source][away]]),
        )
        begin[near], end[near] = first[0][: len(near)], first[1][: len(near)]
        ready = posted[source].copy()
        ready[away] = first[1][len(near) :]
        begun, arrived = super().serve(helper, relay, part, ready)
        begun[away] = first[0][len(near) :]
        arrived[joins] = super().serve(relay[joins], dst[source][joins], part[joins], arrived[joins])[1]
        begin[across] = begun.reshape(-1, per).min(1)
        end[across] = arrived.reshape(-1, per).max(1)
        return begin, end
