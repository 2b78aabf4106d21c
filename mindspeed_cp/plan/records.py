"""NumPy records of a plan: tiles, slot contents and messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mindspeed_cp.layout import ROW_RUN, join_runs, ragged_arange

FULL, CAUSAL, BAND = 0, 1, 2
MASK_NAMES = {FULL: "full", CAUSAL: "causal", BAND: "band"}


def int64_record(names: str) -> np.dtype:
    """Return a record dtype of int64 fields; names are separated by spaces."""
    return np.dtype([(name, np.int64) for name in names.split()])


#: Tile: q rows x rows of a slot. The first query is of document `doc`, all keys are of document `k_doc`: the same one,
#: or in a tree one of its ancestors. q_pos and k_pos are the positions of the first rows.
#:
#: FULL: every q row sees every key. CAUSAL is aligned bottom right: q row i of the tile (from 0) sees the first
#: k_rows - q_rows + i + 1 keys. BAND: a query at position p sees the keys of the tile in its
#: `AttentionConfig.visible_range`; every q row of the tile sees at least one key, and every key is seen by at least one
#: q row. CAUSAL tiles are for queries that see no later key; where positions matter, they show just the keys in the
#: visible range.
#:
#: If `AttentionConfig.needs_positions`, all queries are of one document, and positions increase by one from row to row
#: on both sides. Otherwise a tile may join several runs, a full one also queries of several documents that continue
#: `k_doc`, and q_pos and k_pos hold for its first rows only.
TILE = int64_record("step slot q_row q_rows k_row k_rows mask doc k_doc q_pos k_pos")

#: Slot content: in step `step`, rank `rank` computes with the rows of slot `slot` from `row` on, which hold the tokens
#: spans[first : first + count]. One step and slot may have several contents.
CONTENT = int64_record("step rank slot row first count")

#: Message: `rows` rows, runs[first : first + count], of slot src_slot at rank src go to slot dst_slot at rank dst. It
#: is posted at the beginning of step `start` and finished at the end of step `done`.
MESSAGE = int64_record("start done src dst src_slot dst_slot first count rows")


def sorted_contents(contents: np.ndarray) -> np.ndarray:
    """Sort contents as a program needs them: by rank, step, slot and row."""
    return contents[np.lexsort([contents[name] for name in ("row", "slot", "step", "rank")])]


@dataclass(frozen=True, eq=False)
class Messages:
    """Messages: rows of a slot on one rank that go to rows of a slot on another, in one global order for all ranks.

    Every rank issues its sends and its receives in this order. Messages of a fetch carry K/V, messages of a reduce
    carry dK/dV, which are added to the target rows. A relay is two messages.

    Attributes:
        items: records of dtype MESSAGE, sorted by `start`.
        runs: records of dtype ROW_RUN that the items refer to.
    """

    items: np.ndarray
    runs: np.ndarray

    @staticmethod
    def empty() -> Messages:
        """Return an empty list of messages."""
        return Messages(np.empty(0, MESSAGE), np.empty(0, ROW_RUN))

    def __len__(self) -> int:
        return len(self.items)

    def runs_of(self, index: int) -> np.ndarray:
        """Return the runs of one message, records of dtype ROW_RUN."""
        item = self.items[index]
        return self.runs[item["first"] : item["first"] + item["count"]]

    def rows_of(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the row numbers of one message in its source slot and in its target slot, int64 [rows] each."""
        runs = self.runs_of(index)
        return ragged_arange(runs["src_row"], runs["rows"]), ragged_arange(runs["dst_row"], runs["rows"])

    @cached_property
    def flat_runs(self) -> tuple[np.ndarray, np.ndarray]:
        """Runs of all messages in order: message indices int64 [n], and records of dtype ROW_RUN [n]."""
        owner = np.repeat(np.arange(len(self.items)), self.items["count"])
        return owner, self.runs[ragged_arange(self.items["first"], self.items["count"])]

    def is_contiguous(self, side: str) -> np.ndarray:
        """Return, for each message, True if its rows on one side ("src" or "dst") are consecutive; bool [messages]."""
        owner, runs = self.flat_runs
        row = runs[side + "_row"]
        broken = (owner[1:] == owner[:-1]) & (row[1:] != row[:-1] + runs["rows"][:-1])
        contiguous = np.ones(len(self.items), bool)
        contiguous[owner[1:][broken]] = False
        return contiguous

    def involving(self, rank: int) -> np.ndarray:
        """Return the indices of the messages that a rank sends or receives, in global order."""
        return np.flatnonzero((self.items["src"] == rank) | (self.items["dst"] == rank))

    def reversed(self) -> Messages:
        """Exchange source and target and keep the steps: gradients return where keys and values came from."""
        items, runs = self.items.copy(), self.runs.copy()
        for a, b in (("src", "dst"), ("src_slot", "dst_slot")):
            items[a], items[b] = self.items[b], self.items[a]
        runs["src_row"], runs["dst_row"] = self.runs["dst_row"], self.runs["src_row"]
        return Messages(items, runs)

    def in_global_order(self) -> Messages:
        """Sort by start step, then by source XOR target, then by source.

        The XOR pairs ranks, so that no rank is the target of all others at once. Nor is a node or NIC, if nodes have a
        power of two ranks: the four ranks of one node begin with four different ranks of another node, where cyclic
        shifts would let all begin with the same rank.
        """
        pairing = self.items["dst"] ^ self.items["src"]
        return Messages(self.items[np.lexsort((self.items["src"], pairing, self.items["start"]))], self.runs)


class MessageBuilder:
    """Collects messages one by one, for builders of plans; joins consecutive runs and drops empty messages."""

    def __init__(self) -> None:
        self._items: list[tuple[int, ...]] = []
        self._runs: list[np.ndarray] = []
        self._count = 0

    def add(
        self,
        *,
        start: int,
        done: int,
        src: int,
        dst: int,
        src_slot: int,
        dst_slot: int,
        src_row: Sequence[int] | np.ndarray | int,
        dst_row: Sequence[int] | np.ndarray | int,
        rows: Sequence[int] | np.ndarray | int,
    ) -> None:
        """Add one message; src_row, dst_row and rows are numbers, or sequences with one entry for each run."""
        runs = np.empty(np.size(rows), ROW_RUN)
        runs["src_row"], runs["dst_row"], runs["rows"] = src_row, dst_row, rows
        runs, _ = join_runs(runs[runs["rows"] > 0], ("src_row", "dst_row"))
        if not len(runs):
            return
        total = int(runs["rows"].sum())
        self._items.append((start, done, src, dst, src_slot, dst_slot, self._count, len(runs), total))
        self._runs.append(runs)
        self._count += len(runs)

    def messages(self) -> Messages:
        """Return all added messages in global order."""
        if not self._items:
            return Messages.empty()
        return Messages(np.array(self._items, MESSAGE), np.concatenate(self._runs)).in_global_order()
