"""verl's functions and engine by plans: the double of its engine, and the example with verl where it is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch

from mindspeed_cp import ConfigError
from mindspeed_cp.integrations.verl import PlannedUlysses, planned_engine, register_engines
from tests.integrations.huggingface.models import make_config, reference_step
from tests.integrations.peers.steps import round_trip, verl_step
from tests.integrations.peers.verl_double import Engine

ROOT = Path(__file__).parents[3]
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
    tokens = sum(lengths)
    positions = np.concatenate([np.arange(n) for n in lengths])
    for ids, own, whole in pool.run(3, round_trip, lengths, "ring"):
        assert ids.tolist() == [list(range(tokens))] and own.tolist() == [positions.tolist()]
        assert torch.equal(whole, torch.arange(3 * tokens * 2.0).reshape(3, tokens, 2)[:, :-2])


def mesh_of(ranks: int) -> SimpleNamespace:
    """A mesh without processes."""
    return SimpleNamespace(
        mesh=np.arange(ranks),
        mesh_dim_names=("sp",),
        size=lambda: ranks,
        get_local_rank=lambda: 0,
        get_group=lambda: None,
    )


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
    ulysses = PlannedUlysses(make_config("llama"), mesh_of(3))
    ids, positions = torch.zeros(1, 9, dtype=torch.int64), torch.arange(9)[None]
    with pytest.raises(ConfigError, match="no packed row was sliced; valid: ulysses_pad_and_slice_inputs"):
        ulysses.slice_input_tensor(ids, 1)
    with pytest.raises(ConfigError, match="sp_size is 2; valid: 3"):
        ulysses.ulysses_pad(ids, positions, 2)
    with pytest.raises(ConfigError, match=r"the packed row has shape \[9\]; valid: \[1, tokens\]"):
        ulysses.ulysses_pad(ids[0], positions[0], 3)
    with pytest.raises(ConfigError, match=r"position_ids have shape \[4, 1, 9\]; valid: \[1, 9\]"):
        ulysses.ulysses_pad(ids, positions.expand(4, 1, 9), 3)
    assert ulysses.ulysses_pad(ids, positions, 3)[2] == 0
    with pytest.raises(ConfigError, match=r"shape \[1, 8\]; valid: the plans' 9 tokens in dimension 1"):
        ulysses.ulysses_pad_and_slice_inputs(ids[:, :8], None, 3)
    with pytest.raises(ConfigError, match="group is another one than the mesh's"):
        ulysses.slice_input_tensor(ids, 1, group=object())
    rows = ulysses.slice_input_tensor(ids, 1)
    with pytest.raises(ConfigError, match=r"rows in dimension 1, those of rank 0"):
        ulysses.gather_outputs_and_unpad(rows[:, 1:], 1)


def test_every_row_drops_other_weights() -> None:
    ids, positions = torch.zeros(1, 9, dtype=torch.int64), torch.arange(9)[None]
    seeds = []
    for first in (0, 3):
        mesh = mesh_of(3)
        mesh.mesh = np.arange(first, first + 3)
        ulysses = PlannedUlysses(make_config("llama", attention_dropout=0.1), mesh, seed=5)
        for _ in range(2):
            ulysses.ulysses_pad(ids, positions, 3)
            seeds.append(ulysses.row.dropout_seed)
    assert len(set(seeds)) == 4


def test_models_that_plans_do_not_compute_are_refused_when_the_engine_is_built() -> None:
    with pytest.raises(ConfigError, match=r"attn_logit_softcapping is 50\.0"):
        PlannedUlysses(make_config("gemma2", attn_logit_softcapping=50.0), mesh_of(2))


def test_verl_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verl", None)
    with pytest.raises(ConfigError, match=r"verl's engine cannot be imported \(.*\); valid: verl 0.9"):
        register_engines()


def test_verls_engine_trains_alike_on_one_rank_and_on_three() -> None:
    pytest.importorskip("verl", reason="verl is not installed (pip install verl==0.9.1, in an environment of its own)")

    def lines(*arguments: str) -> list[dict[str, float]]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "examples/verl_engine.py", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    alone = lines("--ranks", "1", "--cp", "1")
    for arguments in (("--ranks", "3", "--cp", "3"), ("--ranks", "4", "--cp", "2")):
        steps = lines(*arguments)
        assert len(steps) == len(alone) == 3
        for step, wanted in zip(steps, alone, strict=True):
            assert step == pytest.approx(wanted, abs=1e-5)
