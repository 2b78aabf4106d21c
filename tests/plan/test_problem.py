"""What attention computes: the slopes of ALiBi, numbers of NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from mindspeed_cp.algorithms import ALGORITHMS, build_plan
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan import AttentionConfig, Topology, alibi_slopes
from mindspeed_cp.plan.verify import verify_plan


@pytest.mark.parametrize(
    ("heads", "exponents"),
    [(1, [8]), (2, [4, 8]), (8, [1, 2, 3, 4, 5, 6, 7, 8]), (6, [2, 4, 6, 8, 1, 3]), (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5])],
)  # fmt: skip
def test_slopes_of_alibi_are_those_of_the_paper(heads: int, exponents: list[float]) -> None:
    """And where heads are no power of two, those of the authors' code."""
    assert alibi_slopes(heads).tolist() == pytest.approx([2.0**-exponent for exponent in exponents], rel=1e-15)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_integers_of_numpy_plan_what_those_of_python_do(algorithm: str) -> None:
    documents, four, eight = Documents([100, 2000, 30]), np.int64(4), np.int32(8)
    for attention, same in (
        (AttentionConfig(eight, four, four, alibi=True), AttentionConfig(8, 4, 4, alibi=True)),
        (AttentionConfig(eight, head_dim=eight, latent=(eight, four)), AttentionConfig(8, head_dim=8, latent=(8, 4))),
    ):
        plan = build_plan(documents, Topology(np.int64(2), four), attention, algorithm)
        verify_plan(plan)
        expected = build_plan(documents, Topology(2, 4), same, algorithm)
        assert repr((plan.attention, plan.topology)) == repr((expected.attention, expected.topology))
