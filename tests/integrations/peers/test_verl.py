"""verl's engine by plans: the double of it, and the example with verl where it is installed."""

from __future__ import annotations

import sys

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch

from mindspeed_cp import ConfigError
from mindspeed_cp.integrations.huggingface.rows import gather_rows, packed_row_plans, slice_rows
from mindspeed_cp.integrations.verl import planned_engine, register_engines
from tests.integrations.huggingface.models import make_config, mesh_of, reference_step
from tests.integrations.peers.steps import example_steps, round_trip, verl_step
from tests.integrations.peers.verl_double import Engine

LENGTHS = (23, 1, 0, 40, 9)

CASES = [
    ("qwen3", 2, "hierarchical", LENGTHS, 1),
    ("mistral", 3, "ring", LENGTHS, 1),
    ("llama", 3, "direct", LENGTHS, 16),
    pytest.param("deepseek_v3", 3, "ulysses", LENGTHS, 1, marks=pytest.mark.thorough),
    pytest.param("llama", 4, "ring", (2, 1), 1, marks=pytest.mark.thorough),
    pytest.param("gemma3", 2, "ulysses", LENGTHS, 8, marks=pytest.mark.thorough),
]


@pytest.mark.parametrize(("name", "ranks", "algorithm", "lengths", "bucket"), CASES)
def test_a_planned_engine_equals_the_documents_one_by_one(pool, name, ranks, algorithm, lengths, bucket) -> None:
    wanted = reference_step(name, lengths)
    for step in pool.run(ranks, verl_step, name, lengths, algorithm, bucket):
        assert step.gradients.keys() == wanted.gradients.keys()
        assert step.largest_error(wanted) < 1e-5


@pytest.mark.parametrize("lengths", [LENGTHS, pytest.param((3,), marks=pytest.mark.thorough)])
def test_slices_are_gathered_in_order(pool, lengths: tuple[int, ...]) -> None:
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    for own, learned, whole in pool.run(3, round_trip, lengths, "ring"):
        assert torch.equal(own, positions) and torch.equal(learned, positions % 2 == 0)
        assert torch.equal(whole, torch.arange(3 * sum(lengths) * 2.0).reshape(3, -1, 2))


def test_one_rank_is_the_engine_as_it_was() -> None:
    mesh = mesh_of(1)
    engine = planned_engine(Engine)(make_config("llama"), {"sp": mesh})
    tokens = torch.arange(7)
    plain = Engine(make_config("llama"), {"sp": mesh})
    batch = {"input_ids": [tokens], "temperature": 0.7}
    assert torch.equal(engine.forward_step(batch), plain.forward_step(batch))
    assert engine.module.config._attn_implementation == "sdpa"
    assert type(engine).__name__ == "PlannedEngine"


def test_rows_that_do_not_fit_are_refused() -> None:
    positions = torch.arange(9)[None]
    for wrong in (positions[0], positions.expand(4, 1, 9)):
        with pytest.raises(ConfigError, match=r"position_ids have shape .*; valid: \[1, tokens\], one packed row"):
            packed_row_plans(make_config("llama"), mesh_of(3), wrong, 0)
    plans = packed_row_plans(make_config("llama"), mesh_of(3), positions, 0, algorithm="ring")
    with pytest.raises(ConfigError, match=r"shape \[1, 8\]; valid: the plans' 9 tokens in dimension 1"):
        slice_rows(positions[:, :8], plans, 1)
    with pytest.raises(ConfigError, match=r"rows in dimension 1, those of rank 0"):
        gather_rows(slice_rows(positions, plans, 1)[:, 1:], plans)


def test_every_row_drops_other_weights() -> None:
    seeds = set()
    for first in (0, 3):
        mesh = mesh_of(3)
        mesh.mesh = np.arange(first, first + 3)
        engine = planned_engine(Engine, seed=5)(make_config("llama", attention_dropout=0.1), {"sp": mesh})
        for _ in range(2):
            engine.prepare_model_inputs({"input_ids": [torch.zeros(9, dtype=torch.int64)], "temperature": 1.0})
            seeds.add(engine.row.dropout_seed)
    assert len(seeds) == 4


def test_models_that_plans_do_not_compute_are_refused_when_the_engine_is_built() -> None:
    with pytest.raises(ConfigError, match=r"attn_logit_softcapping is 50\.0"):
        planned_engine(Engine)(make_config("gemma3", attn_logit_softcapping=50.0), {"sp": mesh_of(2)})


def test_verl_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verl", None)
    with pytest.raises(ConfigError, match=r"verl's engine cannot be imported \(.*\); valid: verl 0.9"):
        register_engines()


def test_verls_engine_trains_alike_on_one_rank_and_on_three() -> None:
    pytest.importorskip("verl", reason="verl is not installed (pip install verl==0.9.1, in an environment of its own)")

    alone = example_steps("verl_engine.py", 1, 1)
    for ranks, cp in ((3, 3), (4, 2)):
        steps = example_steps("verl_engine.py", ranks, cp)
        assert len(steps) == len(alone) == 3
        for step, wanted in zip(steps, alone, strict=True):
            assert step == pytest.approx(wanted, abs=1e-5)
