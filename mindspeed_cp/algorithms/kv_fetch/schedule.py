"""When everything of a staged exchange moves and is computed: steps and slots of its rounds and stages.

Messages are posted as early as their slot is free, and are due as late as they are needed, so that a step waits for no
more than its own tiles read. A stage that comes to a slot in use is posted when the gradient of the stage before has
left it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mindspeed_cp.layout import Layout
from mindspeed_cp.plan.config import Topology
from mindspeed_cp.plan.needs import Held, Runs, messages_of
from mindspeed_cp.plan.records import Messages
from mindspeed_cp.plan.routes import route

#: Steps that a block may take to cross to another node where slots are reused.
CROSSING = 2


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

    def of(self, stages: int, turn: int) -> np.ndarray:
        """Slot of each stage; `turn` of them are in use at once."""
        slots = self.count + np.arange(stages) % max(1, min(turn, stages))
        self.count += min(turn, stages)
        return slots


@dataclass(frozen=True, eq=False)
class Buffer:
    """What is computed of one kind of slots.

    Attributes:
        pieces: what lies in them, those of one stage and rank side by side.
        step, slot: of each stage, int64 [stages].
        needed: whether the rank itself needs the piece, bool [pieces].
    """

    pieces: np.ndarray
    step: np.ndarray
    slot: np.ndarray
    needed: np.ndarray

    @staticmethod
    def of(pieces: np.ndarray, step: np.ndarray, slot: np.ndarray) -> Buffer:
        """All of which is needed."""
        return Buffer(pieces, step, slot, np.ones(len(pieces), bool))


@dataclass(frozen=True)
class Schedule:
    """Steps and slots.

    Attributes:
        hops: what moves.
        buffers: what is computed, beside the own block.
        steps: of the forward.
        last: step of the backward.
    """

    hops: list[Hop]
    buffers: list[Buffer]
    steps: int
    last: int


def schedule(
    rounds: np.ndarray,
    crossing: np.ndarray,
    needs: Runs,
    held: Held,
    keys: Layout,
    topology: Topology,
    routing: bool,
    prefetch: int,
) -> Schedule:
    """Steps and slots of a staged exchange.

    Args:
        rounds: pieces that ranks take of others of their node; stage is the round.
        crossing: pieces that they take of other nodes; stage is the distance of the nodes.
        needs, held, keys: what is needed and where it is, for the routes between nodes.
        topology: the ranks.
        routing: what crosses is routed.
        prefetch: stages on their way while one is computed.
    """
    slots = _Slots()
    rounds, inner = _renumbered(rounds)
    in_rounds, at_rounds = slots.of(inner, inner), 1 + np.arange(inner)
    if routing and topology.ranks_per_node > 1:
        hops, buffers, steps, last = _routed(inner, needs, held, keys, topology, prefetch, slots)
    else:
        hops, buffers, steps, last = _straight(inner, crossing, prefetch, slots)
    zero = np.zeros(inner, np.int64)
    late = np.minimum(at_rounds + 2, last)
    own_node = Hop(rounds, zero, at_rounds - 1, at_rounds + 1, late, zero, in_rounds)
    return Schedule([own_node, *hops], [Buffer.of(rounds, at_rounds, in_rounds), *buffers], steps, last)


def _straight(
    inner: int, crossing: np.ndarray, prefetch: int, slots: _Slots
) -> tuple[list[Hop], list[Buffer], int, int]:
    """Every rank fetches what it needs of other nodes from its owner."""
    crossing, stages = _renumbered(crossing)
    turn = min(prefetch, max(stages, 1)) + 1
    at, slot = 1 + inner + np.arange(stages), slots.of(stages, turn)
    reused = stages > turn
    start = _posted(at + 1, turn, 0)
    back_done = at + 1 if reused else np.minimum(at + 2, inner + stages + 1)
    hop = Hop(crossing, start, at - 1, at + 1, back_done, np.zeros_like(at), slot)
    steps = 1 + inner + stages
    return [hop], [Buffer.of(crossing, at, slot)], steps, steps


def _routed(
    inner: int, needs: Runs, held: Held, keys: Layout, topology: Topology, prefetch: int, slots: _Slots
) -> tuple[list[Hop], list[Buffer], int, int]:
    """Blocks cross to a node once, and are passed on inside it."""
    routes = route(needs, held, keys, topology.nodes, topology.ranks_per_node)
    known = np.unique(routes.resident["stage"])
    stages = len(known)
    if not stages:
        return [], [], 1 + inner, 1 + inner
    dispatch, cross, helped, forward, resident = (
        _renumbered(x, known)[0]
        for x in (routes.dispatch, routes.cross, routes.cross_helped, routes.forward, routes.resident)
    )
    help_first, prefetch = int(len(dispatch) > 0), min(prefetch, stages)
    at = max(1 + inner, 1 + prefetch + help_first) + np.arange(stages)  # computed; passed on in the steps before
    home = at + 2 + CROSSING  # helpers give gradients to owners
    turn_r, turn_h = prefetch + 1 + 2 * CROSSING, prefetch + 3 + 2 * CROSSING
    in_s, in_r = slots.of(stages, prefetch + 1), slots.of(stages, turn_r)
    crosses = _posted(home - 1, turn_r, help_first)
    zero = np.zeros(stages, np.int64)
    hops = [
        Hop(cross, crosses, at - prefetch - 1, at + 2, home - 1, zero, in_r),
        Hop(forward, at - prefetch, at - 1, at + 1, at + 1, in_r, in_s),
    ]
    if help_first:
        in_h = slots.of(stages, turn_h)
        hops += [
            Hop(dispatch, crosses - 1, crosses - 1, home, home, zero, in_h),
            Hop(helped, crosses, at - prefetch - 1, at + 2, home - 1, in_h, in_r),
        ]
    buffers = [Buffer.of(forward, at, in_s), Buffer(resident, at, in_r, routes.used)]
    return hops, buffers, int(at[-1]) + 1, int(home[-1]) - (not help_first)


def _posted(left: np.ndarray, turn: int, earliest: int) -> np.ndarray:
    """Step in which each stage is posted: when the stage `turn` before it, in the same slot, has left it."""
    start = np.full(len(left), earliest)
    start[turn:] = left[:-turn] if turn < len(left) else left[:0]
    return start


def _renumbered(pieces: np.ndarray, known: np.ndarray | None = None) -> tuple[np.ndarray, int]:
    """Stages counted from 0, without those that nothing is in."""
    known = np.unique(pieces["stage"]) if known is None else known
    out = pieces.copy()
    out["stage"] = np.searchsorted(known, pieces["stage"])
    return out, len(known)
