"""Polygons in the attention matrix."""

from __future__ import annotations

import numpy as np


def clip_to_band(box: tuple[int, int, int, int], low: float, high: float) -> np.ndarray:
    """Return the corners of the part of a box (x first, y first, x last, y last) where y + low <= x <= y + high.

    Row i sees columns up to i + b. The line x = y + b + 0.5 goes through the middle of these stairs, so that areas
    equal counts.
    """
    x0, y0, x1, y1 = box
    corners = [(float(x0), float(y0)), (float(x1), float(y0)), (float(x1), float(y1)), (float(x0), float(y1))]
    for bound, sign in ((high, 1), (low, -1)):
        if np.isinf(bound):
            continue
        kept: list[tuple[float, float]] = []
        for (ax, ay), (bx, by) in zip(corners, corners[1:] + corners[:1], strict=True):
            a, b = sign * (ay + bound - ax), sign * (by + bound - bx)  # not negative: inside
            if a >= 0:
                kept.append((ax, ay))
            if (a > 0 > b) or (a < 0 < b):
                share = a / (a - b)
                kept.append((ax + share * (bx - ax), ay + share * (by - ay)))
        corners = kept
    return np.array(corners) if len(corners) > 2 else np.empty((0, 2))


def polygon_area(corners: np.ndarray) -> float:
    """Return the area inside an outline (shoelace formula)."""
    x, y = corners.T
    return float(abs(x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2)
