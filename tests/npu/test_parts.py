"""Plans of parts on tensors of device "npu": moves and exchanges under way together, as coalesced launches and through
directional groups; streams are delayed at random and sends wait for their receivers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine.cases import worst
from tests.engine.test_parts import PROBLEMS, Mixed
from tests.npu.ranks import run
from tests.npu.test_table import ROUGH, attend_all, tensors

NAMES = ("GQA", "a ring", "heads split after a hybrid", "another layout held", "window", "no token")


@pytest.mark.parametrize("directional", [False, True])
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_parts_agree_with_fp64(size: int, directional: bool) -> None:
    cases = [replace(PROBLEMS[name].on(size), order=order) for name in NAMES for order in (None, 3)]
    assert all(isinstance(case, Mixed) for case in cases)
    parts = run(size, attend_all, cases, directional, environment=ROUGH).values()
    largest_errors = {case: worst(case, [tensors(part[i]) for part in parts]) for i, case in enumerate(cases)}
    assert {case: error for case, error in largest_errors.items() if error > 1e-5} == {}
