"""Steps and slots of the rounds and stages of a KV fetch.

A message is posted as soon as its slot is free and is due when its rows are read, so that a step waits only for what
its own tiles read. A stage whose slot is in use is posted when the gradient of the stage before has left the slot.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from mindspeed_cp.algorithms.kv_fetch.needs import KvFetches, KvOwners, NeededTokens, messages_of
from mindspeed_cp.algorithms.kv_fetch.routes import route
from mindspeed_cp.layout import Layout
from mindspeed_cp.plan.problem import Topology
from mindspeed_cp.plan.records import Messages

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

    def fetch(self) -> Messages:
        """Return the messages that carry keys and values."""
        messages, number = self._messages
        items = messages.items.copy()
        items["start"], items["done"] = self.start[number], self.done[number]
        return Messages(items, messages.runs)

    def reduce(self) -> Messages:
        """Return the messages that carry gradients."""
        messages, number = self._messages
        out = messages.reversed()
        out.items["start"], out.items["done"] = self.back[number], self.back_done[number]
        return out

    @cached_property
    def _messages(self) -> tuple[Messages, np.ndarray]:
        """Messages without steps, and the round of each."""
        return messages_of(self.fetches, self.src_slot, self.dst_slot)


class _SlotAllocator:
    """Hands out slot numbers: for each kind of buffer as many as are in use at once."""

    def __init__(self) -> None:
        self.count = 1

    def of(self, stages: int, turn: int) -> np.ndarray:
        """Return the slot of each stage; `turn` of them are in use at once."""
        slots = self.count + np.arange(stages) % max(1, min(turn, stages))
        self.count += min(turn, stages)
        return slots


@dataclass(frozen=True, eq=False)
class Buffer:
    """Received rows that are computed on, in one kind of slots.

    Attributes:
        fetches: what lies in them; those of one (stage, dst) lie side by side.
        step, slot: of each stage, int64 [stages].
        needed: True if the rank itself needs the tokens, bool [fetches].
    """

    fetches: KvFetches
    step: np.ndarray
    slot: np.ndarray
    needed: np.ndarray

    @staticmethod
    def of(fetches: KvFetches, step: np.ndarray, slot: np.ndarray) -> Buffer:
        """Return a buffer whose tokens are all needed."""
        return Buffer(fetches, step, slot, np.ones(len(fetches), bool))


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
    rounds: KvFetches,
    crossing: KvFetches,
    needs: NeededTokens,
    held: KvOwners,
    keys: Layout,
    topology: Topology,
    routing: bool,
    prefetch: int,
) -> Schedule:
    """Return steps and slots of a KV fetch.

    Args:
        rounds: tokens that ranks fetch in their node; stage is the round.
        crossing: tokens that they fetch from other nodes; stage is the distance of the nodes.
        needs, held, keys: what is needed and where it is, for the routes between nodes.
        topology: ranks and nodes.
        routing: True if what crosses between nodes is routed.
        prefetch: stages in flight while one is computed.
    """
    slots = _SlotAllocator()
    rounds, inner = _numbered_rounds(rounds)
    in_rounds, at_rounds = slots.of(inner, inner), 1 + np.arange(inner)
    if routing and topology.ranks_per_node > 1:
        hops, buffers, steps, last = _routed_hops(inner, needs, held, keys, topology, prefetch, slots)
    else:
        hops, buffers, steps, last = _direct_hops(inner, crossing, prefetch, slots)
    zero = np.zeros(inner, np.int64)
    late = np.minimum(at_rounds + 2, last)
    own_node = Hop(rounds, zero, at_rounds - 1, at_rounds + 1, late, zero, in_rounds)
    return Schedule([own_node, *hops], [Buffer.of(rounds, at_rounds, in_rounds), *buffers], steps, last)


def _direct_hops(
    inner: int, crossing: KvFetches, prefetch: int, slots: _SlotAllocator
) -> tuple[list[Hop], list[Buffer], int, int]:
    """Return the hops with which every rank fetches from the owners on other nodes itself."""
    crossing, stages = _numbered_rounds(crossing)
    turn = min(prefetch, max(stages, 1)) + 1
    stage_step, slot = 1 + inner + np.arange(stages), slots.of(stages, turn)
    reused = stages > turn
    start = _posted(stage_step + 1, turn, 0)
    back_done = stage_step + 1 if reused else np.minimum(stage_step + 2, inner + stages + 1)
    hop = Hop(crossing, start, stage_step - 1, stage_step + 1, back_done, np.zeros_like(stage_step), slot)
    steps = 1 + inner + stages
    return [hop], [Buffer.of(crossing, stage_step, slot)], steps, steps


def _routed_hops(
    inner: int,
    needs: NeededTokens,
    held: KvOwners,
    keys: Layout,
    topology: Topology,
    prefetch: int,
    slots: _SlotAllocator,
) -> tuple[list[Hop], list[Buffer], int, int]:
    """Return the hops with which blocks cross to a node once and are forwarded inside it."""
    routes = route(needs, held, keys, topology.nodes, topology.ranks_per_node)
    known = np.unique(routes.resident.stage)
    stages = len(known)
    if not stages:
        return [], [], 1 + inner, 1 + inner
    dispatch, cross, helped, forward, resident = (
        _numbered_rounds(x, known)[0]
        for x in (routes.dispatch, routes.cross, routes.crossing_helped, routes.forward, routes.resident)
    )
    help_first, prefetch = int(len(dispatch) > 0), min(prefetch, stages)
    # A stage is computed in this step; it is passed on in the steps before.
    stage_step = max(1 + inner, 1 + prefetch + help_first) + np.arange(stages)
    home = stage_step + 2 + CROSSING_STEPS  # helpers give gradients to owners
    turn_r, turn_h = prefetch + 1 + 2 * CROSSING_STEPS, prefetch + 3 + 2 * CROSSING_STEPS
    in_s, in_r = slots.of(stages, prefetch + 1), slots.of(stages, turn_r)
    crosses = _posted(home - 1, turn_r, help_first)
    zero = np.zeros(stages, np.int64)
    hops = [
        Hop(cross, crosses, stage_step - prefetch - 1, stage_step + 2, home - 1, zero, in_r),
        Hop(forward, stage_step - prefetch, stage_step - 1, stage_step + 1, stage_step + 1, in_r, in_s),
    ]
    if help_first:
        in_h = slots.of(stages, turn_h)
        hops += [
            Hop(dispatch, crosses - 1, crosses - 1, home, home, zero, in_h),
            Hop(helped, crosses, stage_step - prefetch - 1, stage_step + 2, home - 1, in_h, in_r),
        ]
    buffers = [Buffer.of(forward, stage_step, in_s), Buffer(resident, stage_step, in_r, routes.used)]
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
    slot = 1 + number % max(1, min(prefetch + 1, rounds))
    posted, computed, last = np.maximum(0, number + 1 - prefetch), number + 1, rounds + 1
    returned = np.minimum(computed + prefetch, last)  # when the slot is filled again
    hop = Hop(fetches, posted, number, computed + 1, returned, np.zeros_like(slot), slot)
    return Schedule([hop], [Buffer.of(fetches, computed, slot)], rounds + 1, last)
