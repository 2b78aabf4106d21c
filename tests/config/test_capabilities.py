"""The table of capabilities: a plan exists for every exact cell, and what is refused says what is valid."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from mindspeed_cp import ConfigError, Topology, build_plan, verify_plan
from mindspeed_cp.ops.attention.backends import BACKENDS
from mindspeed_cp.schema.unsupported import ATTENTION
from tests.cells import example
from tools.capabilities import BACKEND_NAMES, FEATURES, all_cells, unsupported


@pytest.mark.parametrize("algorithm", FEATURES["algorithm"])
def test_every_cell_is_exact_or_refused_with_an_alternative(algorithm: str) -> None:
    """Plans and operators agree with the table, and every plan is proved."""
    cells = [cell for cell in all_cells() if cell.algorithm == algorithm]
    assert len(cells) == math.prod(len(values) for name, values in FEATURES.items() if name != "algorithm")
    proved = set()
    for cell in cells:
        documents, keys, attention = example(cell)
        row = unsupported(cell)
        if row is None:
            if cell.backend != FEATURES["backend"][0]:  # plans know no backend
                continue
            plan = build_plan(documents, Topology(1, 3), attention, algorithm, kv_documents=keys)
            decides = (
                cell.documents,
                cell.keys,
                replace(attention, alibi=False, dropout=0.0, head_dim_v=attention.head_dim),
            )
            if decides not in proved:  # neither bias, dropout nor widths change who computes what
                proved.add(decides)
                verify_plan(plan)
        elif "backend" in row.features:  # the operator refuses, in every type
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                with pytest.raises(ConfigError, match="valid"):
                    BACKENDS[cell.backend].check(attention, dtype)
        else:
            with pytest.raises(ConfigError, match="valid: "):
                build_plan(documents, Topology(1, 3), attention, algorithm, kv_documents=keys)


def test_every_row_is_of_some_cell_and_backends_are_those_that_exist() -> None:
    for row in ATTENTION:
        assert all(value in FEATURES[name] for name, value in row.features.items())
        assert any(unsupported(cell) is row for cell in all_cells())
    assert set(BACKEND_NAMES) == set(BACKENDS)
