"""MeasuredFits: numbers that made the seconds are found again, whatever their size, and errors are told as they are."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_cp.cluster import cluster_names, load_cluster
from mindspeed_cp.cluster.calibration import (
    MeasuredFits,
    Measurement,
    fit_seconds,
    fit_terms,
)
from mindspeed_cp.errors import ConfigError

#: Public data that lies beside a checkout and never in it.
PROFILE = Path(__file__).resolve().parent.parent.parent.parent / "shared" / "data" / "h100_attention_profile.csv"

ROWS = 2.0 ** np.arange(5, 15)
FLOPS = 4.0 * 1024 * ROWS * (ROWS + 1) / 2


def seconds_of(rate: float, tile_rows: float, launch: float) -> np.ndarray:
    return launch + FLOPS / rate * (1 + tile_rows / ROWS)


@given(st.floats(1e9, 1e15), st.floats(0, 5000), st.floats(0, 1e-3))
def test_the_attention_fit_finds_rate_tile_rows_and_launch(rate: float, tile_rows: float, launch: float) -> None:
    seconds = seconds_of(rate, tile_rows, launch)
    fit = fit_seconds("attention", seconds, FLOPS, ROWS)
    again = seconds_of(fit.rate, fit.tile_rows, fit.overhead)
    assert np.abs(again / seconds - 1).max() < 1e-6 and np.abs(fit.errors).max() < 1e-6
    if launch > 1e-3 * seconds[0] and tile_rows > 1 and launch < 0.5 * seconds[-1]:
        assert fit.overhead == pytest.approx(launch, rel=1e-2)


@given(st.floats(1e6, 1e12), st.floats(0, 1e-2))
def test_the_link_fit_finds_rate_and_latency(rate: float, latency: float) -> None:
    sizes = 2.0 ** np.arange(10, 28, 2)
    fit = fit_seconds("in_node", latency + sizes / rate, sizes)
    assert np.abs(fit.overhead + sizes / fit.rate - latency - sizes / rate).max() < 1e-6 * (latency + sizes[-1] / rate)
    assert fit.summary()["points"] == 9


def test_noise_moves_the_fit_as_much_as_it_is_and_is_told() -> None:
    random = np.random.default_rng(0)
    seconds = seconds_of(1e12, 500, 2e-5)
    errors = []
    for _ in range(50):
        fit = fit_seconds("attention", seconds * random.lognormal(0, 0.05, 10), FLOPS, ROWS)
        errors.append(fit.summary()["median_error"])
        assert fit.rate == pytest.approx(1e12, rel=0.25)
    assert 0.005 < np.mean(errors) < 0.06


def test_no_factor_is_below_zero_and_no_small_change_is_better() -> None:
    """The conditions of Karush, Kuhn and Tucker."""
    random, bound = np.random.default_rng(1), 0
    for _ in range(50):
        terms, seconds = random.random((8, 3)) + 0.01, random.random(8) + 0.1
        factors, errors = fit_terms(terms, seconds)
        modelled = terms @ factors
        assert errors == pytest.approx(modelled / seconds - 1)
        slope = terms.T @ (1 / seconds - seconds / modelled**2)
        size = terms.T @ (1 / seconds)
        free = factors > 0
        assert (factors >= 0).all() and (np.abs(slope[free]) < 1e-6 * size[free]).all()
        assert (slope[~free] > -1e-6 * size[~free]).all()
        bound += int((~free).sum())
    assert bound > 10, "cases in which a factor would be below zero"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("attention", 1.0, 1e9, 10)] * 2, "attention: 2 measurements; at least 3"),
        ([("linear", 1.0, 1e9)], "linear: 1 measurements; at least 2"),
        ([("linear", 1.0, 1e9), ("linear", 0.5, 1e12)], "linear: no rate can be told"),
    ],
)  # fmt: skip
def test_too_little_to_fit_is_refused(rows: list[tuple[str, float, float]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MeasuredFits.from_measurements([Measurement(*row) for row in rows])


@pytest.mark.skipif(not PROFILE.exists(), reason="the profile is public data that is not part of the project")
def test_tile_rows_of_the_presets_are_fitted_to_the_profile() -> None:
    """FlashAttention-2 forward on an H100, 64 / tp heads of 128: L / cp queries, the last keys aligned (docs/simulate.md)."""
    rows = list(csv.DictReader(PROFILE.read_text().splitlines()))
    length, cp, tp = (np.array([float(row[key]) for row in rows]) for key in ("L", "cp", "tp"))
    seconds = np.array([float(row["duration_per_doc"]) for row in rows]) * 1e-3
    flops = 4 * 128 * (64 / tp) * length**2 / (2 * cp)
    fit = fit_seconds("attention", seconds, flops, length / cp)
    accelerators = set(cluster_names()) - {"laptop_cpu"}
    assert {load_cluster(name).tile_rows for name in accelerators} == {round(fit.tile_rows)}
    assert fit.rate == pytest.approx(334.6e12, rel=1e-3) and fit.overhead == pytest.approx(20.8e-6, rel=1e-2)
    error = fit.summary()
    assert error["median_error"] == pytest.approx(0.052, abs=1e-3)
    assert error["largest_error"] == pytest.approx(0.220, abs=1e-3)
