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

from dataclasses import dataclass

import numpy as np

from mindspeed_cp.layout import Layout
from mindspeed_cp.plan.config import AttentionConfig, Topology
from mindspeed_cp.plan.halves import own_block_in_shares
from mindspeed_cp.plan.needs import PIECE, Held, Runs, as_spans, begins, filled, messages_of, together, visible_runs
from mindspeed_cp.plan.program import Program
from mindspeed_cp.plan.records import CONTENT, Messages, sorted_contents
from mindspeed_cp.plan.routes import route

#: Steps that a block may take to cross to another node.
CROSSING = 2

#: Shares of the own block in the first step of the backward, and in those after the last stage.
FIRST_SHARE = 0.5


@dataclass(frozen=True)
class Hop:
    """Messages of one kind.

    Attributes:
        pieces: what moves.
        start, done: steps of each stage in which it is posted and finished, int64 [stages + 1].
        back, back_done: the same for the gradients, on the way back.
        src_slot, dst_slot: slots of each stage, int64 [stages + 1].
    """

    pieces: np.ndarray
    start: np.ndarray
    done: np.ndarray
    back: np.ndarray
    back_done: np.ndarray
    src_slot: np.ndarray
    dst_slot: np.ndarray

    def fetch(self) -> Messages:
        """Keys and values."""
        return self._messages(self.start, self.done)

    def reduce(self) -> Messages:
        """Gradients."""
        return self._messages(self.back, self.back_done).reversed()

    def _messages(self, start: np.ndarray, done: np.ndarray) -> Messages:
        stage = self.pieces["stage"]
        return messages_of(self.pieces, start[stage], done[stage], self.src_slot[stage], self.dst_slot[stage])


class _Slots:
    """Hands out slot numbers: for each kind of buffer as many as are in use at once."""

    def __init__(self) -> None:
        self.count = 1

    def of(self, stages: np.ndarray, turn: int) -> np.ndarray:
        """Slot of each stage; `turn` of them are in use at once."""
        used = int(stages.max(initial=-1)) + 1
        slots = self.count + np.arange(used) % max(1, min(turn, used))
        self.count += min(turn, used)
        return slots


def staged(
    queries: Layout,
    keys: Layout,
    attention: AttentionConfig,
    topology: Topology,
    routing: bool = True,
    prefetch: int = 1,
    tail: bool = False,
) -> tuple[Program, Program]:
    """Forward and backward program.

    Args:
        queries, keys: where they are.
        attention: what is computed.
        topology: which ranks are on one node.
        routing: blocks cross to a node once and are passed on inside it; else each rank fetches what it needs itself.
        prefetch: stages on their way while one is computed, 1 or more.
        tail: the forward, too, keeps half of the own block for a step of its own at the end, beside which another part
            of a plan can send its outputs.
    """
    shared = _on_several_ranks(queries) | _on_several_ranks(keys)
    needs = visible_runs(queries, keys, attention, shared[queries.spans["doc"]])
    held = Held.of(keys, shared[keys.spans["doc"]])
    rounds, crossing = _rounds(needs, held, keys, topology)
    hops, contents_of, steps, last = _schedule(rounds, crossing, needs, held, keys, topology, routing, prefetch)

    n = topology.ranks
    own = np.zeros(n, CONTENT)
    own["rank"], own["first"], own["count"] = np.arange(n), keys.bounds[:-1], np.diff(keys.bounds)
    table, contents = [keys.spans], [own[own["count"] > 0]]
    total = len(keys.spans)
    capacity = np.zeros((n, 1 + max((int(h.dst_slot.max(initial=0)) for h in hops), default=0)), np.int64)
    capacity[:, 0] = keys.token_counts
    for pieces, step, slot, computed in contents_of:
        first = begins(pieces["stage"], pieces["dst"])
        found = np.zeros(len(first), CONTENT)
        stage = pieces["stage"][first]
        found["rank"], found["step"], found["slot"] = pieces["dst"][first], step[stage], slot[stage]
        found["first"], found["count"] = total + first, np.diff(np.append(first, len(pieces)))
        table.append(as_spans(pieces, pieces["dst"]))
        total += len(pieces)
        contents.append(found[np.logical_or.reduceat(computed, first)] if len(first) else found)
    for hop in hops:
        slot = hop.dst_slot[hop.pieces["stage"]] if len(hop.pieces) else np.zeros(0, np.int64)
        rows = hop.pieces["dst_row"] + hop.pieces["stop"] - hop.pieces["start"]
        np.maximum.at(capacity, (hop.pieces["dst"], slot), rows)

    spans, parts = np.concatenate(table), sorted_contents(np.concatenate(contents))
    fetch = together([hop.fetch() for hop in hops], n)
    f_parts, f_spans, f_steps = parts, spans, steps
    if tail:
        f_parts, f_spans = own_block_in_shares(queries, keys, attention, parts, spans, [(0, 0.5), (steps, 0.5)])
        f_steps = steps + 1
    documents = keys.documents
    forward = Program(f_steps, capacity, queries, documents, attention, f_parts, f_spans, fetch, Messages.none())
    if not len(fetch):
        return forward, forward
    reduce = together([hop.reduce() for hop in hops], n)
    after = list(range(steps, last + 1))
    shares = [(0, FIRST_SHARE), *((step, (1 - FIRST_SHARE) / len(after)) for step in after)]
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
    across["stage"] = (across["dst"] // per - across["src"] // per) % topology.nodes
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


def _schedule(
    rounds: np.ndarray,
    crossing: np.ndarray,
    needs: Runs,
    held: Held,
    keys: Layout,
    topology: Topology,
    routing: bool,
    prefetch: int,
) -> tuple[list[Hop], list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]], int, int]:
    """When everything moves and is computed.

    Returns:
        The hops; for each kind of buffer that is computed (pieces in it, step of each stage, slot of each stage,
        whether each piece is needed there); steps of the forward; last step of the backward.
    """
    slots = _Slots()
    rounds, inner = _renumbered(rounds)
    at = 1 + np.arange(inner)  # step in which a round is computed
    slot = slots.of(np.arange(inner), inner)
    zero = np.zeros(inner, np.int64)
    hops = [Hop(rounds, at - 1, at - 1, at + 1, at + 1, zero, slot)]
    computed = [(rounds, at, slot, np.ones(len(rounds), bool))]
    steps = 1 + inner
    if not routing or topology.ranks_per_node == 1:
        crossing, stages = _renumbered(crossing)
        at = 1 + inner + np.arange(stages)
        slot = slots.of(np.arange(stages), prefetch + 1)
        hops.append(Hop(crossing, np.maximum(0, at - prefetch), at - 1, at + 1, at + 1, np.zeros_like(at), slot))
        computed.append((crossing, at, slot, np.ones(len(crossing), bool)))
        return hops, computed, steps + stages, steps + stages
    routes = route(needs, held, topology.nodes, topology.ranks_per_node, keys.documents.tokens)
    known = np.unique(routes.resident["stage"])
    stages = len(known)
    if not stages:
        return hops, computed, steps, steps
    dispatch, cross, helped, forward, resident = (
        _renumbered(x, known)[0]
        for x in (routes.dispatch, routes.cross, routes.cross_helped, routes.forward, routes.resident)
    )
    help_first = int(len(dispatch) > 0)
    number = np.arange(stages)
    at = max(1 + inner, 1 + prefetch + help_first) + number  # computed; passed on in the `prefetch` steps before
    crosses = np.maximum(help_first, at - prefetch - CROSSING)
    home = at + 2 + CROSSING  # the step in which helpers give gradients to owners
    zero = np.zeros(stages, np.int64)
    in_s, in_r = slots.of(number, prefetch + 1), slots.of(number, prefetch + 1 + 2 * CROSSING)
    hops += [
        Hop(cross, crosses, at - prefetch - 1, at + 2, home - 1, zero, in_r),
        Hop(forward, at - prefetch, at - 1, at + 1, at + 1, in_r, in_s),
    ]
    if help_first:
        in_h = slots.of(number, prefetch + 3 + 2 * CROSSING)
        hops += [
            Hop(dispatch, crosses - 1, crosses - 1, home, home, zero, in_h),
            Hop(helped, crosses, at - prefetch - 1, at + 2, home - 1, in_h, in_r),
        ]
    computed += [(forward, at, in_s, np.ones(len(forward), bool)), (resident, at, in_r, routes.used)]
    steps = int(at[-1]) + 1
    return hops, computed, steps, int((home if help_first else home - 1)[-1])


def _renumbered(pieces: np.ndarray, known: np.ndarray | None = None) -> tuple[np.ndarray, int]:
    """Stages counted from 0, without those that nothing is in."""
    known = np.unique(pieces["stage"]) if known is None else known
    out = pieces.copy()
    out["stage"] = np.searchsorted(known, pieces["stage"])
    return out, len(known)


__all__ = ["CROSSING", "PIECE", "Hop", "staged"]
