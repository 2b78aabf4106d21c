"""All-gather of keys and values by blocks, as collective libraries bring it about: each block crosses to a node once.

Rank r of a node gets the blocks of the ranks r of all other nodes over its own NIC, one node after the other, and
passes each on to the others of its node while the next one crosses. All attention but a rank's own block follows when
everything is there; gradients return the same way, summed at the relays::

    step            0            1            2           3            4
    computes        own                                   all others
    in the node     own blocks   node n - 1   node n - 2               gradients ...
    across          node n - 1   node n - 2
"""

from __future__ import annotations

import numpy as np

from mindspeed_cp import AttentionConfig, Documents, Topology
from mindspeed_cp.layout import Layout, zigzag
from mindspeed_cp.plan import Plan
from mindspeed_cp.plan.program import Program
from mindspeed_cp.plan.records import CONTENT, MESSAGE, ROW_RUN, Messages, sorted_contents


def build_gathered(
    documents: Documents, topology: Topology, attention: AttentionConfig, held: Layout | None = None
) -> Plan:
    """Return the plan of an all-gather over all ranks.

    Slot 1 has the blocks of all ranks one after the other; that of the rank itself stays empty, since slot 0 has it.

    Args:
        documents, topology, attention: as for the ring.
        held: which rank holds what; default: documents in equal zig-zag shares.
    """
    held = zigzag(documents, topology.ranks) if held is None else held
    nodes = topology.nodes
    computed = nodes if topology.ranks > 1 else 0  # the step in which all is there
    contents = _contents(held, computed)
    capacity = np.stack([held.token_counts, np.full(held.ranks, documents.tokens if computed else 0)], 1)
    there, back = _hops(held, topology, computed)
    none = Messages.empty()
    forward = Program(computed + 1, capacity, held, documents, attention, contents, held.spans, there, none)
    if not len(there):
        return Plan("gathered", attention, topology, held, held, held, held, forward, forward)
    last = int(back.items["done"].max()) + 1
    backward = Program(last, capacity, held, documents, attention, contents, held.spans, there, back)
    return Plan("gathered", attention, topology, held, held, held, held, forward, backward)


def _contents(held: Layout, computed: int) -> np.ndarray:
    """Return the contents: own blocks in step 0, all others in the step in which they are there."""
    n = held.ranks
    rank, block = np.divmod(np.arange(n * n), n)
    own = rank == block
    out = np.zeros(n * n, CONTENT)
    out["rank"], out["step"], out["slot"] = rank, np.where(own, 0, computed), np.where(own, 0, 1)
    out["row"] = np.where(own, 0, (np.cumsum(held.token_counts) - held.token_counts)[block])
    out["first"], out["count"] = held.span_offsets[block], np.diff(held.span_offsets)[block]
    return sorted_contents(out[out["count"] > 0])


def _hops(held: Layout, topology: Topology, computed: int) -> tuple[Messages, Messages]:
    """Return the hops of keys to their readers, and of gradients back."""
    n, per, nodes = topology.ranks, topology.ranks_per_node, topology.nodes
    rank = np.arange(n)
    there: list[np.ndarray] = []
    back: list[np.ndarray] = []

    def add(block: np.ndarray, src: np.ndarray, dst: np.ndarray, step: int, own: bool, home: int) -> None:
        """Add hops of blocks from src to dst in a step, and their gradients back from dst to src in step `home`."""
        for into, begin, ends, slots in ((there, step, (src, dst), (0 if own else 1, 1)),
                                         (back, home, (dst, src), (1, 0 if own else 1))):  # fmt: skip
            message = np.zeros(len(block), MESSAGE)
            message["start"] = message["done"] = begin
            message["src"], message["dst"], message["src_slot"], message["dst_slot"] = *ends, *slots
            message["first"] = block  # for now; its runs follow
            into.append(message)

    for other in range(1, per):
        peer = rank // per * per + (rank + other) % per
        add(rank, rank, peer, 0, True, computed + 1)
        for far in range(1, nodes):
            block = (rank + far * per) % n  # came over this rank's NIC in step far - 1
            add(block, rank, peer, far, False, computed + far)
    for far in range(1, nodes):
        add(rank, rank, (rank - far * per) % n, far - 1, True, computed + far + 1)
    return _messages(there, held), _messages(back, held)


def _messages(tables: list[np.ndarray], held: Layout) -> Messages:
    """Return the messages with the rows of each block: in slot 0 from 0 on, in slot 1 at its place."""
    if not tables:
        return Messages.empty()
    items = np.concatenate(tables)
    rows = held.token_counts
    first_row = np.cumsum(rows) - rows
    block = items["first"].copy()
    keep = rows[block] > 0
    items, block = items[keep], block[keep]
    runs = np.zeros(len(items), ROW_RUN)
    runs["rows"] = items["rows"] = rows[block]
    for end in ("src", "dst"):
        runs[end + "_row"] = np.where(items[end + "_slot"] == 0, 0, first_row[block])
    items["first"], items["count"] = np.arange(len(items)), 1
    return Messages(items, runs).in_global_order()
