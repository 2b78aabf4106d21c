"""Which tile is the first on a row of queries: its result is stored there, those of later tiles are merged."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class FirstTouch:
    """The first tile on every row, for tiles that touch all their rows.

    Many tiles share few borders, so rows are counted in segments between two borders:

        tile 0    # # # # # . . .
        tile 1    . . # # # # # .
        segment   0 0 1 1 1 2 2      first tile on it: 0, 0 and 1

    Attributes:
        edges: rows at which tiles begin or end, ascending; segment i is the rows edges[i] .. edges[i + 1] - 1.
        first: number of the first tile on each segment; as many as there are tiles: none.
        start, stop: first and last-plus-one segment of each tile.
        fresh: how many segments of each tile no tile before has touched.
    """

    edges: np.ndarray
    first: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    fresh: np.ndarray

    @staticmethod
    def of(q_row: np.ndarray, q_rows: np.ndarray) -> FirstTouch:
        """For tiles in the order they run.

        Args:
            q_row: first row of each tile.
            q_rows: how many rows it has.
        """
        edges, places = np.unique(np.stack([q_row, q_row + q_rows]), return_inverse=True)
        start, stop = places.reshape(2, -1)
        many = stop - start
        tile = np.repeat(np.arange(len(many)), many)
        segment = np.arange(len(tile)) + np.repeat(start - (np.cumsum(many) - many), many)
        first = np.full(len(edges), len(many))
        np.minimum.at(first, segment, tile)
        fresh = np.bincount(tile[first[segment] == tile], minlength=len(many))
        return FirstTouch(edges, first, start, stop, fresh)

    @property
    def alone(self) -> np.ndarray:
        """Whether no tile before has touched any row of a tile, bool [tiles]."""
        return self.fresh == self.stop - self.start

    @property
    def mixed(self) -> np.ndarray:
        """Numbers of the tiles of which tiles before have touched some rows, not all."""
        return np.flatnonzero((self.fresh > 0) & ~self.alone)

    def fresh_rows(self, tile: int) -> tuple[slice, ...]:
        """Runs of rows of a tile that no tile before has touched."""
        a, b = self.start[tile], self.stop[tile]
        edges = self.edges[a : b + 1].tolist()
        return tuple(slice(edges[run.start], edges[run.stop]) for run in runs(self.first[a:b] == tile, 0))

    def touched(self, tile: int) -> np.ndarray:
        """Whether tiles before have touched a row, bool [rows of the tile]."""
        a, b = self.start[tile], self.stop[tile]
        return np.repeat(self.first[a:b] < tile, np.diff(self.edges[a : b + 1]))


def runs(wanted: np.ndarray, start: int) -> tuple[slice, ...]:
    """Runs of True, counted from `start`."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], wanted, [False]]).astype(np.int8))) + start
    return tuple(slice(a, b) for a, b in edges.reshape(-1, 2).tolist())
