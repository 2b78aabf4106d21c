"""Placements: the policy that makes one, and the ranks that share each document."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mindspeed_cp.layout import Layout, from_spans, ragged_arange

#: A document, its members (ranks or groups of nodes) and their shares.
DocumentRanks = tuple[int, list[int], list[float]]


@dataclass(frozen=True)
class PlacementPolicy:
    """Parameters of one placement.

    Attributes:
        cut: documents with more work than this multiple of a rank's equal share may be cut; others stay whole.
        split: documents with more work than this multiple of a node's equal share have their heads split over whole
            nodes.
        wide: split the heads of a document that needs several nodes over 2, 4, ... nodes together, as far as the number
            of heads allows; otherwise split them inside each node, and fetch its keys between nodes.
        power: cut documents go to 1, 2, 4, ... neighbouring ranks in equal shares, as in other systems.
        everywhere: cut all documents over all ranks: by tokens, or if `split` is 0 by heads inside groups of nodes and
            by tokens between them.
        group_nodes: nodes of such a group; 0: as many as there are heads for if `wide`, else one. Of flexible groups:
            nodes of the smallest one; 0: a rank.
        flexible: documents with more work than `cut` are whole in groups of 1, 2, 4, ... ranks that split their heads
            (:mod:`mindspeed_cp.algorithms.placement.placer`); others are on one rank.
        equal: all documents are whole in equal groups of so many ranks that split their heads, but those with more work
            than a group's equal share, which are in wider groups; 0: no such groups.
        remap: linear layers have their own layout, so only the work of attention counts.
    """

    cut: float
    split: float
    wide: bool = True
    power: bool = False
    everywhere: bool = False
    group_nodes: int = 0
    flexible: bool = False
    equal: int = 0
    remap: bool = False

    @property
    def can_be_levelled(self) -> bool:
        """True if the policy leaves open on which ranks documents are."""
        return not (self.power or self.everywhere or self.flexible or self.equal)


@dataclass(frozen=True, eq=False)
class DocumentShares:
    """The ranks that share documents: one entry for each document and member, sorted by document.

    Attributes:
        doc, rank: int64 [members]; for documents whose heads are split, `rank` is a group of nodes.
        share: fp64 [members]; the shares of one document add up to 1.
    """

    doc: np.ndarray
    rank: np.ndarray
    share: np.ndarray

    @staticmethod
    def from_lists(entries: list[DocumentRanks]) -> DocumentShares:
        """Build the shares from (document, ranks, shares) in any order of documents."""
        size = np.array([len(ranks) for _, ranks, _ in entries], np.int64)
        doc = np.repeat(np.array([doc for doc, _, _ in entries], np.int64), size)
        rank = np.array([rank for _, ranks, _ in entries for rank in ranks], np.int64)
        share = np.array([share for _, _, shares in entries for share in shares], np.float64)
        order = np.argsort(doc, kind="stable")
        return DocumentShares(doc[order], rank[order], share[order])

    def select(self, chosen: np.ndarray) -> DocumentShares:
        """Return the chosen members, bool [members]."""
        return DocumentShares(self.doc[chosen], self.rank[chosen], self.share[chosen])

    def of_documents(self, tree_numbers: np.ndarray) -> DocumentShares:
        """Return the shares of the documents of trees, each of them shared as its tree is.

        Args:
            tree_numbers: the tree of each document, ascending, int64 [documents]; `doc` numbers trees.
        """
        trees = int(tree_numbers[-1]) + 1 if len(tree_numbers) else 0
        if trees == len(tree_numbers):
            return self
        count = np.bincount(self.doc, minlength=trees)
        first = np.cumsum(count) - count
        members = ragged_arange(first[tree_numbers], count[tree_numbers])
        doc = np.repeat(np.arange(len(tree_numbers)), count[tree_numbers])
        return DocumentShares(doc, self.rank[members], self.share[members])

    def on_several(self, size: int) -> list[DocumentRanks]:
        """Return the documents whose members are in several runs of `size` members; 0: all documents."""
        if not len(self.doc):
            return []
        first = np.flatnonzero(np.append(True, self.doc[1:] != self.doc[:-1]))
        last = np.append(first[1:], len(self.doc))
        if size:
            run = self.rank // size
            several = np.maximum.reduceat(run, first) > np.minimum.reduceat(run, first)
            first, last = first[several], last[several]
        return [
            (int(self.doc[begin]), self.rank[begin:end].tolist(), self.share[begin:end].tolist())
            for begin, end in zip(first.tolist(), last.tolist(), strict=True)
        ]


@dataclass(frozen=True, eq=False)
class Placement:
    """The ranks of every document.

    Attributes:
        policy: the policy that made the placement.
        whole: members of the documents whose keys are fetched, including documents on a single rank.
        split: members of the documents whose heads are split, by number of neighbouring ranks over which they are
            split; the members are groups of that many ranks.
        parts: number of parts of the documents whose heads are split inside nodes
            (:mod:`mindspeed_cp.algorithms.placement.policy`).
        parts_across: the same of the other documents whose heads are split.
    """

    policy: PlacementPolicy
    whole: DocumentShares
    split: dict[int, DocumentShares]
    parts: int = 1
    parts_across: int = 1

    @staticmethod
    def from_lists(
        policy: PlacementPolicy, whole: list[DocumentRanks], by_size: dict[int, list[DocumentRanks]]
    ) -> Placement:
        """Build the placement from its entries; those with split heads are given by number of ranks."""
        split = {size: DocumentShares.from_lists(by_size[size]) for size in sorted(by_size)}
        return Placement(policy, DocumentShares.from_lists(whole), split)

    def on_several_nodes(self, ranks_per_node: int) -> tuple[list[DocumentRanks], dict[int, list[DocumentRanks]]]:
        """Return the documents on several nodes: those whose keys are fetched, and by ranks of a group those whose
        heads are split."""
        shared = self.whole.on_several(ranks_per_node)
        split = {
            size: members.on_several(0 if size > ranks_per_node else ranks_per_node // size)
            for size, members in self.split.items()
        }
        return shared, {size: entries for size, entries in split.items() if entries}

    @property
    def has_fetching_groups(self) -> bool:
        """True if a document whose heads are split is on several groups, which fetch its keys from each other."""
        return any(len(np.unique(members.doc)) < len(members.doc) for members in self.split.values())

    @property
    def split_documents(self) -> np.ndarray:
        """Documents whose heads are split, int64."""
        return np.unique(np.concatenate([np.zeros(0, np.int64), *(members.doc for members in self.split.values())]))


# Parts of the documents whose heads are split, so that the redistribution of one part travels beside another.
#
# Before attention a rank gets its heads of all rows of its group, and afterwards it returns them. Nothing hides this if
# all documents are one part. In several parts, only the first way in and the last way back are exposed. These two parts
# have less work than the others, and some of the longest documents, with few tokens for their work. Documents over
# several nodes travel longest, over NICs, so they are computed between the others, in parts of their own. Those over
# several groups of nodes have further steps, for keys of other groups, which alternate with the other parts::
#
#     computes       part 0       several nodes       part 1       part 2
#     travels in     ...          part 1              part 2
#     travels back                part 0              ...          part 1       part 2

#: Work of the first and of the last part over that of the others, if there are others.
EDGE_WORK = 0.35


def part_weights(parts: int) -> np.ndarray:
    """Return the share of each part in the work of all, fp64 [parts]."""
    out = np.ones(parts)
    if parts > 2:
        out[[0, -1]] = EDGE_WORK
    return out / out.sum()


def split_parts(placement: Placement, work: np.ndarray, ranks_per_node: int) -> list[tuple[int, DocumentShares]]:
    """Return the parts of the documents whose heads are split, in the order in which they are computed.

    Args:
        placement: placement of all documents; those inside nodes make `placement.parts` parts, the others
            `placement.parts_across` for each number of ranks.
        work: work of each document, such as visible pairs, fp64 [documents].
        ranks_per_node: ranks of a node.

    Returns:
        (number of neighbouring ranks over which heads are split, members) of each part.
    """
    across: list[tuple[int, DocumentShares]] = []
    inside: list[list[tuple[int, DocumentShares]]] = [[] for _ in range(placement.parts)]
    for size, members in placement.split.items():
        several = np.bincount(members.doc, minlength=len(work))[members.doc] > 1
        crossing = several | (size > ranks_per_node)
        across += [(size, part) for part in _weighted_parts(members.select(crossing), work, placement.parts_across)]
        for number, part in enumerate(_weighted_parts(members.select(~crossing), work, placement.parts)):
            inside[number].append((size, part))
    return [*inside[0], *across, *(part for parts in inside[1:] for part in parts)]


def _weighted_parts(members: DocumentShares, work: np.ndarray, parts: int) -> list[DocumentShares]:
    """Divide documents into parts so that each group of ranks, if it has many, has about the share of
    :func:`part_weights` of its work in each; the documents with most work first, each to the part that is emptiest on
    its busiest group: the first and the last part get some of the longest ones. Empty parts are left out."""
    if parts == 1 or not len(members.doc):
        return [members] if len(members.doc) else []
    weights = part_weights(parts)
    load = np.zeros((parts, int(members.rank.max()) + 1))
    docs, first = np.unique(members.doc, return_index=True)
    last = np.append(first[1:], len(members.doc))
    part_of = np.zeros(len(docs), np.int64)
    for i in np.argsort(-work[docs], kind="stable").tolist():
        groups = members.rank[first[i] : last[i]]
        part = int(load[:, groups].max(1).argmin())
        load[part, groups] += work[docs[i]] * members.share[first[i] : last[i]] / weights[part]
        part_of[i] = part
    part_of_member = np.repeat(part_of, last - first)
    return [members.select(part_of_member == part) for part in range(parts) if (part_of == part).any()]


# The limit of tokens on each rank, kept exactly.
#
# Shares of a placement are rounded to tokens, so a rank may end with a few tokens too many. They are handed on: the
# last rows of a document that another rank with room shares, or otherwise of the rank's shortest document.


def apply_token_cap(layout: Layout, caps: np.ndarray, ranks_per_node: int) -> Layout:
    """Move rows so that no rank has more tokens than its cap.

    Args:
        layout: any layout with all heads on every rank.
        caps: tokens that each rank may hold, int64 [ranks].
        ranks_per_node: ranks of a node; rows stay on their node if possible.

    Returns:
        The new layout; if all caps together are too small, the excess that no rank has room for stays where it is.
    """
    excess = layout.token_counts - np.maximum(caps, 0)
    if (excess <= 0).all():
        return layout
    spans = [list(map(list, layout.rank_spans(rank).tolist())) for rank in range(layout.ranks)]
    for rank in np.flatnonzero(excess > 0).tolist():
        while excess[rank] > 0 and (excess < 0).any():
            index, taker = _next_handover(spans, excess, rank, ranks_per_node)
            span = spans[rank][index]  # rank, doc, start, stop
            count = min(int(excess[rank]), int(-excess[taker]), span[3] - span[2])
            span[3] -= count
            spans[taker].append([taker, span[1], span[3], span[3] + count])
            excess[rank] -= count
            excess[taker] += count
            if span[2] == span[3]:
                del spans[rank][index]
    records = np.array([tuple(span) for rank_spans in spans for span in rank_spans], layout.spans.dtype)
    return from_spans(layout.documents, layout.ranks, records)


def _next_handover(spans: list[list[list[int]]], excess: np.ndarray, rank: int, ranks_per_node: int) -> tuple[int, int]:
    """Return the index of the rank's span that loses rows, and the rank that gets them.

    A rank with room that shares a document comes first, of the same node if there is one; otherwise the shortest span
    goes to the rank with the most room.
    """

    def is_on_other_node(taker: int) -> bool:
        return taker // ranks_per_node != rank // ranks_per_node

    takers = sorted(np.flatnonzero(excess < 0).tolist(), key=lambda taker: (is_on_other_node(taker), taker))
    last_span = {span[1]: index for index, span in enumerate(spans[rank])}  # by document
    for taker in takers:
        shared = [last_span[span[1]] for span in spans[taker] if span[1] in last_span]
        if shared:
            return max(shared, key=lambda index: spans[rank][index][3] - spans[rank][index][2]), taker
    near = [taker for taker in takers if not is_on_other_node(taker)] or takers
    shortest = min(range(len(spans[rank])), key=lambda index: spans[rank][index][3] - spans[rank][index][2])
    return shortest, min(near, key=lambda taker: excess[taker])
