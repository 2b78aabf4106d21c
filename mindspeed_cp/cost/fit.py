"""Numbers of a cluster from measured seconds: attention, linear layers, links.

Every model is a sum of terms with factors that are not negative; the factors are those with the least squared relative
error, sum (modelled - measured)^2 / (modelled * measured), so that a microsecond counts on a short kernel as a
millisecond on a long one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from mindspeed_cp.errors import ConfigError

_ROUNDS = 12  # of weights; the factors settle to 1e-6 in fewer


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
            "tiles are long; measure longer tiles too"
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
    """The factors >= 0 of the terms with the least squared relative error.

    Args:
        terms: fp64 [points, terms], few terms: every subset of them is tried.
        seconds: fp64 [points], above 0.
    """
    weights = 1.0 / seconds
    factors = np.zeros(terms.shape[1])
    for _ in range(_ROUNDS):
        factors = _not_negative(terms * weights[:, None], seconds * weights)
        modelled = terms @ factors
        weights = 1.0 / np.sqrt(np.maximum(modelled, 1e-3 * seconds) * seconds)
    return Fit(factors, terms @ factors / seconds - 1.0)


def _not_negative(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Least squares under factors >= 0: the best of the plain solutions over subsets of columns that has none below
    0."""
    best, least = np.zeros(matrix.shape[1]), float(target @ target)
    for size in range(1, matrix.shape[1] + 1):
        for columns in map(list, combinations(range(matrix.shape[1]), size)):
            scale = np.linalg.norm(matrix[:, columns], axis=0)
            if not scale.all():
                continue
            found = np.linalg.lstsq(matrix[:, columns] / scale, target, rcond=None)[0] / scale
            if (found < 0).any():
                continue
            rest = matrix[:, columns] @ found - target
            if rest @ rest < least:
                best, least = np.zeros(matrix.shape[1]), float(rest @ rest)
                best[columns] = found
    return best


def _enough(what: str, seconds: np.ndarray, least: int) -> None:
    if len(seconds) < least:
        raise ConfigError(f"{what}: {len(seconds)} measurements; at least {least} of different sizes are needed")
