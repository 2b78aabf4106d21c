"""What attention computes: the slopes of ALiBi."""

from __future__ import annotations

import pytest

from mindspeed_cp.plan import alibi_slopes


@pytest.mark.parametrize(
    ("heads", "exponents"),
    [(1, [8]), (2, [4, 8]), (8, [1, 2, 3, 4, 5, 6, 7, 8]), (6, [2, 4, 6, 8, 1, 3]), (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5])],
)  # fmt: skip
def test_slopes_of_alibi_are_those_of_the_paper(heads: int, exponents: list[float]) -> None:
    """And where heads are no power of two, those of the authors' code."""
    assert alibi_slopes(heads).tolist() == pytest.approx([2.0**-exponent for exponent in exponents], rel=1e-15)
