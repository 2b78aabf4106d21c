"""First tile that writes each row of queries: its result is stored, the results of later tiles are merged."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class FirstWrite:
    """First tile on every row, for tiles that write all their rows.

    Many tiles share few borders, so that rows are grouped into segments between two borders:

        tile 0    # # # # # . . .
        tile 1    . . # # # # # .
        segment   0 0 1 1 1 2 2      first tile on it: 0, 0 and 1

    Attributes:
        edges: rows at which tiles begin or end, ascending; segment i is the rows edges[i] .. edges[i + 1] - 1.
        first: number of the first tile on each segment; the number of tiles if there is none.
        start, stop: first and last-plus-one segment of each tile.
        unwritten: for each tile, number of its segments that no earlier tile has written.
        shared: bool [tiles], True where another tile, earlier or later, writes a row of the tile.
    """

    edges: np.ndarray
    first: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    unwritten: np.ndarray
    shared: np.ndarray

    @staticmethod
    def of(q_row: np.ndarray, q_rows: np.ndarray) -> FirstWrite:
        """Find the first tiles.

        Args:
            q_row: first row of each tile, in execution order.
            q_rows: rows of each tile.
        """
        edges, edge_index = np.unique(np.stack([q_row, q_row + q_rows]), return_inverse=True)
        start, stop = edge_index.reshape(2, -1)
        count = stop - start
        tile = np.repeat(np.arange(len(count)), count)
        segment = np.arange(len(tile)) + np.repeat(start - (np.cumsum(count) - count), count)
        first = np.full(len(edges), len(count))
        np.minimum.at(first, segment, tile)
        unwritten = np.bincount(tile[first[segment] == tile], minlength=len(count))
        several = np.bincount(segment, minlength=len(edges)) > 1
        shared_before = np.concatenate([[0], np.cumsum(several)])
        return FirstWrite(edges, first, start, stop, unwritten, shared_before[stop] > shared_before[start])

    @property
    def all_unwritten(self) -> np.ndarray:
        """bool [tiles]: True where no earlier tile has written any row of the tile."""
        return self.unwritten == self.stop - self.start

    @property
    def partly_written(self) -> np.ndarray:
        """Numbers of the tiles of which earlier tiles have written some rows, but not all."""
        return np.flatnonzero((self.unwritten > 0) & ~self.all_unwritten)

    def unwritten_rows(self, tile: int) -> tuple[slice, ...]:
        """Return the runs of rows of a tile that no earlier tile has written."""
        a, b = self.start[tile], self.stop[tile]
        edges = self.edges[a : b + 1].tolist()
        return tuple(slice(edges[run.start], edges[run.stop]) for run in true_runs(self.first[a:b] == tile, 0))

    def written_before(self, tile: int) -> np.ndarray:
        """Return bool [rows of the tile]: True where an earlier tile has written the row."""
        a, b = self.start[tile], self.stop[tile]
        return np.repeat(self.first[a:b] < tile, np.diff(self.edges[a : b + 1]))


def true_runs(selected: np.ndarray, start: int) -> tuple[slice, ...]:
    """Return the runs of True as slices, counted from `start`."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], selected, [False]]).astype(np.int8))) + start
    return tuple(slice(a, b) for a, b in edges.reshape(-1, 2).tolist())
