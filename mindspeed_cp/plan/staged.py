"""KV exchange in stages: inside the node first, then node by node, each block over the wire once.

Every rank asks its own node's ranks for what it needs in up to two rounds (the first and the second halves of
documents, so that the first round is there early), and the other nodes in stages, one for each distance. All keys of a
round or stage lie in one slot in token order, so that they make as few tiles as can be. With routing
(:mod:`mindspeed_cp.plan.routes`) a block crosses to a node once::

    step            0           1           2           3           4
    computes        own         round 1     round 2     stage 1     stage 2
    in the node     round 1     round 2     forward 1   forward 2
    across          stage 1 ..............  ........ stage 2 ...

In the backward a stage's gradients go back by the same way, hop by hop, summed at the relays, and shares of the own
block are kept for the steps in which the last of them travel.
"""

from __future__ import annotations

import numpy as np

from mindspeed_cp.layout import Layout
from mindspeed_cp.plan.config import AttentionConfig, Topology
from mindspeed_cp.plan.halves import own_block_in_shares, own_work
from mindspeed_cp.plan.needs import Held, Runs, as_spans, begins, filled, node_distance, together, visible_runs
from mindspeed_cp.plan.placement import visible_pairs
from mindspeed_cp.plan.program import Program
from mindspeed_cp.plan.records import CONTENT, Messages, sorted_contents
from mindspeed_cp.plan.schedule import schedule

#: Of all work of a rank, this part of its own block, and half of the block at most, waits in the backward for the steps
#: in which the last gradients travel.
TAIL = 0.25


def staged(
    queries: Layout,
    keys: Layout,
    attention: AttentionConfig,
    topology: Topology,
    routing: bool = True,
    prefetch: int = 1,
    beside: np.ndarray | None = None,
) -> tuple[Program, Program]:
    """Forward and backward program.

    Args:
        queries, keys: where they are.
        attention: what is computed.
        topology: which ranks are on one node.
        routing: blocks cross to a node once and are passed on inside it; else each rank fetches what it needs itself.
        prefetch: stages on their way while one is computed, 1 or more.
        beside: pairs that each rank computes in other parts of the plan, fp64 [ranks]. Without messages the own block
            then comes in two halves, beside which the other parts' moves travel.
    """
    shared = _on_several_ranks(queries) | _on_several_ranks(keys)
    needs = visible_runs(queries, keys, attention, shared[queries.spans["doc"]])
    held = Held.of(keys, shared[keys.spans["doc"]])
    rounds, crossing = _rounds(needs, held, keys, topology)
    times = schedule(rounds, crossing, needs, held, keys, topology, routing, prefetch)
    hops, steps, last = times.hops, times.steps, times.last

    n = topology.ranks
    own = np.zeros(n, CONTENT)
    own["rank"], own["first"], own["count"] = np.arange(n), keys.bounds[:-1], np.diff(keys.bounds)
    table, contents = [keys.spans], [own[own["count"] > 0]]
    total = len(keys.spans)
    capacity = np.zeros((n, 1 + max((int(h.dst_slot.max(initial=0)) for h in hops), default=0)), np.int64)
    capacity[:, 0] = keys.token_counts
    for buffer in times.buffers:
        pieces = buffer.pieces
        first = begins(pieces["stage"], pieces["dst"])
        found = np.zeros(len(first), CONTENT)
        stage = pieces["stage"][first]
        found["rank"], found["step"], found["slot"] = pieces["dst"][first], buffer.step[stage], buffer.slot[stage]
        found["first"], found["count"] = total + first, np.diff(np.append(first, len(pieces)))
        table.append(as_spans(pieces, pieces["dst"]))
        total += len(pieces)
        contents.append(found[np.logical_or.reduceat(buffer.needed, first)] if len(first) else found)
    for hop in hops:
        slot = hop.dst_slot[hop.pieces["stage"]] if len(hop.pieces) else np.zeros(0, np.int64)
        rows = hop.pieces["dst_row"] + hop.pieces["stop"] - hop.pieces["start"]
        np.maximum.at(capacity, (hop.pieces["dst"], slot), rows)

    spans, parts = np.concatenate(table), sorted_contents(np.concatenate(contents))
    fetch = together([hop.fetch() for hop in hops], n)
    f_steps = steps
    own_pairs = own_work(queries, keys, attention)
    if beside is not None and not len(fetch):
        parts, spans = own_block_in_shares(queries, keys, attention, parts, spans, [(0, 0.5), (1, 0.5)])
        f_steps = 2
    documents = keys.documents
    forward = Program(f_steps, capacity, queries, documents, attention, parts, spans, fetch, Messages.none())
    if not len(fetch):
        return forward, forward
    reduce = together([hop.reduce() for hop in hops], n)
    total_pairs = visible_pairs(queries.documents, documents, attention).sum()
    if beside is not None:
        total_pairs += beside.sum()
    late = np.minimum(0.5, TAIL * total_pairs / n / np.maximum(own_pairs, 1.0))
    shares = [(0, 1 - late), *((step, late / (last + 1 - steps)) for step in range(steps, last + 1))]
    parts, spans = own_block_in_shares(queries, keys, attention, parts, spans, shares)
    return forward, Program(last + 1, capacity, queries, documents, attention, parts, spans, fetch, reduce)


def _on_several_ranks(layout: Layout) -> np.ndarray:
    """Documents that more than one rank holds, bool [documents]."""
    spans, none = layout.spans, layout.ranks
    low, high = np.full(len(layout.documents), none), np.full(len(layout.documents), -1)
    np.minimum.at(low, spans["doc"], spans["rank"])
    np.maximum.at(high, spans["doc"], spans["rank"])
    return high > low


def _rounds(needs: Runs, held: Held, keys: Layout, topology: Topology) -> tuple[np.ndarray, np.ndarray]:
    """What ranks need of their own node, in two rounds (stage 0 and 1), and what they need of other nodes; sorted by
    stage, target and token, rows filled."""
    pieces = held.taken(needs)
    pieces = pieces[pieces["src"] != pieces["dst"]]
    per = topology.ranks_per_node
    near = pieces["src"] // per == pieces["dst"] // per
    inside, across = pieces[near], pieces[~near]
    middle = keys.documents.offsets[inside["doc"]] + (keys.documents.lengths[inside["doc"]] + 1) // 2
    inside = _cut_at(inside, middle)
    inside = filled(inside[np.lexsort((inside["start"], inside["dst"], inside["stage"]))])
    across["stage"] = node_distance(keys, per, across["doc"], across["src"] // per, across["dst"] // per)
    across = filled(across[np.lexsort((across["start"], across["dst"], across["stage"]))])
    return inside, across


def _cut_at(pieces: np.ndarray, middle: np.ndarray) -> np.ndarray:
    """What lies before a token of the document in stage 0, the rest in stage 1."""
    low, high = pieces.copy(), pieces.copy()
    low["stop"] = np.minimum(low["stop"], middle)
    high["start"] = np.maximum(high["start"], middle)
    high["src_row"] += high["start"] - pieces["start"]
    high["stage"] = 1
    both = np.concatenate([low, high])
    return both[both["stop"] > both["start"]]
