"""Fits of a cluster's attention, linear layers and links to measured seconds.

Each model is a sum of terms with non-negative factors, which minimize the sum of
(modelled - measured)^2 / (modelled * measured). This weighs relative errors: half the measured time counts as much as
twice the measured time, on short kernels as on long ones. The sum is a convex function of the factors.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from mindspeed_cp.errors import ConfigError

_MAX_STEPS, _MIN_DECREASE = 100, 1e-20  # of Newton's method, which takes about ten steps


@dataclass(frozen=True)
class Fit:
    """Factors of a model and the errors of the fit.

    Attributes:
        factors: fp64 [terms], non-negative.
        errors: fp64 [points], modelled / measured - 1.
    """

    factors: np.ndarray
    errors: np.ndarray

    def summary(self) -> dict[str, float]:
        """Return {"points", "median_error", "largest_error"}: absolute values of the relative errors."""
        errors = np.abs(self.errors)
        return {
            "points": len(errors),
            "median_error": float(np.median(errors)),
            "largest_error": float(errors.max()),
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
    """seconds = overhead + amount / rate: a link's latency and bytes/second, or a product's launch and FLOP/s."""

    rate: float
    overhead: float
    fit: Fit


def fit_attention(flops: np.ndarray, short_side: np.ndarray, calls: np.ndarray, seconds: np.ndarray) -> AttentionFit:
    """Fit the attention model of :class:`mindspeed_cp.cluster.ComputeCost`.

    Args:
        flops: FLOPs of each measurement, fp64 [points].
        short_side: rows of the shorter side of the tiles.
        calls: kernel calls.
        seconds: measured seconds.

    Raises:
        ConfigError: There are fewer than 3 measurements, or they determine no rate.
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
    """Fit an overhead and a rate.

    Args:
        what: name of the measured thing for error messages.
        amount: bytes or FLOPs, fp64 [points].
        seconds: measured seconds.

    Raises:
        ConfigError: There are fewer than 2 measurements, or they determine no rate.
    """
    amount, seconds = np.asarray(amount, np.float64), np.asarray(seconds, np.float64)
    _enough(what, seconds, 2)
    fit = fit_terms(np.stack([np.ones_like(amount), amount], axis=1), seconds)
    overhead, inverse = fit.factors
    if inverse <= 0:
        raise ConfigError(
            f"{what}: no rate can be told from these measurements, whose seconds do not grow with their size; measure "
            "larger ones too"
        )
    return RateFit(float(1 / inverse), float(overhead), fit)


def fit_terms(terms: np.ndarray, seconds: np.ndarray) -> Fit:
    """Return the factors >= 0 that minimize the sum of (modelled - measured)^2 / (modelled * measured).

    These are the best among the unconstrained minima of all subsets of terms that have positive factors.

    Args:
        terms: fp64 [points, terms], non-negative; each term and each point has a positive entry.
        seconds: fp64 [points], positive.
    """
    ratios = terms / seconds[:, None]
    scale = ratios.mean(axis=0)
    best, least = np.zeros(terms.shape[1]), np.inf
    for size in range(1, terms.shape[1] + 1):
        for columns in map(list, combinations(range(terms.shape[1]), size)):
            minimum = _newton(ratios[:, columns] / scale[columns])
            if minimum is not None and minimum[1] < least:
                best, least = np.zeros(terms.shape[1]), minimum[1]
                best[columns] = minimum[0] / scale[columns]
    return Fit(best, ratios @ best - 1.0)


def _newton(ratios: np.ndarray) -> tuple[np.ndarray, float] | None:
    """Return the factors with the least sum of y + 1 / y - 2 for y = ratios @ factors > 0, and that sum; None if a
    factor is not positive."""
    if not (ratios > 0).any(axis=1).all():
        return None
    factors = np.full(ratios.shape[1], 1.0 / ratios.shape[1])
    y = ratios @ factors
    for _ in range(_MAX_STEPS):
        slope = ratios.T @ (1.0 - 1.0 / y**2)
        curve = (ratios * (2.0 / y**3)[:, None]).T @ ratios
        step = np.linalg.lstsq(curve, -slope, rcond=None)[0]
        down = float(slope @ step)
        if -down < _MIN_DECREASE:
            break
        change, length, cost = ratios @ step, 1.0, float((y + 1.0 / y).sum())
        while length > 1e-12:
            new = y + length * change
            if (new > 0).all() and float((new + 1.0 / new).sum()) <= cost + 0.1 * length * down:
                break
            length /= 2
        else:
            break  # the limit of fp64
        factors, y = factors + length * step, new
    return (factors, float(((y - 1.0) ** 2 / y).sum())) if (factors > 0).all() else None


def _enough(what: str, seconds: np.ndarray, least: int) -> None:
    if len(seconds) < least:
        raise ConfigError(f"{what}: {len(seconds)} measurements; at least {least} of different sizes are needed")
