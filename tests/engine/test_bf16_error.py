"""The error of bf16 on many ranks is that of one rank, under every mask and algorithm."""

from __future__ import annotations

import pytest

from benchmarks.bf16_error import MASKS, NAMES, l2_errors, lengths_of
from mindspeed_cp import AttentionConfig
from mindspeed_cp.algorithms import ALGORITHMS
from mindspeed_cp.ops.attention.cpu import cost_model

LENGTHS = lengths_of(1200)
DEFAULT = {("causal", "ring"), ("full", "hierarchical"), ("window", "direct"), ("GQA", "ulysses"), ("MLA", "ring")}


def limit(has_bf16: bool, mask: str, algorithm: str) -> float:
    """Largest ratio of errors.

    With bf16 instructions one rank may cut a window into calls so small that all of them run in fp32, while a rank of
    hierarchical, with fewer heads, cuts it into larger ones in bf16. Its error is still below that of plain causal attention.
    """
    return 1.4 if has_bf16 and algorithm == "hierarchical" and "window" in mask else 1.1


@pytest.mark.parametrize("has_bf16", [False, True])
@pytest.mark.parametrize(
    ("mask", "algorithm"),
    [
        pytest.param(mask, name, marks=() if (mask, name) in DEFAULT else pytest.mark.thorough)
        for mask in MASKS
        for name in ALGORITHMS
    ],
)
def test_the_ranks_add_nothing(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, mask: str, algorithm: str, has_bf16: bool
) -> None:
    monkeypatch.setattr(cost_model, "computes_in", lambda dtype: has_bf16)
    ranks = (8, 16) if request.config.getoption("--thorough") else (8,)
    for lengths in LENGTHS.values():
        errors = l2_errors(AttentionConfig(**MASKS[mask]), lengths, [algorithm], ranks, 1)
        for count in ranks:
            ratios = dict(zip(NAMES, errors[algorithm, count] / errors[algorithm, 1], strict=True))
            assert max(ratios.values()) <= limit(has_bf16, mask, algorithm), (lengths, count, ratios)
