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
from tests.megatron.gpt import Case, Outcome, available, on_ranks, one_rank, planned
from tests.megatron.models import EXPERTS, FULL, LATENT, SELECTIVE
from tests.megatron.ranks import MegatronRanks
from tests.megatron.test_gpt import assert_equal

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
SIZES = {"cp2": (1, 2), "cp4": (1, 4), "tp2 x cp2": (2, 2)}


@pytest.fixture(scope="module")
def reference() -> dict[str, Outcome]:
    """Every case on one rank: nothing is cut and nothing moves."""
    with one_rank():
        return {name: planned(case) for name, case in CASES.items()}


def runs(mode: str) -> dict[str, Case]:
    """The cases that have this mode."""
    return {
        name: replace(case, remap=mode) for name, case in CASES.items() if (name, mode) != ("split heads", "hidden")
    }


#: By default one mode has four ranks, the other two.
SIZES_OF_MODES = [
    pytest.param(size, mode, marks=() if size == default else pytest.mark.thorough)
    for mode, default in zip(LINEAR_LAYOUT_MODES, ("cp4", "cp2"), strict=True)
    for size in SIZES
]


@pytest.mark.parametrize(("size", "mode"), SIZES_OF_MODES)
def test_loss_and_gradients_are_those_of_one_rank(
    size: str, mode: str, ranks: MegatronRanks, reference: dict[str, Outcome]
) -> None:
    tp, cp = SIZES[size]
    cases = runs(mode)
    for outcomes in ranks.run(tp * cp, on_ranks, tp, cp, list(cases.values())):
        for name, outcome in zip(cases, outcomes, strict=True):
            assert_equal(outcome, reference[name])


@pytest.mark.parametrize("mode", LINEAR_LAYOUT_MODES)
def test_sequence_parallel_ranks_move_their_shares(mode: str, ranks: MegatronRanks) -> None:
    batches = (LONG, MORE, (1, 2, 1))
    plain = [Case(batches, **BALANCED, config=config) for config in SHARED.values()]
    with one_rank():
        expected = [planned(case) for case in plain]
    cases = [replace(case, remap=mode, config={**case.config, "sequence_parallel": True}) for case in plain]
    for outcomes in ranks.run(4, on_ranks, 2, 2, cases):
        for outcome, expected_outcome in zip(outcomes, expected, strict=True):
            assert_equal(outcome, expected_outcome)


@pytest.mark.parametrize("mode", LINEAR_LAYOUT_MODES)
@pytest.mark.parametrize(("tp", "cp", "ep"), [pytest.param(1, 2, 2, marks=pytest.mark.thorough), (2, 2, 2)])
def test_experts_count_the_tokens_of_the_linear_layout(
    mode: str, tp: int, cp: int, ep: int, ranks: MegatronRanks
) -> None:
    plain = Case((LONG, MORE, (1, 2, 1)), **BALANCED, config=EXPERTS)
    with one_rank():
        expected = planned(plain)
    case = replace(plain, remap=mode, config={**EXPERTS, "sequence_parallel": tp > 1})
    for outcomes in ranks.run(tp * cp, on_ranks, tp, cp, [case], ep):
        assert_equal(outcomes[0], expected)


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


def test_what_cannot_be_is_refused() -> None:
    hidden = with_linear_layout(plan_of((90, 6, 6, 6), 4), "hidden")
    with pytest.raises(ConfigError, match="batch_size is 2, but the plan has a linear layout of its own"):
        planned_params(hidden, 0, "sbhd", batch_size=2)
    with pytest.raises(ConfigError, match="plan 1 gives ranks other tokens than plan 0"):
        planned_params([hidden, replace(hidden, linear_layout=None)], 0)
