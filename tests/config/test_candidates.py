"""context_parallel_suite.candidates: what rows may choose from, and the process groups that this leaves."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_cp.choose.candidates import Candidate
from mindspeed_cp.config.candidates import candidate_settings, replace_algorithm
from mindspeed_cp.config.settings import Settings
from mindspeed_cp.errors import ConfigError


def suite(**changes: Any) -> Settings:
    return Settings(data={"seq_length": 517}, context_parallel_suite={"context_parallel_size": 2, **changes})  # type: ignore[arg-type]


def test_directional_groups_are_for_rings_alone() -> None:
    rings = suite(candidates=["double_ring:cp_window_size=2"])
    assert rings.context_parallel_suite.uses_directional_groups
    mixed = suite(candidates=["double_ring:cp_window_size=2", "ulysses"])
    assert not mixed.context_parallel_suite.uses_directional_groups
    assert not any(candidate.context_parallel_suite.uses_directional_groups for candidate in candidate_settings(mixed))


def test_ring_chosen_by_auto_has_directional_groups() -> None:
    settings = suite(algorithm="auto")
    ring = replace_algorithm(settings, Candidate("ring"))
    assert ring.context_parallel_suite.p2p_groups == "auto" and ring.context_parallel_suite.uses_directional_groups
    assert not replace_algorithm(
        settings, Candidate("ring"), ["ulysses"]
    ).context_parallel_suite.uses_directional_groups


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"candidates": ["rings"]}, "candidates = \"rings\": cannot be used: algorithm is 'rings': unknown algorithm"),
        ({"candidates": ["ring"]}, 'candidates = "ring": cannot be used: it is there already; leave it out'),
        ({"candidates": ["hybrid", "hybrid"]}, 'candidates = "hybrid": cannot be used: it is there already'),
        (
            {"candidates": ["hybrid:window=2"]},
            "'window=2': hybrid has no such option; valid: ulysses_degree=..., layout=...",
        ),
        ({"candidates": ["hybrid:ulysses_degree=2:ulysses_degree=4"]}, "ulysses_degree is given twice"),
        ({"candidates": ["hybrid:ulysses_degree=3"]}, "must be a divisor of the 2 ranks: 1, 2 or null"),
        ({"candidates": ["ring:layout=round"]}, "layout is 'round'; valid: one of zigzag, contiguous, balanced"),
        ({"candidates": 3}, "context_parallel_suite.candidates = 3: must be a list of texts or auto or null"),
        ({"candidates": [3]}, "context_parallel_suite.candidates.0 = 3: must be a list of texts or auto or null"),
        (
            {"candidates": ["hierarchical:prefetch=2:routing=true", "hierarchical:routing=true:prefetch=2"]},
            "it is there already",
        ),
        ({"candidates": "auto"}, 'candidates = "auto": needs algorithm: auto; or name the algorithms'),
        (
            {"algorithm": "auto", "candidates": ["ring"]},
            "auto chooses the other algorithms itself; give candidates: auto",
        ),
    ],
)
def test_candidates_that_cannot_be_used_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match="context_parallel_suite") as caught:
        suite(**changes)
    assert said in str(caught.value) and "\n" not in str(caught.value)
