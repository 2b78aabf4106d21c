"""Documents of the benchmark of balance."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import balance
from benchmarks.balance import DRAWN, SETS, draw, draw_set
from mindspeed_cp.data.packing import epoch_order


def medians_of_halves(lengths: np.ndarray) -> tuple[float, float]:
    """Return the median length of the documents that an epoch has first, and of the others."""
    first, second = np.split(lengths[epoch_order(len(lengths), 0, 0)], 2)
    return float(np.median(first)), float(np.median(second))


@pytest.mark.parametrize("name", SETS)
def test_the_order_of_packing_does_not_depend_on_lengths(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance, "real_lengths_folder", lambda name: None)
    lengths, source = draw_set(name)
    first, second = medians_of_halves(lengths)
    assert source != "real lengths" and len(lengths) == DRAWN and 0.98 < first / second < 1.02
    if name != "lognormal":  # bins are drawn by one number each: of the packer's stream, they come in its order
        first, second = medians_of_halves(draw(name, DRAWN, np.random.default_rng(0))[0])
        assert first < 0.6 * second
