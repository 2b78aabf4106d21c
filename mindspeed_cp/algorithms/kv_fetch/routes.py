r"""Routes of keys and values between nodes: over which NICs they cross, once to each node that needs them.

A block that ranks of another node need crosses once, from a rank of the owner's node (a helper) to the rank of that
node with the same local number (the relay), which passes it on. The helper is the owner itself, as long as the node's
ranks have about the same to send; where one has much more than the others, what is above its share first goes to
neighbours, whose NICs are idle::

    node 0   rank 0 (owner) --------------- cross ---------------> rank 4 (relay) --> ranks 5, 6, 7   node 1
                  \--- dispatch ---> rank 1 --- cross ----------> rank 5 (relay) --> ranks 4, 6, 7

Gradients go back the same way, and are summed at the relays. (The routing layer of Zeppelin, 2509.21841, section 3.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from mindspeed_cp.algorithms.kv_fetch.needs import (
    KvFetches,
    KvOwners,
    NeededTokens,
    nodes_apart,
)
from mindspeed_cp.layout import Layout, intersect_runs
from mindspeed_cp.layout.runs import group_starts

#: Where ranks that share the document are this part of the node's ranks or more, only they forward it or help to send
#: it: the others have work of their own and would be waited for.
MIN_SHARING_RANKS = 0.5

#: What one NIC sends to another node is spread over the node's NICs if it is above this multiple of an equal part.
SPREAD_ABOVE = 1.2


@dataclass(frozen=True, eq=False)
class Routes:
    """Fetches of all stages. A stage is the distance from node to node,
    counted among the nodes of the document.

    Attributes:
        dispatch: from owners to helpers of their node, into slot H.
        cross: from owners (slot 0) to relays, into slot R.
        crossing_helped: from helpers (slot H) to relays, into slot R.
        forward: from relays (slot R) to ranks of their node, into slot S.
        resident: what relays hold in slot R; dst is the relay, rows as in the slot.
        used: True if the relay itself needs it, bool [resident].
    """

    dispatch: KvFetches
    cross: KvFetches
    crossing_helped: KvFetches
    forward: KvFetches
    resident: KvFetches
    used: np.ndarray


def route(needs: NeededTokens, held: KvOwners, keys: Layout, nodes: int, per_node: int) -> Routes:
    """Return the routes of everything that crosses between nodes.

    Args:
        needs: what each rank needs, of documents that several ranks hold.
        held: owners of these documents.
        keys: layout of the keys.
        nodes, per_node: number of nodes, and of ranks on each.
    """
    node_of = np.arange(nodes * per_node) // per_node
    crossing = held.fetch_list(needs.grouped(node_of, keys.documents.tokens))  # dst is a node
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
    source = _resident_of(resident, forward, per_node)
    used = np.zeros(len(resident), bool)
    used[source[forward.src == forward.dst]] = True
    forward = replace(forward, stage=resident.stage[source])
    forward = forward[forward.src != forward.dst].sorted_by_slot()
    return Routes(dispatch, resident[own], onward, forward, resident, used)


def _relays(doc: np.ndarray, node: np.ndarray, seat: np.ndarray, keys: Layout, per_node: int) -> np.ndarray:
    """Return the rank of a node that receives each run: the one with the helper's local number (seat), or, where enough
    ranks of the node share the document, one of these."""
    held = np.unique(keys.spans["doc"] * keys.ranks + keys.spans["rank"])
    first = np.searchsorted(held, doc * keys.ranks + node * per_node)
    count = np.searchsorted(held, doc * keys.ranks + (node + 1) * per_node) - first
    member = held[np.minimum(first + seat % np.maximum(count, 1), len(held) - 1)] - doc * keys.ranks
    return np.where(count >= MIN_SHARING_RANKS * per_node, member, node * per_node + seat)


def _resident_of(resident: KvFetches, forward: KvFetches, per_node: int) -> np.ndarray:
    """Return, for each forwarded run of tokens, the index of the run in its relay's slot that it is a part of."""
    stride = int(resident.stop.max(initial=0)) + 1
    key = (resident.dst // per_node) * stride + resident.start
    order = np.argsort(key, kind="stable")
    wanted = (forward.src // per_node) * stride + forward.start
    return order[np.searchsorted(key[order], wanted, "right") - 1]


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
    stay = parts[stays].shortened(np.zeros(1, np.int64), kept_rows[stays])
    surplus = parts[moves].shortened(kept_rows[moves], (length - kept_rows)[moves])
    moved, helper = _fill(surplus, case[moves], load, share, uneven, few, per_node, nodes)
    return KvFetches.concatenate([stay, moved]), np.concatenate([stay.src, helper])


def _fill(
    surplus: KvFetches,
    case: np.ndarray,
    load: np.ndarray,
    share: np.ndarray,
    uneven: np.ndarray,
    few: np.ndarray,
    per_node: int,
    nodes: int,
) -> tuple[KvFetches, np.ndarray]:
    """Lay the surplus of each case, in order, onto the free room of the case's ranks, in order; return the fetches, cut
    at the borders of that room, and the rank that sends each."""
    if not len(surplus):
        return surplus, surplus.src
    takes = uneven[:, None] & (few[:, None] | (load > 0))
    room = np.where(takes, np.maximum(share[:, None] - load, 0), 0)
    length = surplus.rows
    stride = int(max(room.sum(1).max(), length.sum())) + 1  # cases lie apart on one axis
    before = np.cumsum(length) - length
    first = group_starts(case)
    before = before - np.repeat(before[first], np.diff(np.append(first, len(case))))
    begin = before + case * stride
    room_begin = np.cumsum(room, 1) - room + np.arange(len(room))[:, None] * stride
    source, seat, low, high = intersect_runs(begin, begin + length, room_begin.ravel(), (room_begin + room).ravel())
    moved = surplus[source].shortened(low - begin[source], high - low)
    return moved, (seat // per_node % nodes) * per_node + seat % per_node
