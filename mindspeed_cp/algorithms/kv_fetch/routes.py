r"""Over which NICs keys and values cross from node to node: once to each node that needs them, then on inside it.

A block that ranks of another node need crosses once, from a rank of the owner's node (a helper) to the rank of that
node with the same local number (the relay), which passes it on. The helper is the owner itself, as long as the node's
ranks have about the same to send; where one has much more than the others, what is above its share first goes to
neighbours, whose NICs are idle::

    node 0   rank 0 (owner) --------------- cross ---------------> rank 4 (relay) --> ranks 5, 6, 7   node 1
                  \--- dispatch ---> rank 1 --- cross ----------> rank 5 (relay) --> ranks 4, 6, 7

Gradients go back the same way, and are summed at the relays. (The routing layer of Zeppelin, 2509.21841, section 3.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mindspeed_cp.layout import Layout, overlaps
from mindspeed_cp.plan.needs import PIECE, Held, Runs, as_spans, begins, filled, node_distance

#: Only ranks that share the document pass it on, or help to send it, where they are this part of the node's ranks or
#: more: others have their own work, and would be waited for.
MEMBERS = 0.5

#: A NIC's part of what its node sends to another is evened out when it is above this multiple of an equal part.
UNEVEN = 1.2


@dataclass(frozen=True, eq=False)
class Routes:
    """Four lists of pieces (records of dtype PIECE), of all stages. A stage is the distance from node to node, counted
    among the nodes of the document.

    Attributes:
        dispatch: from owners to helpers of their node, into slot H.
        cross: from owners (slot 0) to relays, into slot R.
        cross_helped: from helpers (slot H) to relays, into slot R.
        forward: from relays (slot R) to ranks of their node, into slot S.
        resident: what relays hold in slot R; dst is the relay, rows as in the slot.
        used: of those, whether the relay itself needs it, bool [resident].
    """

    dispatch: np.ndarray
    cross: np.ndarray
    cross_helped: np.ndarray
    forward: np.ndarray
    resident: np.ndarray
    used: np.ndarray


def route(needs: Runs, held: Held, keys: Layout, nodes: int, per_node: int, spread: bool = True) -> Routes:
    """Routes of all that crosses between nodes.

    Args:
        needs: what each rank sees, of documents that several ranks hold.
        held: where it is.
        keys: its layout.
        nodes, per_node: the ranks, numbered node by node.
        spread: even out what a node's NICs carry.
    """
    node_of = np.arange(nodes * per_node) // per_node
    crossing = held.taken(needs.by(node_of, keys.documents.tokens))  # dst is a node
    crossing = crossing[crossing["src"] // per_node != crossing["dst"]]
    crossing["stage"] = node_distance(keys, per_node, crossing["doc"], crossing["src"] // per_node, crossing["dst"])
    parts, helper = _helpers(crossing, nodes, per_node) if spread else (crossing, crossing["src"].copy())

    relayed = parts.copy()  # what arrives: sorted by stage, relay, token
    relayed["dst"] = _relays(parts["doc"], parts["dst"], helper % per_node, keys, per_node)
    order = np.lexsort((relayed["start"], relayed["dst"], relayed["stage"]))
    resident, helper = filled(relayed[order]), helper[order]

    own = helper == resident["src"]
    helped = resident[~own].copy()
    dispatch = helped.copy()
    dispatch["dst"] = helper[~own]
    order = np.lexsort((dispatch["start"], dispatch["dst"], dispatch["stage"]))
    dispatch = filled(dispatch[order])
    onward = helped[order]
    onward["src"], onward["src_row"] = dispatch["dst"], dispatch["dst_row"]

    at_relay = Held(as_spans(resident, resident["dst"]), resident["dst_row"], resident["dst"] // per_node)
    forward = at_relay.taken(needs, node_of)
    stage_of = _stage_lookup(resident, forward, per_node)
    forward["stage"] = resident["stage"][stage_of]
    used = np.zeros(len(resident), bool)
    used[stage_of[forward["src"] == forward["dst"]]] = True
    forward = forward[forward["src"] != forward["dst"]]
    forward = filled(forward[np.lexsort((forward["start"], forward["dst"], forward["stage"]))])
    return Routes(dispatch, resident[own], onward, forward, resident, used)


def _relays(doc: np.ndarray, node: np.ndarray, seat: np.ndarray, keys: Layout, per_node: int) -> np.ndarray:
    """The rank of a node that receives a piece: the one with the helper's local number (seat), or, where enough ranks
    of the node share the document, one of these."""
    held = np.unique(keys.spans["doc"] * keys.ranks + keys.spans["rank"])
    first = np.searchsorted(held, doc * keys.ranks + node * per_node)
    count = np.searchsorted(held, doc * keys.ranks + (node + 1) * per_node) - first
    member = held[np.minimum(first + seat % np.maximum(count, 1), len(held) - 1)] - doc * keys.ranks
    return np.where(count >= MEMBERS * per_node, member, node * per_node + seat)


def _stage_lookup(resident: np.ndarray, forward: np.ndarray, per_node: int) -> np.ndarray:
    """For each forwarded piece the number of the resident one that it is of: that of its relay with its token."""
    stride = int(resident["stop"].max(initial=0)) + 1
    key = (resident["dst"] // per_node) * stride + resident["start"]
    order = np.argsort(key, kind="stable")
    wanted = (forward["src"] // per_node) * stride + forward["start"]
    return order[np.searchsorted(key[order], wanted, "right") - 1]


def _helpers(crossing: np.ndarray, nodes: int, per_node: int) -> tuple[np.ndarray, np.ndarray]:
    """Pieces, cut where needed, and the rank of the owner's node over whose NIC each one crosses.

    For each (stage, source node) apart: an owner keeps what is no more than an equal part of all NICs, where it is
    UNEVEN times above that; the rest, in order, fills the ranks that are below it. Where owners are MEMBERS of the node
    or more, only their NICs count.
    """
    order = np.lexsort((crossing["start"], crossing["src"], crossing["stage"]))
    parts = crossing[order]
    if not len(parts) or per_node == 1:
        return parts, parts["src"].copy()
    length = parts["stop"] - parts["start"]
    case = parts["stage"] * nodes + parts["src"] // per_node
    load = np.zeros((int(case.max()) + 1, per_node), np.int64)
    np.add.at(load, (case, parts["src"] % per_node), length)
    owners = (load > 0).sum(1)
    few = owners < MEMBERS * per_node
    share = -(-load.sum(1) // np.where(few, per_node, np.maximum(owners, 1)))
    uneven = load.max(1) > UNEVEN * share
    first = begins(case, parts["src"])
    size = np.diff(np.append(first, len(parts)))
    before = np.cumsum(length) - length
    at = before - np.repeat(before[first], size)  # rows of the same owner and stage before this piece
    keeps = np.where(uneven[case], share[case], np.iinfo(np.int64).max)

    kept = at < keeps
    cut = kept & (at + length > keeps)
    stay, helper_of_stay = parts[kept].copy(), parts["src"][kept]
    over = cut[kept]
    stay["stop"][over] = stay["start"][over] + (keeps - at)[kept][over]
    surplus = parts[~kept | cut].copy()
    part_cut = cut[~kept | cut]
    begin = np.where(part_cut, (keeps - at)[~kept | cut], 0)
    surplus["start"] += begin
    surplus["src_row"] += begin
    moved, helper = _fill(surplus, case[~kept | cut], load, share, uneven, few, per_node, nodes)
    return np.concatenate([stay, moved]), np.concatenate([helper_of_stay, helper])


def _fill(
    surplus: np.ndarray,
    case: np.ndarray,
    load: np.ndarray,
    share: np.ndarray,
    uneven: np.ndarray,
    few: np.ndarray,
    per_node: int,
    nodes: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Surplus pieces, one behind the other, onto the free places of their case, one behind the other."""
    if not len(surplus):
        return surplus, surplus["src"].copy()
    takes = uneven[:, None] & (few[:, None] | (load > 0))
    room = np.where(takes, np.maximum(share[:, None] - load, 0), 0)
    length = surplus["stop"] - surplus["start"]
    stride = int(max(room.sum(1).max(), length.sum())) + 1  # cases lie apart on one axis
    before = np.cumsum(length) - length
    first = begins(case)
    before = before - np.repeat(before[first], np.diff(np.append(first, len(case))))
    begin = before + case * stride
    place = np.cumsum(room, 1) - room + np.arange(len(room))[:, None] * stride
    of, seat, a, b = overlaps(begin, begin + length, place.ravel(), (place + room).ravel())
    out = surplus[of]
    out["start"] += a - begin[of]
    out["src_row"] += a - begin[of]
    out["stop"] = out["start"] + b - a
    return out, (seat // per_node % nodes) * per_node + seat % per_node


def no_pieces() -> np.ndarray:
    """An empty list of pieces."""
    return np.zeros(0, PIECE)
