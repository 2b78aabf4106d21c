"""Linear layers on an equal-token layout: the same loss and gradients, whichever of q, k, v and hidden states move."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_cp import AttentionConfig, ConfigError, Documents, Plan, Topology, build_plan
from mindspeed_cp.algorithms.linear_layout import LINEAR_LAYOUT_MODES, with_linear_layout
from mindspeed_cp.megatron import planned_batch, planned_params
from mindspeed_cp.megatron.adaptors.hidden import HiddenMove
from tests.megatron.gpt import Case, available
from tests.megatron.models import EXPERTS, FULL, LATENT, SELECTIVE
from tests.megatron.ranks import MegatronRanks
from tests.megatron.runs import LAYOUTS, Runs, assert_equal, equal_to_one_rank

LONG = (90, 3, 5, 1, 0, 14, 2)  # balanced by work, ranks hold between 22 and 30 of these tokens
MORE = (1, 50, 3, 0, 7)
BALANCED: dict[str, Any] = dict(algorithm="direct", options={"layout": "balanced"})
ALL_CASES = {
    "grouped queries": Case((LONG, MORE), **BALANCED),
    "ring": Case((LONG, MORE), algorithm="ring", options={"layout": "balanced"}),
    "split heads": Case((LONG, MORE), algorithm="hybrid", options={"layout": "balanced"}),
    "ranks without tokens": Case(((1, 1), (1, 2, 1), LONG), **BALANCED),
    "window in every other layer": Case(
        (LONG, MORE), algorithm="direct", config=dict(window_size=(9, 0), window_attn_skip_freq=2)
    ),
    "latent": Case((LONG, MORE), **BALANCED, config=LATENT),
    "full recompute": Case((LONG, MORE), **BALANCED, config=FULL),
    "selective recompute, dropout": Case((LONG, MORE), **BALANCED, config={**SELECTIVE, "attention_dropout": 0.3}),
    "learned positions": Case((LONG,), **BALANCED, model=dict(position_embedding_type="learned_absolute")),
    "optimizer": Case((LONG, MORE), **BALANCED, optimizer="distributed", steps=3),
}
CASES = available(ALL_CASES)
SHARED = {"grouped queries": {}, "latent": LATENT, "dropout, full recompute": {"attention_dropout": 0.3, **FULL}}


@pytest.fixture(scope="module")
def reference(ranks: MegatronRanks) -> Runs:
    """Every case on one rank: nothing is cut and nothing moves."""
    return Runs(ranks, CASES)


@pytest.fixture(scope="module", params=LINEAR_LAYOUT_MODES)
def moved(request: pytest.FixtureRequest, ranks: MegatronRanks) -> Runs:
    """The cases that have a mode, in it."""
    names = [name for name in CASES if (name, request.param) != ("split heads", "hidden")]
    return Runs(ranks, {name: replace(CASES[name], remap=request.param) for name in names})


@pytest.mark.parametrize("layout", ["cp4", pytest.param("tp2 x cp2", marks=pytest.mark.thorough)])
def test_loss_and_gradients_are_those_of_one_rank(layout: str, moved: Runs, reference: Runs) -> None:
    for outcomes in moved.on(LAYOUTS[layout]):
        for name, outcome in outcomes.items():
            assert_equal(outcome, reference.alone(name))


@pytest.mark.parametrize("mode", LINEAR_LAYOUT_MODES)
def test_sequence_parallel_ranks_move_their_shares(mode: str, ranks: MegatronRanks) -> None:
    plain = {name: Case((LONG, MORE, (1, 2, 1)), **BALANCED, config=config) for name, config in SHARED.items()}
    cases = {
        name: (replace(case, remap=mode, config={**case.config, "sequence_parallel": True}), case)
        for name, case in plain.items()
    }
    equal_to_one_rank(ranks, (2, 2), cases)


@pytest.mark.parametrize("mode", LINEAR_LAYOUT_MODES)
def test_experts_count_the_tokens_of_the_linear_layout(mode: str, ranks: MegatronRanks) -> None:
    plain = Case((LONG, MORE, (1, 2, 1)), **BALANCED, config=EXPERTS)
    case = replace(plain, remap=mode, config={**EXPERTS, "sequence_parallel": True})
    equal_to_one_rank(ranks, (2, 2, 2), {"experts": (case, plain)})


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
        assert (own.linear_length, own.length) == (moved.length, moved.length)
        assert moved.linear_length in (28, 29)
    assert {planned_params(hidden, rank).length for rank in range(4)} - {28, 29}


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


def test_linear_layouts_refuse_sbhd_and_other_rows() -> None:
    hidden = with_linear_layout(plan_of((90, 6, 6, 6), 4), "hidden")
    with pytest.raises(ConfigError, match="batch_size is 2, but the plan has a linear layout of its own"):
        planned_params(hidden, 0, "sbhd", batch_size=2)
    with pytest.raises(ConfigError, match="plan 1 gives ranks other tokens than plan 0"):
        planned_params([hidden, replace(hidden, linear_layout=None)], 0)
