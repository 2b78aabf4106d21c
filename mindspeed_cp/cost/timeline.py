"""The modelled timeline of one layer: a finished plan, turn by turn, on the devices and links of a cluster.

An event simulation, and nothing in it was measured. Every rank takes the turns of the plan one after the other: it
posts the turn's messages, computes its tiles, and waits for the messages that are due. A message is under way from when
both its ends have posted it; it passes the sender's link and the receiver's, each of which serves messages one after
the other in the order in which they came. Links inside a node are one for each pair and direction (mesh) or each rank's
port (switch); between nodes they are the NICs, which ranks may share. Moves between layouts are messages that are
posted before the first turn, or after the last one of their part.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindspeed_cp.cost.cluster import Cluster
from mindspeed_cp.cost.compute import ComputeCost, LayerCost
from mindspeed_cp.layout import Redistribution
from mindspeed_cp.plan.combine import conclusions
from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.plan.tiles import pairs

ELEMENT, GRADIENT = 2, 4  # bytes of q, k, v and out; of gradients that are summed


@dataclass(frozen=True, eq=False)
class Timeline:
    """One layer, forward and backward; all times are modelled seconds since its first rank began.

    Attributes:
        total: until the last rank is done.
        compute: attention kernels of each rank, both directions, fp64 [ranks].
        linear: linear layers of each rank, both directions, fp64 [ranks].
        waiting: what is left of the total: the rank waits for messages, or for the others at the end, fp64 [ranks].
        forward, backward: (start, computed, end) of every rank's turns, fp64 [ranks, turns + 2, 3]; the first entry
            is the wait for moves before the first turn, the last one that for those after the last.
    """

    total: float
    compute: np.ndarray
    linear: np.ndarray
    waiting: np.ndarray
    forward: np.ndarray
    backward: np.ndarray


@dataclass(frozen=True)
class _Message:
    """`bytes` from src to dst, posted by both in turn `start` and finished in turn `done`."""

    src: int
    dst: int
    bytes: float
    start: int
    done: int


def timeline(plan: Plan, cluster: Cluster, layer: LayerCost | None = None) -> Timeline:
    """The timeline of a plan.

    Args:
        plan: any plan.
        cluster: of `plan.topology.ranks_per_node` ranks (:meth:`Cluster.with_ranks`).
        layer: the linear part of the layer; default: :meth:`LayerCost.like` the attention.
    """
    cost = ComputeCost(cluster, plan.attention, layer)
    tokens = (plan.linear or plan.layout).token_counts
    linear = [np.asarray(cost.linear_seconds(tokens, backward)) for backward in (False, True)]
    forward_compute = _compute(plan, cost, "forward")
    backward_compute = _compute(plan, cost, "backward")
    forward = _Run(plan, cluster, "forward", forward_compute, cost.layer).run(np.zeros(plan.ranks))
    begin = forward[:, -1, 2] + linear[0] + linear[1]
    backward = _Run(plan, cluster, "backward", backward_compute, cost.layer).run(begin)
    total = float(backward[:, -1, 2].max())
    compute = forward_compute.sum(1) + backward_compute.sum(1)
    return Timeline(total, compute, linear[0] + linear[1], total - compute - linear[0] - linear[1], forward, backward)


def _compute(plan: Plan, cost: ComputeCost, direction: str) -> np.ndarray:
    """Kernel seconds of every rank and turn, fp64 [ranks, turns]."""
    turns = plan.turns(direction)
    place = {turn: number for number, turn in enumerate(turns)}
    out = np.zeros((plan.ranks, len(turns)))
    attention = plan.attention
    for number, piece in enumerate(plan.pieces):
        program: Program = getattr(piece, direction)
        at = np.array([place[number, step] for step in range(program.steps)], np.int64)
        for rank in range(plan.ranks):
            tiles = program.tiles(rank)
            if not len(tiles):
                continue
            first, last = piece.q_layout.head_range(rank, attention.heads)
            share = (last - first) / attention.heads
            short = np.minimum(tiles["q_rows"], tiles["k_rows"])
            seconds = cost.attention_seconds(pairs(tiles, attention), short, 0, direction == "backward") * share
            np.add.at(out[rank], at[tiles["step"]], seconds)
            calls = np.unique(np.stack([tiles["step"], tiles["slot"], tiles["mask"]]), axis=1)[0]
            np.add.at(out[rank], at[calls], cost.cluster.launch)
    return out


class _Run:
    """One direction. Turn 0 waits for the moves before the first turn, turn n + 1 for those after the last."""

    def __init__(self, plan: Plan, cluster: Cluster, direction: str, compute: np.ndarray, layer: LayerCost) -> None:
        self.plan, self.cluster, self.layer = plan, cluster, layer
        self.direction = direction
        turns = plan.turns(direction)
        ranks = plan.ranks
        self.turns = len(turns) + 2
        self.compute = np.zeros((ranks, self.turns))
        self.compute[:, 1:-1] = compute
        self.messages = [*self._steps(turns), *self._moves(turns)]
        self.posts: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.due = np.zeros((ranks, self.turns), np.int64)
        for number, message in enumerate(self.messages):
            for rank in (message.src, message.dst):
                self.posts[rank, message.start].append(number)
                self.due[rank, message.done] += 1

    def _steps(self, turns: Sequence[tuple[int, int]]) -> list[_Message]:
        attention = self.plan.attention
        place = {turn: number + 1 for number, turn in enumerate(turns)}
        found = []
        for number, piece in enumerate(self.plan.pieces):
            program: Program = getattr(piece, self.direction)
            for messages, size in ((program.fetch, ELEMENT), (program.reduce, GRADIENT)):
                for item in messages.items:
                    heads = np.diff(piece.kv_layout.head_range(int(item["src"]), attention.kv_heads))[0]
                    row = int(heads) * (attention.head_dim + attention.head_dim_v) * size
                    start, done = (place[number, int(item[name])] for name in ("start", "done"))
                    found.append(_Message(int(item["src"]), int(item["dst"]), float(item["rows"]) * row, start, done))
        return found

    def _moves(self, turns: Sequence[tuple[int, int]]) -> list[_Message]:
        """Moves between layouts, of hidden states too."""
        plan, attention = self.plan, self.plan.attention
        last = self.turns - 1
        forward = self.direction == "forward"
        leaves = conclusions(plan, self.direction)
        first_turn: dict[int, int] = {}
        for number, (part, _) in enumerate(turns, 1):
            first_turn.setdefault(part, number)
        found: list[_Message] = []
        width, width_v = attention.head_dim, attention.head_dim_v
        for number, piece in enumerate(plan.pieces):
            before, after = max(0, first_turn.get(number, 1) - 1), min(leaves[number] + 2, last)
            if piece.q_move is not None:
                found += _of_move(piece.q_move, False, (width if forward else width_v) * ELEMENT, 0, before)
                found += _of_move(piece.q_move, True, (width_v if forward else width) * ELEMENT, after, last)
            if piece.kv_move is not None:
                size = GRADIENT if piece.kv_move.replicates and not forward else ELEMENT
                back = not forward
                at = (0, before) if forward else (after, last)
                found += _of_move(piece.kv_move, back, (width + width_v) * size, *at)
        if plan.linear is not None:
            hidden = Redistribution.between(plan.linear, plan.layout, 1)
            if hidden is not None:
                found += _of_move(hidden, False, self.layer.hidden_size * ELEMENT, 0, 0)
                found += _of_move(hidden, True, self.layer.hidden_size * ELEMENT, last, last)
        return found

    def run(self, begin: np.ndarray) -> np.ndarray:
        """(start, computed, end) of every rank's turns, fp64 [ranks, turns + 2, 3], when ranks begin at those times."""
        ranks = self.plan.ranks
        out = np.zeros((ranks, self.turns, 3))
        posted = np.zeros(len(self.messages), np.int64)
        arrived = np.zeros((ranks, self.turns))
        links: dict[tuple[str, int, int], float] = {}
        events: list[tuple[float, int, int]] = [(float(t), -1 - rank, 0) for rank, t in enumerate(begin)]
        heapq.heapify(events)
        turn_of = [-1] * ranks

        def ended(rank: int, turn: int) -> None:
            if turn_of[rank] == turn and not self.due[rank, turn]:
                end = max(out[rank, turn, 1], arrived[rank, turn])
                out[rank, turn, 2] = end
                if turn + 1 < self.turns:
                    heapq.heappush(events, (end, -1 - rank, turn + 1))

        while events:
            now, what, turn = heapq.heappop(events)
            if what < 0:  # a rank begins a turn
                rank = -1 - what
                turn_of[rank] = turn
                out[rank, turn, :2] = now, now + self.compute[rank, turn]
                for number in self.posts.get((rank, turn), ()):
                    posted[number] += 1
                    if posted[number] == 2:
                        heapq.heappush(events, (now, number, -1))
                ended(rank, turn)
                continue
            message = self.messages[what]
            if turn == -1:  # both ends have posted it
                heapq.heappush(events, (self._passes(message, now, links), what, -2))
                continue
            for rank in (message.src, message.dst):  # it has arrived
                self.due[rank, message.done] -= 1
                arrived[rank, message.done] = max(arrived[rank, message.done], now)
                ended(rank, message.done)
        return out

    def _passes(self, message: _Message, now: float, links: dict[tuple[str, int, int], float]) -> float:
        """When a message arrives, that takes its turn on the links from now on."""
        cluster, per = self.cluster, self.plan.topology.ranks_per_node
        src, dst = message.src, message.dst
        inside = src // per == dst // per
        ports = [(("out", src, 0), cluster.effective_rank), (("in", dst, 0), cluster.effective_rank)]
        passed, beside = ports, []
        if not inside:
            passed = [
                (("nic out", src // per, cluster.nic_of(src % per)), cluster.effective_nic),
                (("nic in", dst // per, cluster.nic_of(dst % per)), cluster.effective_nic),
            ]
        elif cluster.fabric == "mesh":  # a link of its own; all links of a rank together may be slower than their sum
            passed, beside = [(("pair", src, dst), cluster.effective_pair)], ports
        begin, end = now, now
        for link, rate in passed:
            begin = max(begin, links.get(link, 0.0))
            links[link] = max(now, links.get(link, 0.0)) + message.bytes / rate
            end = max(end, links[link], begin + message.bytes / rate)
        for link, rate in beside:
            links[link] = max(now, links.get(link, 0.0)) + message.bytes / rate
            end = max(end, links[link])
        return end + (cluster.in_node_latency if inside else cluster.network_latency)


def _of_move(move: Redistribution, adjoint: bool, row: float, start: int, done: int) -> list[_Message]:
    """The messages of a redistribution; a row of one head has `row` bytes."""
    parts = move.parts[move.parts["src"] != move.parts["dst"]]
    ends = ("dst", "src") if adjoint else ("src", "dst")
    return [
        _Message(int(part[ends[0]]), int(part[ends[1]]), float(part["rows"] * part["heads"] * row), start, done)
        for part in parts
    ]
