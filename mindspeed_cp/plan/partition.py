"""Which ranks share each document: one placement for one setting of the search.

Loads are seconds of work. Documents whose heads are split go to whole nodes, other long ones to the fewest ranks that
have room for them, in one node if one has room, short ones whole to the rank with the least work. Then the shares of
the cut documents are evened out against what else their ranks do: a rank may have any share of a document
(:func:`mindspeed_cp.layout.weighted`), so that what whole documents leave uneven is filled up.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan.levels import FULL, LEAST, filled, within_limits

#: Ranks with more than this multiple of an equal share hand on part of a document, as long as that makes the busier
#: of the two less busy by GAIN.
REPAIR, GAIN = 1.01, 0.004

#: How often the shares of cut documents are evened out.
SWEEPS = 2

UNBOUNDED = float("inf")

#: A document with its members (ranks or nodes) and their shares.
Found = tuple[int, list[int], list[float]]


@dataclass(frozen=True)
class Setting:
    """What the search tries.

    Attributes:
        cut: documents with more work than this part of a rank's equal share may be cut; shorter ones stay whole.
        split: documents with more work than this part of a node's equal share have their heads split over whole nodes.
        wide: heads of a document that needs several nodes are split over 2, 4, ... nodes together, as far as heads go;
            else inside each node, and its keys exchanged between them.
        power: cut documents go to 1, 2, 4, ... neighbouring ranks, in equal shares, as other systems do.
        everywhere: all documents are cut over all ranks: by heads in the nodes if `split` is 0, else by tokens.
        remap: linear layers have a layout of their own, so only attention's work counts.
    """

    cut: float
    split: float
    wide: bool = True
    power: bool = False
    everywhere: bool = False
    remap: bool = False


@dataclass(frozen=True, eq=False)
class Members:
    """Who shares documents: one entry for each document and member, sorted by document.

    Attributes:
        doc, rank: int64 [members]; of documents whose heads are split, `rank` is a group of nodes.
        share: fp64 [members]; those of one document add up to 1.
    """

    doc: np.ndarray
    rank: np.ndarray
    share: np.ndarray

    @staticmethod
    def of(found: list[Found]) -> Members:
        """From (document, ranks, shares), in any order of documents."""
        size = np.array([len(ranks) for _, ranks, _ in found], np.int64)
        doc = np.repeat(np.array([doc for doc, _, _ in found], np.int64), size)
        rank = np.array([rank for _, ranks, _ in found for rank in ranks], np.int64)
        share = np.array([share for _, _, shares in found for share in shares], np.float64)
        order = np.argsort(doc, kind="stable")
        return Members(doc[order], rank[order], share[order])


@dataclass(frozen=True, eq=False)
class Placement:
    """Where every document goes.

    Attributes:
        setting: that made it.
        whole: members of the documents whose keys are exchanged, those that one rank has alone among them.
        split: members of the documents whose heads are split, for each number of neighbouring nodes over which they
            are: their members are the groups of so many nodes.
    """

    setting: Setting
    whole: Members
    split: dict[int, Members]

    @property
    def split_documents(self) -> np.ndarray:
        """Documents whose heads are split, int64."""
        return np.unique(np.concatenate([np.zeros(0, np.int64), *(one.doc for one in self.split.values())]))


class Partition:
    """Places the documents of one batch.

    A document on one rank is `work`; one that several ranks share in shares f is `divided * f + overhead` on each of
    them: chunks are shorter than the document, and kernels slower for it.

    Args:
        work: seconds of each document on one rank, attention and linear layers, fp64 [documents].
        divided, overhead: of each document that is cut, fp64 [documents].
        lengths: tokens of each document, int64 [documents].
        nodes, per_node: the ranks, numbered node by node.
        heads: query heads, of which every rank of a head split needs one.
        most_tokens: a rank holds no more tokens than this; None: no bound.
        across: documents of fewer tokens are not cut over ranks of several nodes while one has room for their tokens.

    Raises:
        ConfigError: a document, or the batch, has more tokens than all ranks may hold.
    """

    def __init__(
        self,
        work: np.ndarray,
        divided: np.ndarray,
        overhead: np.ndarray,
        lengths: np.ndarray,
        nodes: int,
        per_node: int,
        heads: int,
        most_tokens: int | None = None,
        across: float = 0.0,
    ) -> None:
        self.across = across
        self.nodes, self.per_node, self.ranks = nodes, per_node, nodes * per_node
        check_bound(lengths, self.ranks, most_tokens)
        self.widest = 1  # nodes over which heads can be split
        while nodes % (2 * self.widest) == 0 and 2 * self.widest * per_node <= heads:
            self.widest *= 2
        self.bound = UNBOUNDED if most_tokens is None else float(most_tokens)
        self.order = np.argsort(-work, kind="stable")
        self.sorted_work = work[self.order]
        self.fair = float(work.sum()) / self.ranks
        self._docs = self.order.tolist()
        self._work, self._lengths = work.tolist(), lengths.tolist()
        self._divided, self._overhead = divided.tolist(), overhead.tolist()

    def counts(self, setting: Setting) -> tuple[int, int]:
        """How many documents may be cut and how many have their heads split; settings with equal counts place alike."""
        cut = int(np.searchsorted(-self.sorted_work, -setting.cut * self.fair, "left"))
        return cut, int(np.searchsorted(-self.sorted_work, -setting.split * self.fair * self.per_node, "left"))

    def place(self, setting: Setting) -> Placement:
        """The placement of one setting."""
        if setting.everywhere:
            return self._everywhere(setting)
        here = _State([0.0] * self.ranks, [0.0] * self.ranks)
        cut, halved = self.counts(setting)
        by_node: dict[int, list[Found]] = {}
        for doc in self._docs[:halved]:
            width = self._width(doc) if setting.wide else 1
            by_node.setdefault(width, []).append(self._over_nodes(here, doc, width))
        find = self._power if setting.power else self._fewest
        parts = [find(here, doc) for doc in self._docs[halved : max(cut, halved)]]
        whole = self._alone(here, self._docs[max(cut, halved) :], parts)
        if not setting.power:
            for _ in range(SWEEPS):
                parts = [self._evened(here, *part) for part in parts]
            parts, whole = self._repaired(here, parts, whole)
            parts = [self._evened(here, *part) for part in parts]
        return Placement(setting, Members.of(parts + whole), {w: Members.of(by_node[w]) for w in sorted(by_node)})

    def _everywhere(self, setting: Setting) -> Placement:
        """Every document over all ranks, or over all groups of nodes by heads."""
        width = self.widest if setting.wide else 1
        count = self.nodes // width if setting.split == 0 else self.ranks
        doc = np.arange(len(self._docs))
        share = np.full(len(doc) * count, 1.0 / count)
        members = Members(np.repeat(doc, count), np.tile(np.arange(count), len(doc)), share)
        if setting.split == 0:
            return Placement(setting, Members.of([]), {width: members})
        return Placement(setting, members, {})

    def _width(self, doc: int) -> int:
        """Nodes over which a document's heads are split: as many as it needs, 1, 2, 4, ..., but not more than go."""
        width = 1
        while width < self.widest and self._work[doc] > FULL * self.fair * self.per_node * width:
            width *= 2
        return width

    def _over_nodes(self, here: _State, doc: int, width: int) -> Found:
        """The fewest groups of `width` nodes with room, in shares that even them out; every rank of a group gets an
        equal part."""
        per, work, length = self.per_node * width, self._work[doc], self._lengths[doc]
        groups = range(self.nodes // width)
        loads = [sum(here.loads[first : first + per]) for first in range(0, self.ranks, per)]
        limits = [self.bound] * len(groups)
        if self.bound < UNBOUNDED:
            limits = [
                per * (self.bound - max(here.tokens[first : first + per])) / max(length, 1)
                for first in range(0, self.ranks, per)
            ]
        chosen, shares = filled(groups, loads, work, 0.0, self.fair * per, limits)
        for group, share in zip(chosen, shares, strict=True):
            for rank in range(group * per, (group + 1) * per):
                here.loads[rank] += share * work / per
                here.tokens[rank] += share * length / per
        return doc, chosen, shares

    def _fewest(self, here: _State, doc: int) -> Found:
        """The fewest ranks with room, of the node with the most room if that is enough."""
        per, full = self.per_node, FULL * self.fair
        emptiest = min(range(self.ranks), key=here.loads.__getitem__)
        if here.loads[emptiest] + self._work[doc] <= full and self._limits(here, [emptiest], doc)[0] >= 1:
            self._take(here, doc, [emptiest], [1.0], 1)
            return doc, [emptiest], [1.0]
        free = [
            sum([full - load for load in here.loads[first : first + per] if load < full])
            for first in range(0, self.ranks, per)
        ]
        node = max(range(self.nodes), key=free.__getitem__)
        ranks: Sequence[int] = range(node * per, (node + 1) * per)
        if self._room(here, ranks) < self._lengths[doc] or (
            free[node] < self._divided[doc] and self._lengths[doc] >= self.across
        ):
            order = sorted(range(self.nodes), key=lambda node: -free[node])
            work, tokens, count = 0.0, 0.0, 0
            while count < self.nodes and (work < self._divided[doc] or tokens < self._lengths[doc]):
                node = order[count]
                work += free[node]
                tokens += self._room(here, range(node * per, (node + 1) * per))
                count += 1
            ranks = [rank for node in sorted(order[:count]) for rank in range(node * per, (node + 1) * per)]
        limits = self._limits(here, ranks, doc)
        loads = [here.loads[rank] for rank in ranks]
        chosen, shares = filled(ranks, loads, self._divided[doc], self._overhead[doc], self.fair, limits)
        self._take(here, doc, chosen, shares, 1)
        return doc, chosen, shares

    def _power(self, here: _State, doc: int) -> Found:
        """A power of two of neighbouring ranks, in equal shares."""
        work, length = self._work[doc], self._lengths[doc]
        least = max(work / self.fair if self.fair else 1.0, length / self.bound, 1.0)
        count = 1
        while count < least and count * 2 <= self.ranks:
            count *= 2
        first = min(range(0, self.ranks - count + 1, count), key=lambda i: max(here.loads[i : i + count]))
        ranks, shares = list(range(first, first + count)), [1.0 / count] * count
        self._take(here, doc, ranks, shares, 1)
        return doc, ranks, shares

    def _alone(self, here: _State, docs: list[int], parts: list[Found]) -> list[Found]:
        """Documents, longest first, each whole to the rank with the least work that has room (Graham 1969); one that
        fits nowhere is cut, and added to `parts`."""
        work, lengths, held, bound = self._work, self._lengths, here.tokens, self.bound
        heap = [(load, rank) for rank, load in enumerate(here.loads)]
        heapq.heapify(heap)
        one, owner, found = [1.0], [[rank] for rank in range(self.ranks)], []
        for doc in docs:
            full = []
            while heap and held[heap[0][1]] + lengths[doc] > bound:
                full.append(heapq.heappop(heap))
            if heap:
                load, rank = heap[0]
                heapq.heapreplace(heap, (load + work[doc], rank))
                held[rank] += lengths[doc]
                found.append((doc, owner[rank], one))
            for entry in full:
                heapq.heappush(heap, entry)
            if len(full) == self.ranks:  # no rank has room for all of it
                for load, rank in heap:
                    here.loads[rank] = load
                parts.append(self._fewest(here, doc))
                heap = [(load, rank) for rank, load in enumerate(here.loads)]
                heapq.heapify(heap)
        for load, rank in heap:
            here.loads[rank] = load
        return found

    def _evened(self, here: _State, doc: int, ranks: list[int], shares: list[float]) -> Found:
        """The same document on the same ranks, or fewer of them, in shares that even out the ranks' work."""
        if len(ranks) == 1:
            return doc, ranks, shares
        self._take(here, doc, ranks, shares, -1)
        limits = self._limits(here, ranks, doc)
        loads = [here.loads[rank] for rank in ranks]
        ranks, shares = within_limits(ranks, loads, self._divided[doc], self._overhead[doc], limits)
        self._take(here, doc, ranks, shares, 1)
        return doc, ranks, shares

    def _repaired(self, here: _State, parts: list[Found], whole: list[Found]) -> tuple[list[Found], list[Found]]:
        """The busiest rank hands on one of its whole documents, or shares it with the idlest of its node, again and
        again, as long as the busiest gets less to do. Where the node is busy as a whole, another one's idlest rank gets
        a whole document."""
        per, limit = self.per_node, REPAIR * self.fair
        mine: dict[int, list[int]] = {}
        for doc, (rank,), _ in whole + [part for part in parts if len(part[1]) == 1]:
            mine.setdefault(rank, []).append(doc)
        moved: set[int] = set()
        owners: dict[int, int] = {}  # of documents that were handed on
        loads = here.loads
        for _ in range(2 * self.ranks):
            rank = max(range(self.ranks), key=loads.__getitem__)
            if loads[rank] <= limit:
                break
            first = rank // per * per
            other = min(range(first, first + per), key=loads.__getitem__)
            if loads[other] > self.fair:
                other = min(range(self.ranks), key=loads.__getitem__)
            found = self._shared(here, rank, other, mine.get(rank, []))
            if found is None:
                break
            doc, share = found
            mine[rank].remove(doc)
            moved.add(doc)
            self._take(here, doc, [rank], [1.0], -1)
            if share == 1:
                self._take(here, doc, [other], [1.0], 1)
                mine.setdefault(other, []).append(doc)
                owners[doc] = other
                continue
            owners.pop(doc, None)
            ranks = sorted((rank, other))
            shares = [1 - share, share] if rank < other else [share, 1 - share]
            self._take(here, doc, ranks, shares, 1)
            parts = [*parts, (doc, ranks, shares)]
        if not moved:
            return parts, whole
        alone = [part for part in parts if len(part[1]) > 1 or part[0] not in moved]
        kept = [one for one in whole if one[0] not in moved]
        return alone, [*kept, *((doc, [rank], [1.0]) for doc, rank in owners.items())]

    def _shared(self, here: _State, rank: int, other: int, docs: list[int]) -> tuple[int, float] | None:
        """The document of a rank, and the share of it, that makes the higher load of two ranks lowest; None where no
        document makes it lower than it is."""
        best, found = here.loads[rank] * (1 - GAIN), None
        mates = rank // self.per_node == other // self.per_node
        for doc in docs:
            above, below, work = here.loads[rank] - self._work[doc], here.loads[other], self._work[doc]
            if here.tokens[other] + self._lengths[doc] > self.bound:
                continue
            if below + work < best:
                best, found = max(below + work, above), (doc, 1.0)
            divided, overhead = self._divided[doc], self._overhead[doc]
            if divided <= 0 or not mates:
                continue
            share = min(max((above - below + divided) / (2 * divided), LEAST / 2), 1 - LEAST / 2)
            high = max(above + (1 - share) * divided, below + share * divided) + overhead
            if high < best:
                best, found = high, (doc, share)
        return found

    def _take(self, here: _State, doc: int, ranks: list[int], shares: list[float], sign: int) -> None:
        """Adds a document to its ranks, or takes it away from them."""
        if len(ranks) == 1:
            here.loads[ranks[0]] += sign * self._work[doc]
            here.tokens[ranks[0]] += sign * self._lengths[doc]
            return
        divided, overhead, length = sign * self._divided[doc], sign * self._overhead[doc], sign * self._lengths[doc]
        for rank, share in zip(ranks, shares, strict=True):
            here.loads[rank] += share * divided + overhead
            here.tokens[rank] += share * length

    def _room(self, here: _State, ranks: Sequence[int]) -> float:
        """Tokens that ranks may still take."""
        if self.bound == UNBOUNDED:
            return UNBOUNDED
        return sum(max(self.bound - here.tokens[rank], 0.0) for rank in ranks)

    def _limits(self, here: _State, ranks: Sequence[int], doc: int) -> list[float]:
        """The largest share of a document that each rank may take."""
        if self.bound == UNBOUNDED:
            return [UNBOUNDED] * len(ranks)
        return [max(self.bound - here.tokens[rank], 0.0) / max(self._lengths[doc], 1) for rank in ranks]


@dataclass(frozen=True)
class _State:
    """Work in seconds and tokens of every rank, while documents are placed."""

    loads: list[float]
    tokens: list[float]


def check_bound(lengths: np.ndarray, ranks: int, most_tokens: int | None) -> None:
    """Raise ConfigError where the ranks may not hold all tokens."""
    if most_tokens is None:
        return
    longest = int(np.argmax(lengths)) if len(lengths) else 0
    for what, tokens in ((f"document {longest}", int(lengths.max(initial=0))), ("the batch", int(lengths.sum()))):
        if tokens > ranks * most_tokens:
            raise ConfigError(
                f"{what} has {tokens} tokens, more than {ranks} ranks of max_seqlen_per_dp_cp_rank = "
                f"{most_tokens} hold; "
                f"valid: max_seqlen_per_dp_cp_rank of {-(-int(lengths.sum()) // ranks)} or more, or more ranks"
            )
