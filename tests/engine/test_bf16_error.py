"""The error of bf16 on many ranks is that of one rank, under every mask and algorithm."""

from __future__ import annotations

import pytest

from benchmarks.bf16_error import MASKS, NAMES, l2_errors, lengths_of
from mindspeed_cp import AttentionConfig
from mindspeed_cp.algorithms import ALGORITHMS
from mindspeed_cp.ops.attention.npu.backend import NpuAttention
from tests.host_cann import oracle_math
from tests.ops.npu_oracle import OracleOperator

LENGTHS = lengths_of(1200)
DEFAULT = {("causal", "ring"), ("full", "hierarchical"), ("window", "direct"), ("GQA", "ulysses"), ("MLA", "ring")}


@pytest.mark.parametrize(
    ("mask", "algorithm"),
    [
        pytest.param(mask, name, marks=() if (mask, name) in DEFAULT else pytest.mark.thorough)
        for mask in MASKS
        for name in ALGORITHMS
    ],
)
def test_the_ranks_add_nothing(request: pytest.FixtureRequest, mask: str, algorithm: str) -> None:
    ranks = (8, 16) if request.config.getoption("--thorough") else (8,)
    for lengths in LENGTHS.values():
        errors = l2_errors(AttentionConfig(**MASKS[mask]), lengths, [algorithm], ranks, 1)
        for count in ranks:
            ratios = dict(zip(NAMES, errors[algorithm, count] / errors[algorithm, 1], strict=True))
            assert max(ratios.values()) <= 1.1, (lengths, count, ratios)


@pytest.mark.parametrize(("precision", "limit"), [("input", 1.5), ("fp16", 1.05), ("fp32", 1.05)])
@pytest.mark.parametrize(
    ("mask", "algorithm"),
    [
        pytest.param(mask, name, marks=() if (mask, name) == ("GQA", "ring") else pytest.mark.thorough)
        for mask in MASKS
        for name in ("ring", "hierarchical", "all_gather")
        if mask != "dropout"
    ],
)
def test_the_npu_backend_adds_the_rounding_of_each_call_or_nothing(
    mask: str, algorithm: str, precision: str, limit: float
) -> None:
    backend = NpuAttention(precision=precision, operator=OracleOperator())
    for lengths in lengths_of(600).values():
        errors = l2_errors(AttentionConfig(**MASKS[mask]), lengths, [algorithm], (8,), 1, backend)
        ratios = dict(zip(NAMES, errors[algorithm, 8] / errors[algorithm, 1], strict=True))
        assert max(ratios.values()) <= limit, (lengths, ratios)


def test_operators_that_round_weights_leave_less_for_the_ranks_to_add(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = AttentionConfig(**MASKS["GQA"])
    backend = NpuAttention(precision="input", operator=OracleOperator())
    errors = []
    for rounds in (False, True):
        monkeypatch.setattr(oracle_math, "rounds_weights", rounds)
        errors.append(l2_errors(attention, lengths_of(600)["one document"], ["ring"], (8,), 1, backend))
    exact, rounded = errors
    assert (rounded["ring", 1] > 1.15 * exact["ring", 1]).all()
    assert (rounded["ring", 8] / rounded["ring", 1]).max() <= 1.3 < (exact["ring", 8] / exact["ring", 1]).max()
