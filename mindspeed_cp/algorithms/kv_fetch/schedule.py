"""Steps and slots of the rounds and stages of a KV fetch.

A message is posted as soon as its slot is free and is due when its rows are read, so that a step waits only for what
its own tiles read. A stage whose slot is in use is posted when the gradient of the stage before has left the slot.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from mindspeed_cp.algorithms.kv_fetch.needs import KvFetches, KvOwners, NeededTokens, nodes_apart
from mindspeed_cp.layout import Layout, intersect_runs, join_runs
from mindspeed_cp.layout.runs import group_starts
from mindspeed_cp.plan.problem import Topology
from mindspeed_cp.plan.records import MESSAGE, ROW_RUN, Messages

#: Steps that a block may take to cross to another node where slots are reused.
CROSSING_STEPS = 2


@dataclass(frozen=True, eq=False)
class Hop:
    """Messages of one kind.

    Attributes:
        fetches: what moves; those of one (stage, dst) lie side by side in the order of their dst_row.
        start, done: steps of each stage in which it is posted and finished, int64 [stages + 1].
        back, back_done: the same for the gradients, on the way back.
        src_slot, dst_slot: slots of each stage, int64 [stages + 1].
    """

    fetches: KvFetches
    start: np.ndarray
    done: np.ndarray
    back: np.ndarray
    back_done: np.ndarray
    src_slot: np.ndarray
    dst_slot: np.ndarray

    def messages(self) -> tuple[Messages, Messages]:
        """Return the messages that carry keys and values, and those that carry their gradients back: one for every
        stage, source and target. Rows that are consecutive on both sides are one run."""
        fetches = self.fetches
        if not len(fetches):
            return Messages.empty(), Messages.empty()
        slot = np.zeros(len(fetches), np.int64)  # number of the (stage, dst)
        slot[fetches.slot_begins[1:]] = 1
        key = np.cumsum(slot) * (int(fetches.src.max()) + 1) + fetches.src
        order = np.argsort(key, kind="stable")
        fetches, first = fetches[order], group_starts(key[order])
        runs = np.empty(len(fetches), ROW_RUN)
        runs["src_row"], runs["dst_row"], runs["rows"] = fetches.src_row, fetches.dst_row, fetches.rows
        breaks = np.zeros(len(runs), bool)
        breaks[first] = True
        joined, joined_from = join_runs(runs, ("src_row", "dst_row"), breaks)
        stage, items = fetches.stage[first], np.empty(len(first), MESSAGE)
        items["src"], items["dst"] = fetches.src[first], fetches.dst[first]
        items["src_slot"], items["dst_slot"] = self.src_slot[stage], self.dst_slot[stage]
        items["first"] = np.searchsorted(joined_from, first)
        items["count"] = np.diff(np.append(items["first"], len(joined)))
        items["rows"] = np.add.reduceat(runs["rows"], first)
        fetch = Messages(items, joined)
        reduce = fetch.reversed()
        items["start"], items["done"] = self.start[stage], self.done[stage]
        reduce.items["start"], reduce.items["done"] = self.back[stage], self.back_done[stage]
        return fetch, reduce


@dataclass(frozen=True, eq=False)
class Buffer:
    """Received rows that are computed on, in one kind of slots.

    Attributes:
        fetches: what lies in them; those of one (stage, dst) lie side by side.
        step, slot: of each stage, int64 [stages].
        needed: True if the rank itself needs the tokens, bool [fetches]; None: it needs all.
    """

    fetches: KvFetches
    step: np.ndarray
    slot: np.ndarray
    needed: np.ndarray | None = None


@dataclass(frozen=True)
class Schedule:
    """Steps and slots of a KV fetch.

    Attributes:
        hops: what moves.
        buffers: what is computed on, besides the local block.
        steps: number of steps of the forward.
        last: last step of the backward.
    """

    hops: list[Hop]
    buffers: list[Buffer]
    steps: int
    last: int


def schedule(
    needs: NeededTokens, held: KvOwners, keys: Layout, topology: Topology, routing: bool, prefetch: int
) -> Schedule:
    """Return steps and slots of a KV fetch.

    Args:
        needs, held, keys: what is needed, and where it is.
        topology: ranks and nodes.
        routing: True if what crosses between nodes is routed.
        prefetch: stages in flight while one is computed.
    """
    fetches, per_node = held.fetch_list(needs), topology.ranks_per_node
    fetches = fetches[fetches.src != fetches.dst]
    near = fetches.src // per_node == fetches.dst // per_node
    rounds, inner = _numbered_rounds(_halves(fetches[near], keys))
    in_rounds, at_rounds = _slots(1, inner, inner), 1 + np.arange(inner)
    if routing and per_node > 1:
        hops, buffers, steps, last = _routed_hops(inner, needs, held, keys, topology, prefetch)
    else:
        hops, buffers, steps, last = _direct_hops(inner, fetches[~near], keys, per_node, prefetch)
    zero = np.zeros(inner, np.int64)
    late = np.minimum(at_rounds + 2, last)
    own_node = Hop(rounds, zero, at_rounds - 1, at_rounds + 1, late, zero, in_rounds)
    return Schedule([own_node, *hops], [Buffer(rounds, at_rounds, in_rounds), *buffers], steps, last)


def _halves(fetches: KvFetches, keys: Layout) -> KvFetches:
    """Return fetches in two rounds: the first and the second halves of documents."""
    middle = keys.documents.offsets[fetches.doc] + (keys.documents.lengths[fetches.doc] + 1) // 2
    drop = np.maximum(middle - fetches.start, 0)
    first = replace(fetches, stop=np.minimum(fetches.stop, middle))
    second = replace(fetches.shortened(drop, fetches.rows - drop), stage=np.ones(len(fetches), np.int64))
    halves = KvFetches.concatenate([first, second])
    return halves[halves.stop > halves.start].sorted_by_slot()


def _slots(first: int, stages: int, turn: int) -> np.ndarray:
    """Return the slot of each stage, from slot `first` on; `turn` of them are in use at once."""
    return first + np.arange(stages) % max(1, min(turn, stages))


def _direct_hops(
    inner: int, crossing: KvFetches, keys: Layout, per_node: int, prefetch: int
) -> tuple[list[Hop], list[Buffer], int, int]:
    """Return the hops with which every rank fetches from the owners on other nodes itself, by the nodes' distance."""
    distance = nodes_apart(keys, per_node, crossing.doc, crossing.src // per_node, crossing.dst // per_node)
    crossing, stages = _numbered_rounds(replace(crossing, stage=distance).sorted_by_slot())
    turn = min(prefetch, max(stages, 1)) + 1
    stage_step, slot = 1 + inner + np.arange(stages), _slots(1 + inner, stages, turn)
    reused = stages > turn
    start = _posted(stage_step + 1, turn, 0)
    back_done = stage_step + 1 if reused else np.minimum(stage_step + 2, inner + stages + 1)
    hop = Hop(crossing, start, stage_step - 1, stage_step + 1, back_done, np.zeros_like(stage_step), slot)
    steps = 1 + inner + stages
    return [hop], [Buffer(crossing, stage_step, slot)], steps, steps


def _routed_hops(
    inner: int, needs: NeededTokens, held: KvOwners, keys: Layout, topology: Topology, prefetch: int
) -> tuple[list[Hop], list[Buffer], int, int]:
    """Return the hops with which blocks cross to a node once and are forwarded inside it."""
    *routes, used = route(needs, held, keys, topology.nodes, topology.ranks_per_node)
    known = np.unique(routes[-1].stage)
    stages = len(known)
    if not stages:
        return [], [], 1 + inner, 1 + inner
    dispatch, cross, helped, forward, resident = (_numbered_rounds(fetches, known)[0] for fetches in routes)
    help_first, prefetch = int(len(dispatch) > 0), min(prefetch, stages)
    # A stage is computed in this step; it is passed on in the steps before.
    stage_step = max(1 + inner, 1 + prefetch + help_first) + np.arange(stages)
    home = stage_step + 2 + CROSSING_STEPS  # helpers give gradients to owners
    turn_s, turn_r, turn_h = (
        min(prefetch + more, stages) for more in (1, 1 + 2 * CROSSING_STEPS, 3 + 2 * CROSSING_STEPS)
    )
    in_s, in_r = _slots(1 + inner, stages, turn_s), _slots(1 + inner + turn_s, stages, turn_r)
    crosses = _posted(home - 1, turn_r, help_first)
    zero = np.zeros(stages, np.int64)
    hops = [
        Hop(cross, crosses, stage_step - prefetch - 1, stage_step + 2, home - 1, zero, in_r),
        Hop(forward, stage_step - prefetch, stage_step - 1, stage_step + 1, stage_step + 1, in_r, in_s),
    ]
    if help_first:
        in_h = _slots(1 + inner + turn_s + turn_r, stages, turn_h)
        hops += [
            Hop(dispatch, crosses - 1, crosses - 1, home, home, zero, in_h),
            Hop(helped, crosses, stage_step - prefetch - 1, stage_step + 2, home - 1, in_h, in_r),
        ]
    buffers = [Buffer(forward, stage_step, in_s), Buffer(resident, stage_step, in_r, used)]
    return hops, buffers, int(stage_step[-1]) + 1, int(home[-1]) - (not help_first)


def _posted(left: np.ndarray, turn: int, earliest: int) -> np.ndarray:
    """Return the step in which each stage is posted: when the stage `turn` before it has left the same slot."""
    start = np.full(len(left), earliest)
    start[turn:] = left[:-turn] if turn < len(left) else left[:0]
    return start


def _numbered_rounds(fetches: KvFetches, known: np.ndarray | None = None) -> tuple[KvFetches, int]:
    """Number the rounds from 0 without the empty ones; return the number of rounds, too."""
    known = np.flatnonzero(np.bincount(fetches.stage)) if known is None else known
    if np.array_equal(known, np.arange(len(known))):
        return fetches, len(known)
    return replace(fetches, stage=np.searchsorted(known, fetches.stage)), len(known)


def direct_schedule(fetches: KvFetches, prefetch: int) -> Schedule:
    """Return steps and slots of fetches from every owner: round r is computed in step r + 1, is posted `prefetch` steps
    before, and its gradients leave in the step after.

    Args:
        fetches: sorted by target and round; rounds that bring nothing to any rank are left out.
        prefetch: rounds in flight while one is computed; slots are one more.
    """
    fetches, rounds = _numbered_rounds(fetches)
    number = np.arange(rounds)
    slot = _slots(1, rounds, prefetch + 1)
    posted, computed, last = np.maximum(0, number + 1 - prefetch), number + 1, rounds + 1
    returned = np.minimum(computed + prefetch, last)  # when the slot is filled again
    hop = Hop(fetches, posted, number, computed + 1, returned, np.zeros_like(slot), slot)
    return Schedule([hop], [Buffer(fetches, computed, slot)], rounds + 1, last)


# Routes of keys and values between nodes: over which NICs they cross, once to each node that needs them.
#
# A block that ranks of another node need crosses once, from a rank of the owner's node (a helper) to the rank of that
# node with the same local number (the relay), which passes it on. The helper is the owner itself, as long as the node's
# ranks have about the same to send; where one has much more than the others, what is above its share first goes to
# neighbours, whose NICs are idle::
#
#     node 0   rank 0 (owner) --------------- cross ---------------> rank 4 (relay) --> ranks 5, 6, 7   node 1
#                   \--- dispatch ---> rank 1 --- cross ----------> rank 5 (relay) --> ranks 4, 6, 7
#
# Gradients go back the same way, and are summed at the relays. (The routing layer of Zeppelin, 2509.21841, section 3.)


#: Where ranks that share the document are this part of the node's ranks or more, only they forward it or help to send
#: it: the others have work of their own and would be waited for.
MIN_SHARING_RANKS = 0.5

#: What one NIC sends to another node is spread over the node's NICs if it is above this multiple of an equal part.
SPREAD_ABOVE = 1.2


#: Fetches of all stages; a stage is the distance from node to node, counted among the nodes of the document:
#:
#: * dispatch: from owners to helpers of their node, into slot H;
#: * cross: from owners (slot 0) to relays, into slot R;
#: * helped: from helpers (slot H) to relays, into slot R;
#: * forward: from relays (slot R) to ranks of their node, into slot S;
#: * resident: what relays hold in slot R; dst is the relay, rows as in the slot;
#:
#: and where the relay itself needs what is resident, bool [resident].
Routes = tuple[KvFetches, KvFetches, KvFetches, KvFetches, KvFetches, np.ndarray]


def route(needs: NeededTokens, held: KvOwners, keys: Layout, nodes: int, per_node: int) -> Routes:
    """Return the routes of everything that crosses between nodes.

    Args:
        needs: what each rank needs, of documents that several ranks hold.
        held: owners of these documents.
        keys: layout of the keys.
        nodes, per_node: number of nodes, and of ranks on each.
    """
    node_of = np.arange(nodes * per_node) // per_node
    of_nodes = NeededTokens.union(node_of[needs.taker], needs.first, needs.last, keys.documents.tokens)
    crossing = held.fetch_list(of_nodes)  # dst is a node
    crossing = crossing[crossing.src // per_node != crossing.dst]
    stage = nodes_apart(keys, per_node, crossing.doc, crossing.src // per_node, crossing.dst)
    parts, helper = _helpers(replace(crossing, stage=stage), nodes, per_node)

    relayed = replace(parts, dst=_relays(parts.doc, parts.dst, helper % per_node, keys, per_node))
    order = np.lexsort((relayed.start, relayed.dst, relayed.stage))
    resident, helper = relayed[order].packed(), helper[order]

    own = helper == resident.src
    helped = resident[~own]
    dispatch = replace(helped, dst=helper[~own])
    order = np.lexsort((dispatch.start, dispatch.dst, dispatch.stage))
    dispatch = dispatch[order].packed()
    onward = replace(helped[order], src=dispatch.dst, src_row=dispatch.dst_row)
    onward = onward[np.lexsort((onward.dst_row, onward.dst, onward.stage))]

    at_relay = KvOwners(resident.spans_of(resident.dst), resident.dst_row, resident.dst // per_node)
    forward = at_relay.fetch_list(needs, node_of)
    # The run in its relay's slot that each forwarded run is a part of.
    stride = int(resident.stop.max(initial=0)) + 1
    key = (resident.dst // per_node) * stride + resident.start
    order = np.argsort(key, kind="stable")
    wanted = (forward.src // per_node) * stride + forward.start
    source = order[np.searchsorted(key[order], wanted, "right") - 1]
    used = np.zeros(len(resident), bool)
    used[source[forward.src == forward.dst]] = True
    forward = replace(forward, stage=resident.stage[source])
    forward = forward[forward.src != forward.dst].sorted_by_slot()
    return dispatch, resident[own], onward, forward, resident, used


def _relays(doc: np.ndarray, node: np.ndarray, seat: np.ndarray, keys: Layout, per_node: int) -> np.ndarray:
    """Return the rank of a node that receives each run: the one with the helper's local number (seat), or, where enough
    ranks of the node share the document, one of these."""
    held = np.unique(keys.spans["doc"] * keys.ranks + keys.spans["rank"])
    first = np.searchsorted(held, doc * keys.ranks + node * per_node)
    count = np.searchsorted(held, doc * keys.ranks + (node + 1) * per_node) - first
    member = held[np.minimum(first + seat % np.maximum(count, 1), len(held) - 1)] - doc * keys.ranks
    return np.where(count >= MIN_SHARING_RANKS * per_node, member, node * per_node + seat)


def _helpers(crossing: KvFetches, nodes: int, per_node: int) -> tuple[KvFetches, np.ndarray]:
    """Return the fetches, cut where needed, and the rank of the owner's node over whose NIC each one crosses.

    For each (stage, source node): an owner sends at most an equal part of the total over all NICs if it has more than
    SPREAD_ABOVE times that; the rest, in order, fills the ranks that have less. Where the owners are MIN_SHARING_RANKS
    of the node or more, only their NICs count.
    """
    parts = crossing[np.lexsort((crossing.start, crossing.src, crossing.stage))]
    if not len(parts) or per_node == 1:
        return parts, parts.src
    length = parts.rows
    case = parts.stage * nodes + parts.src // per_node
    load = np.zeros((int(case.max()) + 1, per_node), np.int64)
    np.add.at(load, (case, parts.src % per_node), length)
    owners = (load > 0).sum(1)
    few = owners < MIN_SHARING_RANKS * per_node
    share = -(-load.sum(1) // np.where(few, per_node, np.maximum(owners, 1)))
    uneven = load.max(1) > SPREAD_ABOVE * share
    first = group_starts(case, parts.src)
    before = np.cumsum(length) - length
    offset = before - np.repeat(before[first], np.diff(np.append(first, len(parts))))  # rows of (stage, owner) before
    limit = np.where(uneven[case], share[case], np.iinfo(np.int64).max)

    kept_rows = np.clip(limit - offset, 0, length)
    stays, moves = kept_rows > 0, kept_rows < length
    if not moves.any():
        return parts, parts.src
    stay = parts[stays].shortened(np.zeros(1, np.int64), kept_rows[stays])
    surplus = parts[moves].shortened(kept_rows[moves], (length - kept_rows)[moves])
    # The surplus of each case, in order, is laid onto the free room of the case's ranks, in order, and cut at its
    # borders.
    case, length = case[moves], surplus.rows
    takes = uneven[:, None] & (few[:, None] | (load > 0))
    room = np.where(takes, np.maximum(share[:, None] - load, 0), 0)
    stride = int(max(room.sum(1).max(), length.sum())) + 1  # cases lie apart on one axis
    before, first = np.cumsum(length) - length, group_starts(case)
    begin = before - np.repeat(before[first], np.diff(np.append(first, len(case)))) + case * stride
    room_begin = np.cumsum(room, 1) - room + np.arange(len(room))[:, None] * stride
    source, seat, low, high = intersect_runs(begin, begin + length, room_begin.ravel(), (room_begin + room).ravel())
    moved = surplus[source].shortened(low - begin[source], high - low)
    helper = (seat // per_node % nodes) * per_node + seat % per_node
    return KvFetches.concatenate([stay, moved]), np.concatenate([stay.src, helper])
