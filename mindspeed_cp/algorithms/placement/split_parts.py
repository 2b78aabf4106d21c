"""Parts of the documents whose heads are split, so that the redistribution of one part travels beside another.

Before attention a rank gets its heads of all rows of its group, and afterwards it returns them. Nothing hides this if
all documents are one part. In several parts, only the first way in and the last way back are exposed. These two parts
have less work than the others, and some of the longest documents, with few tokens for their work. Documents over
several nodes travel longest, over NICs, so they are computed between the others. Those over several groups of nodes
have further steps, for keys of other groups, which alternate with the other parts::

    computes       part 0       several nodes       part 1       part 2
    travels in     ...          part 1              part 2
    travels back                part 0              ...          part 1       part 2
"""

from __future__ import annotations

import numpy as np

from mindspeed_cp.algorithms.placement.policy import DocumentShares, Placement

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
        placement: placement of all documents; those inside nodes make `placement.parts` parts.
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
        across += [(size, members.select(crossing))] if crossing.any() else []
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
