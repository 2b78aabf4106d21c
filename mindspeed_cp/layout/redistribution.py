"""The move of rows, or of some heads of rows, from one layout to another, and its adjoint.

It is Ulysses (tokens to heads), the inner part of the hybrid, and the remap between attention and linear layers, in one
primitive: for every pair of ranks the (token, head) that one holds and the other wants, as runs of rows and a range of
heads. What a rank holds itself is a copy, not a message.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mindspeed_cp.errors import PlanError
from mindspeed_cp.layout.layout import Layout
from mindspeed_cp.layout.runs import joined, overlaps

#: Rank `src` gives rank `dst` `rows` rows, runs[first : first + count], of heads head .. head + heads - 1, counted over
#: all heads.
PART = np.dtype([(name, np.int64) for name in ["src", "dst", "first", "count", "rows", "head", "heads"]])

#: `rows` rows from src_row of the source's shard on become rows from dst_row of the target's shard on.
PART_RUN = np.dtype([(name, np.int64) for name in ["src_row", "dst_row", "rows"]])


@dataclass(frozen=True, eq=False)
class Redistribution:
    """From `source`, where every token is on one rank with all its heads, to `target`, where ranks may hold ranges of
    heads, and a (token, head) may be on several ranks.

    The adjoint moves from `target` to `source`: what `target` holds several times is summed.

    Attributes:
        source: all heads on every rank.
        target: of the same documents and ranks.
        heads: heads in all.
    """

    source: Layout
    target: Layout
    heads: int

    def __post_init__(self) -> None:
        if self.source.heads is not None:
            raise PlanError("redistribution: the source splits heads; only a layout with all heads can be a source")
        if self.source.ranks != self.target.ranks or self.source.documents != self.target.documents:
            raise PlanError("redistribution: source and target are of other ranks or documents")

    @staticmethod
    def between(source: Layout, target: Layout, heads: int) -> Redistribution | None:
        """The move, or None when both layouts are the same and nothing moves."""
        return None if source.same_as(target) else Redistribution(source, target, heads)

    @cached_property
    def _made(self) -> tuple[np.ndarray, np.ndarray]:
        source, target = self.source, self.target
        by_token = np.argsort(source.spans["start"], kind="stable")
        spans, row = source.spans[by_token], source.first_rows[by_token]
        ranges = np.array([target.head_range(rank, self.heads) for rank in range(target.ranks)], np.int64).reshape(
            -1, 2
        )
        low, heads = ranges[:, 0], ranges[:, 1] - ranges[:, 0]
        used = heads[target.spans["rank"]] > 0
        wanted, at = target.spans[used], target.first_rows[used]
        i, j, first, last = overlaps(wanted["start"], wanted["stop"], spans["start"], spans["stop"])
        found = np.empty(len(i), PART_RUN)
        found["src_row"] = row[j] + first - spans["start"][j]
        found["dst_row"] = at[i] + first - wanted["start"][i]
        found["rows"] = last - first
        src, dst = spans["rank"][j], wanted["rank"][i]
        order = np.lexsort((src, dst))  # stable: in one part token order is row order on both sides
        src, dst, found = src[order], dst[order], found[order]
        other = np.append(True, (src[1:] != src[:-1]) | (dst[1:] != dst[:-1]))[: len(src)]
        runs, begins = joined(found, ("src_row", "dst_row"), other)
        starts = np.flatnonzero(other[begins])
        parts = np.empty(len(starts), PART)
        parts["src"], parts["dst"] = src[begins[starts]], dst[begins[starts]]
        parts["first"], parts["count"] = starts, np.diff(np.append(starts, len(runs)))
        parts["rows"] = np.add.reduceat(runs["rows"], starts) if len(starts) else 0
        parts["head"], parts["heads"] = low[parts["dst"]], heads[parts["dst"]]
        return parts, runs

    @property
    def parts(self) -> np.ndarray:
        """Records of dtype PART: every pair of ranks with something to move, a rank and itself included."""
        return self._made[0]

    @property
    def runs(self) -> np.ndarray:
        """Records of dtype PART_RUN."""
        return self._made[1]

    def runs_of(self, part: np.ndarray) -> np.ndarray:
        """Runs (records) of one part."""
        return self.runs[part["first"] : part["first"] + part["count"]]

    def of(self, rank: int, adjoint: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Parts that the rank gives to others and those that it gets from others, in the order in which to post them:
        by rounds in which ranks are paired, so that neither a rank nor a NIC is everybody's target at once. (In the
        adjoint the direction is turned round.)"""
        give, get = ("dst", "src") if adjoint else ("src", "dst")
        parts = self.parts
        away = parts[parts["src"] != parts["dst"]]
        given, got = away[away[give] == rank], away[away[get] == rank]
        return (
            given[np.argsort(given[get] ^ rank, kind="stable")],
            got[np.argsort(rank ^ got[give], kind="stable")],
        )

    def kept(self, rank: int) -> np.ndarray | None:
        """The part that stays on the rank, or None."""
        found = np.flatnonzero((self.parts["src"] == rank) & (self.parts["dst"] == rank))
        return self.parts[found[0]] if len(found) else None

    @cached_property
    def replicates(self) -> bool:
        """True when some (token, head) is on several ranks of the target."""
        ranges = [self.target.head_range(rank, self.heads) for rank in range(self.target.ranks)]
        held = sum(int(n) * (b - a) for n, (a, b) in zip(self.target.token_counts, ranges, strict=True))
        return held > self.source.documents.tokens * self.heads

    def sent(self, adjoint: bool = False) -> np.ndarray:
        """(row, head) pairs that each rank sends to others, int64 [ranks]."""
        away = self.parts[self.parts["src"] != self.parts["dst"]]
        by = away["dst" if adjoint else "src"]
        count = np.bincount(by, weights=away["rows"] * away["heads"], minlength=self.source.ranks)
        return count.astype(np.int64)
