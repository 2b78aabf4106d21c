"""A rank's block of keys and values as it travels from rank to rank: what of it others see, and how it leaves home."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mindspeed_cp.layout import Layout, joined
from mindspeed_cp.plan.config import AttentionConfig
from mindspeed_cp.plan.records import CONTENT, MESSAGE, RUN, Messages
from mindspeed_cp.plan.visibility import seen_elsewhere

#: A block is trimmed to what others see when that spares at least this share of it: rows that leave from many places
#: have to be gathered first, which a few rows less are not worth.
TRIM = 1 / 8


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of all ranks.

    Attributes:
        keys: layout of keys and values; a rank's block is what it holds.
        spans: a table of spans that begins with those of `keys`.
        first, count: the travelling spans of each block in that table, int64 [ranks].
        rows: travelling rows of each block, int64 [ranks].
        leaving: for the trimmed blocks the runs of those rows: in slot 0 (src_row) and while travelling (dst_row).
    """

    keys: Layout
    spans: np.ndarray
    first: np.ndarray
    count: np.ndarray
    rows: np.ndarray
    leaving: dict[int, np.ndarray]

    @staticmethod
    def seen_by_others(queries: Layout, keys: Layout, attention: AttentionConfig) -> Blocks:
        """Blocks without what no other rank's queries see; nothing at all travels of a block that none sees."""
        spans, bounds = keys.spans, keys.bounds
        pieces, of = seen_elsewhere(queries, keys, attention)
        length = pieces["stop"] - pieces["start"]
        owner = spans["rank"][of]
        rows, kept = keys.token_counts.copy(), np.zeros(keys.ranks, np.int64)
        np.add.at(kept, owner, length)
        first, count = bounds[:-1].copy(), np.diff(bounds)
        tables, size, leaving = [spans], len(spans), {}
        row = np.cumsum(spans["stop"] - spans["start"]) - (spans["stop"] - spans["start"])
        for block in np.flatnonzero((rows - kept >= TRIM * rows) & (rows > kept)).tolist():
            mine = np.flatnonzero(owner == block)
            first[block], count[block], rows[block] = size, len(mine), kept[block]
            tables.append(pieces[mine])
            size += len(mine)
            runs = np.zeros(len(mine), RUN)
            runs["src_row"] = row[of[mine]] - row[bounds[block]] + pieces["start"][mine] - spans["start"][of[mine]]
            runs["rows"] = length[mine]
            runs["dst_row"] = np.cumsum(length[mine]) - length[mine]
            leaving[block] = joined(runs, ("src_row", "dst_row"))[0]
        return Blocks(keys, np.concatenate(tables), first, count, rows, leaving)

    def contents(self, step: np.ndarray, rank: np.ndarray, slot: np.ndarray, block: np.ndarray) -> np.ndarray:
        """Records of dtype CONTENT, unsorted: in `step`, `rank` computes the block in `slot`; slot 0 is its own, whole.
        Blocks without rows are left out."""
        own = slot == 0
        out = np.zeros(len(step), CONTENT)
        out["step"], out["rank"], out["slot"] = step, rank, slot
        out["first"] = np.where(own, self.keys.bounds[block], self.first[block])
        out["count"] = np.where(own, np.diff(self.keys.bounds)[block], self.count[block])
        return out[out["count"] > 0]

    def messages(self, moves: np.ndarray, block: np.ndarray) -> Messages:
        """Messages that each move what travels of a block: one run, except where a trimmed block leaves slot 0 of its
        owner, and where its gradient comes back there.

        Args:
            moves: records of dtype MESSAGE with start, done, src, dst and the slots; blocks without rows are left out.
            block: of each of them.
        """
        keep = self.rows[block] > 0
        items, block = moves[keep], block[keep]
        runs = np.zeros(len(items), RUN)
        items["rows"] = runs["rows"] = self.rows[block]
        items["first"], items["count"] = np.arange(len(items)), 1
        total, extra = len(runs), [runs]
        at_owner = (items["src_slot"] == 0) | (items["dst_slot"] == 0)
        for index in np.flatnonzero(at_owner & np.isin(block, list(self.leaving))).tolist():
            own = self.leaving[int(block[index])]
            if items["src_slot"][index]:  # back home: the same runs, the other way
                own = own.copy()
                own["src_row"], own["dst_row"] = own["dst_row"].copy(), own["src_row"].copy()
            items["first"][index], items["count"][index] = total, len(own)
            extra.append(own)
            total += len(own)
        order = np.lexsort((items["src"], items["start"]))
        return Messages(items[order], np.concatenate(extra))


def moves(start: np.ndarray, done: np.ndarray, src: np.ndarray, dst: np.ndarray, src_slot: np.ndarray,
          dst_slot: np.ndarray) -> np.ndarray:  # fmt: skip
    """Records of dtype MESSAGE without rows, for :meth:`Blocks.messages`."""
    out = np.zeros(len(start), MESSAGE)
    for name, column in zip(("start", "done", "src", "dst", "src_slot", "dst_slot"),
                            (start, done, src, dst, src_slot, dst_slot), strict=True):  # fmt: skip
        out[name] = column
    return out
