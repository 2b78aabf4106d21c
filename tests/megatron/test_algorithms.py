"""Every algorithm under Megatron: the adaptor cuts batches and rotates by the plan's layout, whatever that is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mindspeed_cp.algorithms import ALGORITHMS, LAYOUT_NAMES
from tests.megatron.gpt import Case, Outcome, available, on_ranks, one_rank, planned
from tests.megatron.models import LATENT, SIX_HEADS
from tests.megatron.ranks import MegatronRanks
from tests.megatron.test_gpt import MORE, RAGGED, assert_equal

ALL_CASES = {
    "grouped": Case((RAGGED, MORE)),
    "latent": Case((RAGGED, MORE), config=LATENT),
    "ALiBi, window, dropout": Case(
        (RAGGED, MORE), alibi=True, config=dict(**SIX_HEADS, window_size=(11, 0), attention_dropout=0.3)
    ),
    "window in every other layer": Case((RAGGED, MORE), config=dict(window_size=(11, 0), window_attn_skip_freq=2)),
}
CASES = available(ALL_CASES)
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ALGORITHMS},
    **{f"ring, {layout}": ("ring", {"layout": layout}) for layout in LAYOUT_NAMES[1:]},
    "direct, balanced, three ahead": ("direct", {"layout": "balanced", "prefetch": 3}),
}

#: One that moves keys, one that moves heads and one that places documents; tests/engine has all of them on all sizes.
DEFAULT = ("ulysses", "hierarchical")


@pytest.fixture(scope="module")
def reference() -> dict[str, Outcome]:
    with one_rank():
        return {name: planned(case) for name, case in CASES.items()}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way in DEFAULT else pytest.mark.thorough) for way in WAYS]
)
def test_every_algorithm_gives_the_step_of_one_rank(
    way: str, ranks: MegatronRanks, reference: dict[str, Outcome]
) -> None:
    algorithm, options = WAYS[way]
    cases = {name: replace(case, algorithm=algorithm, options=options) for name, case in CASES.items()}
    if options.get("layout") == "balanced" or algorithm == "hierarchical":
        cases.pop("window in every other layer", None)  # refused, see test_settings
    sizes = [(1, 3), (2, 2)] if way in ("ulysses", "direct") else [(1, 4)]
    for tp, cp in sizes:
        for outcomes in ranks.run(tp * cp, on_ranks, tp, cp, list(cases.values())):
            for name, outcome in zip(cases, outcomes, strict=True):
                assert_equal(outcome, reference[name])
