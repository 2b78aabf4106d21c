"""The table of capabilities: a plan exists for every exact cell, and what is refused says what is valid."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from mindspeed_cp import AttentionConfig, ConfigError, Documents, Topology, build_plan, verify_plan
from mindspeed_cp.config import capabilities
from mindspeed_cp.config.capabilities import FEATURES, REFUSALS, Refusal, all_cells, capabilities_md, check, refusal
from mindspeed_cp.ops.attention import BACKENDS
from tests.cells import example


@pytest.mark.parametrize("algorithm", FEATURES["algorithm"])
def test_every_cell_is_exact_or_refused_with_an_alternative(algorithm: str) -> None:
    """Settings and plans agree with the table, and every plan is proved."""
    cells = [cell for cell in all_cells() if cell.algorithm == algorithm]
    assert len(cells) == math.prod(len(values) for name, values in FEATURES.items() if name != "algorithm")
    proved = set()
    for cell in cells:
        documents, keys, attention = example(cell)
        reason = refusal(cell)
        if reason is None:
            check(algorithm, attention, documents, keys, cell.backend)
            if cell.backend != FEATURES["backend"][0]:  # plans know no backend
                continue
            plan = build_plan(documents, Topology(1, 3), attention, algorithm, kv_documents=keys)
            decides = (cell.documents, cell.keys, replace(attention, alibi=False, dropout=0.0))
            if decides not in proved:  # neither bias nor dropout changes who sends and computes what
                proved.add(decides)
                verify_plan(plan)
            continue
        assert "; valid: " in str(reason)
        with pytest.raises(ConfigError) as told:
            check(algorithm, attention, documents, keys, cell.backend)
        assert str(told.value) == str(reason)
        if "backend" in reason.where:  # the operator refuses, in every type
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                with pytest.raises(ConfigError, match="valid"):
                    BACKENDS[cell.backend].check(attention, dtype)
            continue
        with pytest.raises(ConfigError, match="valid: "):
            build_plan(documents, Topology(1, 3), attention, algorithm, kv_documents=keys)


def test_every_refusal_is_of_some_cell() -> None:
    for row in REFUSALS:
        assert all(value in FEATURES[name] for name, value in row.where.items())
        assert any(refusal(cell) is row for cell in all_cells())


def test_an_example_is_in_its_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one cell refused, its example is refused and no other cell's."""
    for number, cell in enumerate(all_cells()):
        if number % 97:
            continue
        row = Refusal(dict(vars(cell)), "this cell", "the others")
        monkeypatch.setattr(capabilities, "REFUSALS", (row,))
        for other in all_cells():
            if sum(a != b for a, b in zip(vars(cell).values(), vars(other).values(), strict=True)) > 1:
                continue
            documents, keys, attention = example(other)
            arguments = (other.algorithm, attention, documents, keys, other.backend)
            if other == cell:
                with pytest.raises(ConfigError, match="this cell; valid: the others"):
                    check(*arguments)
            else:
                check(*arguments)


def test_what_is_not_known_yet_may_be_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without documents a refusal of either kind of them counts; auto is refused when every backend refuses."""
    monkeypatch.setattr(capabilities, "REFUSALS", (Refusal({"documents": "packed"}, "packed", "rows"),))
    attention = AttentionConfig(4)
    with pytest.raises(ConfigError, match="packed"):
        check("p2p", attention)
    check("p2p", attention, Documents([5, 5]))
    monkeypatch.setattr(capabilities, "BACKEND_NAMES", ("cpu", "other"))
    monkeypatch.setattr(capabilities, "REFUSALS", (Refusal({"backend": "cpu"}, "cpu", "other"),))
    check("p2p", attention)
    with pytest.raises(ConfigError, match="cpu; valid: other"):
        check("p2p", attention, backend="cpu")
    with pytest.raises(ConfigError, match="backend is 'tpu'; valid: auto, cpu, other"):
        check("p2p", attention, backend="tpu")


def test_the_table_names_the_backends_that_exist() -> None:
    from mindspeed_cp.ops.attention import BACKENDS

    assert set(capabilities.BACKEND_NAMES) == set(BACKENDS)


def test_the_page_has_a_column_for_each_set_of_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = Refusal({"algorithm": "direct", "bias": "alibi"}, "attention.alibi is True", "ring")
    monkeypatch.setattr(capabilities, "REFUSALS", (refused,))
    lines = capabilities_md().splitlines()
    assert "| | ring, double_ring, ulysses, hybrid, all_gather, hierarchical | direct |" in lines
    assert "| ALiBi | exact | refused (1) |" in lines and "| full mask | exact | exact |" in lines
    assert "1. Refused: attention.alibi is True; valid: ring." in lines
