"""Linear layers on an equal-token layout: batches, hooks, refusals (losses: test_gpt.py, test_experts.py)."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mindspeed_cp import AttentionConfig, ConfigError, Documents, Plan, Topology, build_plan
from mindspeed_cp.algorithms.linear_layout import LINEAR_LAYOUT_MODES, with_linear_layout
from mindspeed_cp.megatron import planned_batch, planned_params
from mindspeed_cp.megatron.adaptors.model import HiddenMove
from tests.megatron.test_gpt import LONG


def plan_of(lengths: tuple[int, ...] = LONG, ranks: int = 4) -> Plan:
    attention = AttentionConfig(heads=4, kv_heads=2, head_dim=8)
    return build_plan(Documents(lengths), Topology(1, ranks), attention, "direct", layout="balanced")


@pytest.mark.parametrize("mode", LINEAR_LAYOUT_MODES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_batch_has_equal_counts(mode: str, ranks: int) -> None:
    """And would not have without: the comparisons above are of something that moves."""
    plan = plan_of(ranks=ranks)
    whole = {"tokens": list(range(sum(LONG)))}
    for given, is_equal in ((plan, False), (with_linear_layout(plan, mode), True)):
        rows = [planned_batch(whole, given, rank)[0]["tokens"].shape[1] for rank in range(ranks)]  # type: ignore[arg-type]
        assert sum(rows) == sum(LONG)
        assert (max(rows) - min(rows) <= 1) == is_equal


def test_attention_keeps_its_own_rows_when_hidden_states_move() -> None:
    plan = plan_of()
    hidden = with_linear_layout(plan, "hidden")
    for rank in range(4):
        own, moved = planned_params(plan, rank), planned_params(hidden, rank)
        assert own.positions.tolist() == moved.positions.tolist()
        assert (own.linear_rows, own.rows) == (moved.rows, moved.rows)
        assert moved.linear_rows in (28, 29)
    assert {planned_params(hidden, rank).rows for rank in range(4)} - {28, 29}


def test_shares_need_rows_that_divide() -> None:
    """Sequence parallelism cuts rows by the tensor-parallel size."""
    config = SimpleNamespace(tensor_model_parallel_size=2, sequence_parallel=True)
    core = SimpleNamespace(config=config, check_before_move=lambda params, hidden: None, group_of=lambda params: None)
    move = HiddenMove(core)  # type: ignore[arg-type]
    params = planned_params(with_linear_layout(plan_of(), "hidden"), 0)
    named = {"hidden_states": torch.zeros(14, 1, 8), "packed_seq_params": params}
    with pytest.raises(ConfigError, match="rows_multiple is 1; valid under sequence parallelism: a multiple of"):
        move.before(None, (), named)  # type: ignore[arg-type]


def test_batches_without_a_linear_layout_pass_the_hooks() -> None:
    move = HiddenMove(SimpleNamespace())  # type: ignore[arg-type]
    for params in (None, planned_params(plan_of(), 0), planned_params(with_linear_layout(plan_of(), "qkv"), 0)):
        assert move.before(None, (), {"packed_seq_params": params}) is None  # type: ignore[arg-type]
        assert move.after(None, (), {"packed_seq_params": params}, torch.zeros(1)) is None  # type: ignore[arg-type]


def test_plans_of_other_linear_layouts_are_refused() -> None:
    hidden = with_linear_layout(plan_of(), "hidden")
    with pytest.raises(ConfigError, match="plan 1 gives ranks other tokens than plan 0"):
        planned_params([hidden, replace(hidden, linear_layout=None)], 0)
