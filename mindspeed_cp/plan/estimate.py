"""What a placement costs, in a few array operations: the planner's own model, by which it compares settings.

For each rank the compute of its tiles, the bytes that it gets over in-node links, and those that its node gets over its
NICs; and of a direction the phases that all plans of this kind have: own blocks while q, k and v move to heads, split
heads while keys travel, exchanged keys while outputs and gradients move back. Latencies are left out: the search
compares placements of one batch. A finished plan is simulated turn by turn by :mod:`mindspeed_cp.cost.simulate`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mindspeed_cp.cost import Cluster, ComputeCost, LayerCost
from mindspeed_cp.cost.compute import ATTENTION_BACKWARD, LINEAR_BACKWARD
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan.config import AttentionConfig, Topology
from mindspeed_cp.plan.partition import Members, Placement
from mindspeed_cp.plan.placement import visible_pairs
from mindspeed_cp.plan.routes import MEMBERS

#: Bytes of K and V and of their gradients in the backward, in units of the forward's: K and V once more, and gradients
#: in fp32.
BACKWARD_TRAFFIC = 3.0

#: Part of a rank's work on cut documents that is its own block, and part that has to wait for the last keys.
OWN, LAST = 0.3, 0.25

#: Part of own blocks that waits in the backward for the last gradients, or in both directions for outputs.
TAIL = 0.3

#: What is routed takes so many times its time on the NICs: relays pass it on between steps, so that its hops come one
#: after the other, and wait for ranks that are behind.
HOPS = 2.0

#: Kernel calls of a rank for a document that it shares, more than for one of its own.
CALLS = 3

ELEMENT = 2  # bytes of q, k, v and out


@dataclass(frozen=True, eq=False)
class Score:
    """Modelled seconds of one layer, forward and backward.

    Attributes:
        total: until the last rank is done.
        busy: compute of each rank, attention and linear layers, fp64 [ranks].
        attention: of that, attention's, fp64 [ranks].
        tokens: of each rank, fp64 [ranks].
        remap: the move between the layouts of linear layers and attention; 0 without one.
    """

    total: float
    busy: np.ndarray
    attention: np.ndarray
    tokens: np.ndarray
    remap: float


class Estimate:
    """The model for one batch.

    Args:
        queries, keys: the batch.
        topology: where it runs.
        attention: what is computed.
        cluster: what devices and links can do; of `topology.ranks_per_node` ranks.
        layer: the linear part of a layer.
        routing: whether keys cross to a node once.
    """

    def __init__(
        self,
        queries: Documents,
        keys: Documents,
        topology: Topology,
        attention: AttentionConfig,
        cluster: Cluster,
        layer: LayerCost,
        routing: bool,
    ) -> None:
        self.topology, self.attention, self.cluster, self.routing = topology, attention, cluster, routing
        self.cost = ComputeCost(cluster, attention, layer)
        self.lengths = queries.lengths
        self.pairs = visible_pairs(queries, keys, attention)
        self.alone = self.cost.attention_seconds(self.pairs, self.lengths)  # forward, of a whole document
        self.linear = self.cost.linear_seconds(self.lengths)
        self.kv_row = attention.kv_heads * (attention.head_dim + attention.head_dim_v) * ELEMENT
        self.q_row = attention.heads * attention.head_dim * ELEMENT
        self.out_row = attention.heads * attention.head_dim_v * ELEMENT
        self.uneven = attention.mask == "causal" and attention.window is None

    @property
    def work(self) -> np.ndarray:
        """Seconds of each document on one rank, forward and backward, attention and linear layers, fp64 [documents]."""
        return self.alone * (1 + ATTENTION_BACKWARD) + self.linear * (1 + LINEAR_BACKWARD)

    @property
    def attention_work(self) -> np.ndarray:
        """Of attention alone."""
        return self.alone * (1 + ATTENTION_BACKWARD)

    def divided(self, with_linear: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Of a document that ranks share: seconds in all but for the shortness of their chunks, and what each of them
        loses by it, fp64 [documents] each. (`rows / 2` rows on the shorter side of a tile, as in `score`: the loss of
        a rank does not depend on its share.)"""
        long = self.cost.attention_seconds(self.pairs, 1e12)
        lost = (self.cost.attention_seconds(self.pairs, self.lengths / 2) - long) + CALLS * self.cluster.launch
        linear = self.linear * (1 + LINEAR_BACKWARD) if with_linear else 0.0
        return long * (1 + ATTENTION_BACKWARD) + linear, lost * (1 + ATTENTION_BACKWARD)

    @property
    def bound(self) -> float:
        """No plan takes less: perfect balance, whole tiles, nothing exposed."""
        return float(self.work.sum()) / self.topology.ranks

    def score(self, placement: Placement) -> Score:
        """What a placement costs."""
        ranks, per, nodes = self.topology.ranks, self.topology.ranks_per_node, self.topology.nodes
        here = _Loads(ranks, nodes)
        self._exchanged(placement.whole, here)
        for width, members in placement.split.items():
            self._split(width, members, here)
        forward = here.seconds(1.0, per, here.into, here.out)
        backward = here.seconds(ATTENTION_BACKWARD, per, here.out, here.into)
        linear = self.cost.linear_seconds(here.tokens) * (1 + LINEAR_BACKWARD)
        remap = 0.0
        if placement.setting.remap:
            remap = self._remap(here.tokens)
            linear = np.full(ranks, linear.mean())
        attention = here.attention * (1 + ATTENTION_BACKWARD)
        ready = forward + linear
        total = float(max((ready + backward).max(), self._together(placement, ready, here))) + remap
        return Score(total, attention + linear, attention, here.tokens, remap)

    def _together(self, placement: Placement, ready: np.ndarray, here: _Loads) -> float:
        """When the last rank is done, where ranks that share documents wait for each other in the backward: with more
        linear work, some come to it later than others, and keys and gradients of theirs, and what they relay, are due
        from then on."""
        per = self.topology.ranks_per_node
        cut, split = ATTENTION_BACKWARD * (1 - OWN) * here.cut, ATTENTION_BACKWARD * here.split
        last = 0.0
        members = placement.whole
        size = np.bincount(members.doc, minlength=len(self.lengths))[members.doc]
        doc, rank = members.doc[size > 1], members.rank[size > 1]
        if len(doc):
            begin = ready[rank]
            place = doc * self.topology.nodes + rank // per
            _, at, mates = _numbered(place)
            first, count = _runs(doc)
            several = mates[at] < np.repeat(count, count)
            if self.routing and several.any():  # few ranks of a node: all its ranks relay
                node = np.maximum.reduceat(ready, np.arange(0, len(ready), per))
                begin = np.where(several & (mates[at] < MEMBERS * per), node[rank // per], begin)
            latest = np.repeat(np.maximum.reduceat(begin, first), count)
            last = float((latest + cut[rank]).max())
        for width, members in placement.split.items():
            if len(members.doc):
                groups = np.maximum.reduceat(ready, np.arange(0, len(ready), per * width))
                work = np.maximum.reduceat(split, np.arange(0, len(ready), per * width))
                first, count = _runs(members.doc)
                latest = np.repeat(np.maximum.reduceat(groups[members.rank], first), count)
                last = max(last, float((latest + work[members.rank]).max()))
        return last

    def _exchanged(self, members: Members, here: _Loads) -> None:
        """Documents whose keys are exchanged, and those that stay whole."""
        cluster, per = self.cluster, self.topology.ranks_per_node
        doc, rank, share = members.doc, members.rank, members.share
        if not len(doc):
            return
        size = np.bincount(doc, minlength=len(self.lengths))[doc]
        rows = share * self.lengths[doc]
        short = np.where(size > 1, rows / 2, rows)
        calls = np.where(size > 1, CALLS, 0)
        seconds = self.cost.attention_seconds(self.pairs[doc] * share, short, calls)
        here.add(rank, attention=seconds, tokens=rows)
        cut = size > 1
        if not cut.any():
            return
        doc, rank, share, rows, size = doc[cut], rank[cut], share[cut], rows[cut], size[cut]
        here.add(rank, cut=seconds[cut])
        seen = self._seen(share, *_runs(doc))
        length = self.lengths[doc]
        node = rank // per
        nodes = self.topology.nodes
        key = doc * nodes + node
        known, at, mates = _numbered(key)
        on_node = np.bincount(at, weights=share)
        own_node = on_node[at]
        others = np.maximum(1 - share, 1e-12)
        inside = seen * length * (own_node - share) / others * self.kv_row
        across = seen * length * (1 - own_node) / others * self.kv_row
        links = np.maximum(mates[at] - 1, 1)
        rate = np.minimum(cluster.effective_rank, links * cluster.effective_pair)
        here.add(rank, inside=inside / rate)
        if nodes == 1:
            return
        spans = np.bincount(known // nodes, minlength=len(self.lengths))  # nodes of each document
        into = self.lengths[known // nodes] * (1 - on_node) * self.kv_row
        out = self.lengths[known // nodes] * on_node * (spans[known // nodes] - 1) * self.kv_row
        if self.routing:
            wide = cluster.nics_per_node * cluster.effective_nic
            np.add.at(here.routed, known % nodes, np.maximum(into, out) / wide)
            spread = min(cluster.effective_rank, max(per - 1, 1) * cluster.effective_pair)
            here.add(rank, inside=across * (per - 1) / per / spread)
        else:
            nic = cluster.effective_nic * cluster.nics_per_node / per
            here.add(rank, inside=across / nic)

    def _split(self, width: int, members: Members, here: _Loads) -> None:
        """Documents whose heads are split over groups of `width` nodes, and whose keys are exchanged between groups."""
        doc, group, share = members.doc, members.rank, members.share
        if not len(doc):
            return
        cluster, attention = self.cluster, self.attention
        per_node, groups = self.topology.ranks_per_node, self.topology.nodes // width
        per = per_node * width
        size = np.bincount(doc, minlength=len(self.lengths))[doc]
        rows = share * self.lengths[doc]
        busy = min(per, attention.heads)
        part = -(-attention.heads // busy) / attention.heads
        short = np.where(size > 1, rows / 2, rows)
        seconds = self.cost.attention_seconds(self.pairs[doc] * share * part, short)
        copies = max(1.0, busy / attention.kv_heads)
        wide = cluster.nics_per_node * cluster.effective_nic
        # Of what a rank gets, one part in `per` is its own, and one in `width` comes from its node.
        moved = rows / per * max((per_node - 1) / per / cluster.effective_rank, per_node * (1 - 1 / width) / wide)
        into, out = moved * (self.q_row + self.kv_row * copies), moved * self.out_row
        for name, value in (("attention", seconds), ("split", seconds), ("tokens", rows / per),
                            ("into", into), ("out", out)):  # fmt: skip
            getattr(here, name).reshape(groups, per)[...] += np.bincount(group, value, groups)[:, None]
        calls = np.zeros(groups)  # all documents of a turn share one
        np.maximum.at(calls, group, np.where(size > 1, 2.0, 1.0) * cluster.launch)
        for name in ("attention", "split"):
            getattr(here, name).reshape(groups, per)[...] += calls[:, None]
        if (size > 1).any():
            need = self._seen(share, *_runs(doc)) * self.lengths[doc] * self.kv_row * copies / width
            here.nic.reshape(groups, width)[...] += np.bincount(group, need / wide, groups)[:, None]
            waiting = np.bincount(group, seconds * (size > 1), groups)
            here.crossing.reshape(groups, per)[...] += waiting[:, None]

    def _seen(self, share: np.ndarray, first: np.ndarray, size: np.ndarray) -> np.ndarray:
        """Part of the document that each member needs of the others."""
        if not self.uneven:
            return 1 - share
        before = np.cumsum(share)
        end = np.repeat(before[first + size - 1], size)
        after = end - before  # shares of the members inside the mirror image
        return 0.5 * (1 - share) + 0.5 * after

    def _remap(self, tokens: np.ndarray) -> float:
        """Seconds to move q, k, v and out between two layouts, forward and backward."""
        cluster, per = self.cluster, self.topology.ranks_per_node
        mean = tokens.mean()
        row = self.q_row + self.kv_row + self.out_row
        surplus = np.maximum(tokens - mean, 0).max() * row
        across = np.maximum(tokens.reshape(-1, per).sum(1) - mean * per, 0).max() * row
        inside = surplus / cluster.effective_rank
        return 2 * max(inside, across / (cluster.nics_per_node * cluster.effective_nic))


class _Loads:
    """Sums over ranks, and over nodes, of the forward, in seconds.

    attention: all kernels; of these cut: of documents whose keys are exchanged, split: of split heads, crossing: of
    these, documents of several nodes. inside: keys from in-node links; of a node, routed: keys from its NICs that
    relays pass on, nic: those that ranks get themselves; into and out: moves to heads and back. tokens: held.
    """

    def __init__(self, ranks: int, nodes: int) -> None:
        self.attention, self.cut, self.split, self.crossing, self.tokens, self.inside, self.into, self.out = np.zeros(
            (8, ranks)
        )
        self.nic, self.routed = np.zeros((2, nodes))

    def add(self, rank: np.ndarray, **seconds: np.ndarray) -> None:
        """Adds to the sums of ranks."""
        for name, value in seconds.items():
            total = getattr(self, name)
            total += np.bincount(rank, value, len(total))

    def seconds(self, factor: float, per_node: int, into: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Of a direction, fp64 [ranks].

        Args:
            factor: kernels take so many times what they take in the forward; above 1, gradients travel too.
            per_node: ranks of a node.
            into, out: moves before and after the attention of split heads.
        """
        back = BACKWARD_TRAFFIC - 1 if factor > 1 else 0.0
        nic, routed = np.repeat(self.nic, per_node), np.repeat(self.routed, per_node)
        own = (self.attention - self.split - (1 - OWN) * self.cut) * factor
        exchanged = (1 - OWN) * self.cut * factor
        idle = self.cut == 0
        chain = np.where(idle, 0.0, self.inside + HOPS * routed)
        late = own * np.where(idle, 0.5 * (self.split > 0), TAIL if back else 0.0)
        begun = np.maximum(own - late, into)  # then split heads
        split = np.maximum(begun + self.split * factor, into + nic + LAST * self.crossing * factor)
        keys = into + chain  # when they have come
        done = np.maximum(split + exchanged, np.where(idle, 0.0, keys + LAST * exchanged))
        returned = np.maximum(split, keys) + out + back * chain
        # Gradients of split heads return while other stages are computed: their NICs carry them and keys in a row.
        carried = into + (1 + back) * nic + LAST * self.crossing * factor + out
        return np.maximum(done + late, np.maximum(returned, carried))


def _runs(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where runs of equal numbers begin, and how long they are; of one number or more."""
    change = np.flatnonzero(numbers[1:] != numbers[:-1])
    first = np.zeros(len(change) + 1, np.int64)
    np.add(change, 1, out=first[1:])
    count = np.empty_like(first)
    count[:-1], count[-1] = first[1:] - first[:-1], len(numbers) - first[-1]
    return first, count


def _numbered(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Different keys in ascending order, the number of each entry's key, and how often each comes. (np.unique, which
    sorts, for keys that are in order already.)"""
    if (keys[1:] < keys[:-1]).any():
        return np.unique(keys, return_inverse=True, return_counts=True)
    first, count = _runs(keys)
    return keys[first], np.repeat(np.arange(len(first)), count), count
