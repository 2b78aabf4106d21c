"""Numbers of a cluster from measured seconds: attention, linear layers, links.

Every model is a sum of terms with factors that are not negative.  They are those with the least sum
of (modelled - measured)^2 / (modelled * measured), so that a microsecond counts on a short kernel as a millisecond on a
long one, and half as long as much as twice as long.  That is a convex function of the factors.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from mindspeed_cp.errors import ConfigError

_STEPS, _SETTLED = 100, 1e-20  # of Newton's method; it ends at this decrease, in about ten steps


@dataclass(frozen=True)
class Fit:
    """Factors of a model and how well they fit.

    Attributes:
        factors: fp64 [terms], 0 or more.
        errors: fp64 [points], modelled / measured - 1.
    """

    factors: np.ndarray
    errors: np.ndarray

    def summary(self) -> dict[str, float]:
        """{"points", "median_error", "largest_error"}: the absolute errors as shares."""
        size = np.abs(self.errors)
        return {
            "points": len(size),
            "median_error": float(np.median(size)),
            "largest_error": float(size.max()),
        }


@dataclass(frozen=True)
class AttentionFit:
    """seconds = calls * launch + flops / rate * (1 + tile_rows / short_side)."""

    rate: float
    tile_rows: float
    launch: float
    fit: Fit


@dataclass(frozen=True)
class RateFit:
    """seconds = start + amount / rate: a link's latency and bytes/second, or a product's launch and FLOP/s."""

    rate: float
    start: float
    fit: Fit


def fit_attention(flops: np.ndarray, short_side: np.ndarray, calls: np.ndarray, seconds: np.ndarray) -> AttentionFit:
    """Fit the attention model of :class:`mindspeed_cp.cost.ComputeCost`.

    Args:
        flops: of each measurement, fp64 [points].
        short_side: rows of the shorter side of its tiles.
        calls: its kernel calls.
        seconds: measured.

    Raises:
        ConfigError: fewer than 3 measurements, or they do not tell a rate.
    """
    flops, short, calls, seconds = (np.asarray(x, np.float64) for x in (flops, short_side, calls, seconds))
    _enough("attention", seconds, 3)
    fit = fit_terms(np.stack([calls, flops, flops / short], axis=1), seconds)
    launch, inverse, tile = fit.factors
    if inverse <= 0:
        raise ConfigError(
            "attention: no rate can be told from these measurements, whose seconds do not grow with their FLOPs where "
            "tiles are long; measure longer tiles (calibrate --longest)"
        )
    return AttentionFit(float(1 / inverse), float(tile / inverse), float(launch), fit)


def fit_rate(what: str, amount: np.ndarray, seconds: np.ndarray) -> RateFit:
    """Fit a start and a rate.

    Args:
        what: is measured, for errors.
        amount: bytes or FLOPs, fp64 [points].
        seconds: measured.

    Raises:
        ConfigError: fewer than 2 measurements, or they do not tell a rate.
    """
    amount, seconds = np.asarray(amount, np.float64), np.asarray(seconds, np.float64)
    _enough(what, seconds, 2)
    fit = fit_terms(np.stack([np.ones_like(amount), amount], axis=1), seconds)
    start, inverse = fit.factors
    if inverse <= 0:
        raise ConfigError(
            f"{what}: no rate can be told from these measurements, whose seconds do not grow with their size; measure "
            "larger ones too"
        )
    return RateFit(float(1 / inverse), float(start), fit)


def fit_terms(terms: np.ndarray, seconds: np.ndarray) -> Fit:
    """The factors >= 0 of the terms with the least sum of (modelled - measured)^2 / (modelled * measured).

    They are the best of those of all subsets of terms whose own best factors are above 0.

    Args:
        terms: fp64 [points, terms], 0 or more, each above 0 somewhere; every point has a term above 0.
        seconds: fp64 [points], above 0.
    """
    ratios = terms / seconds[:, None]
    scale = ratios.mean(axis=0)
    best, least = np.zeros(terms.shape[1]), np.inf
    for size in range(1, terms.shape[1] + 1):
        for columns in map(list, combinations(range(terms.shape[1]), size)):
            found = _newton(ratios[:, columns] / scale[columns])
            if found is not None and found[1] < least:
                best, least = np.zeros(terms.shape[1]), found[1]
                best[columns] = found[0] / scale[columns]
    return Fit(best, ratios @ best - 1.0)


def _newton(ratios: np.ndarray) -> tuple[np.ndarray, float] | None:
    """The least sum of y + 1 / y - 2 for y = ratios @ factors > 0, and the factors; None where one is not above 0."""
    if not (ratios > 0).any(axis=1).all():
        return None
    factors = np.full(ratios.shape[1], 1.0 / ratios.shape[1])
    y = ratios @ factors
    for _ in range(_STEPS):
        slope = ratios.T @ (1.0 - 1.0 / y**2)
        curve = (ratios * (2.0 / y**3)[:, None]).T @ ratios
        step = np.linalg.lstsq(curve, -slope, rcond=None)[0]
        down = float(slope @ step)
        if -down < _SETTLED:
            break
        change, length, cost = ratios @ step, 1.0, float((y + 1.0 / y).sum())
        while length > 1e-12:
            new = y + length * change
            if (new > 0).all() and float((new + 1.0 / new).sum()) <= cost + 0.1 * length * down:
                break
            length /= 2
        else:
            break  # as far as fp64 goes
        factors, y = factors + length * step, new
    return (factors, float(((y - 1.0) ** 2 / y).sum())) if (factors > 0).all() else None


def _enough(what: str, seconds: np.ndarray, least: int) -> None:
    if len(seconds) < least:
        raise ConfigError(f"{what}: {len(seconds)} measurements; at least {least} of different sizes are needed")
