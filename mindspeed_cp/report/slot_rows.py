"""Tokens in the slot rows on which ranks compute."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mindspeed_cp.layout import ragged_arange
from mindspeed_cp.plan import Program


class SlotRows:
    """The slot rows on which ranks compute, in all steps of a program, on one axis of addresses.

    Attributes:
        spans: runs of tokens in these rows, records of dtype TOKEN_SPAN by address.
        first, last: first and last-plus-one address of each span, int64 [spans]; spans do not overlap.
        groups: `group` of all (rank, slot, step) with rows, ascending and unique.
    """

    def __init__(self, program: Program, ranks: Sequence[int] | np.ndarray) -> None:
        contents = program.contents[np.isin(program.contents["rank"], ranks)]
        self._slots, self.steps = program.capacity.shape[1], program.steps + 1
        self.width = int(program.capacity.max(initial=0)) + 1
        groups = self.group(contents["rank"], contents["slot"], contents["step"])
        content = np.repeat(np.arange(len(contents)), contents["count"])
        spans = program.spans[ragged_arange(contents["first"], contents["count"])]
        rows = spans["stop"] - spans["start"]
        before = np.cumsum(rows) - rows
        begins = groups * self.width + contents["row"] - before[np.cumsum(contents["count"]) - contents["count"]]
        first = begins[content] + before
        order = np.argsort(first, kind="stable")
        self.groups, self.spans, self.first = np.unique(groups), spans[order], first[order]
        self.last = self.first + rows[order]

    def group(self, rank: np.ndarray | int, slot: np.ndarray, step: np.ndarray | int) -> np.ndarray:
        """Return a number for each (rank, slot, step), ascending in this order."""
        return (rank * self._slots + slot) * self.steps + step

    def addresses(self, rank: int, tiles: np.ndarray) -> np.ndarray:
        """Return the address of the first key row of tiles of a rank (records of dtype TILE)."""
        return self.group(rank, tiles["slot"], tiles["step"]) * self.width + tiles["k_row"]
