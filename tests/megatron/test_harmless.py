"""Settings that the table calls harmless, away from their defaults: the same on two ranks as on one."""

from __future__ import annotations

from typing import Any

import pytest
from torch.nn import functional

from tests.megatron.gpt import Case, Outcome, available, named, on_ranks, one_rank, planned, transformer_config
from tests.megatron.models import EXPERTS
from tests.megatron.ranks import MegatronRanks
from tests.megatron.test_gpt import RAGGED, assert_equal
from tools.megatron_arguments import entry_of

#: Settings of the models, none of which has the value that the tests' model has.
SETTINGS: dict[str, dict[str, Any]] = {
    "linear layers": dict(
        add_bias_linear=True, gated_linear_unit=True, activation_func=functional.silu, bias_activation_fusion=False,
        layernorm_epsilon=1e-3, init_method_std=0.1, ffn_hidden_size=40,
    ),
    "residuals": dict(apply_residual_connection_post_layernorm=True, add_qkv_bias=True, activation_func=functional.relu),
    "sums": dict(attention_softmax_in_fp32=False, masked_softmax_fusion=True),
    "experts": {
        **EXPERTS, "moe_router_topk_scaling_factor": 1.5, "moe_router_pre_softmax": True, "moe_ffn_hidden_size": 24,
        "moe_shared_expert_intermediate_size": 16, "moe_router_score_function": "sigmoid",
    },
}  # fmt: skip
ALL_CASES = {name: Case((RAGGED,), config=config) for name, config in SETTINGS.items()}
CASES = available(ALL_CASES)


@pytest.fixture(scope="module")
def outcomes(ranks: MegatronRanks) -> dict[str, tuple[Outcome, list[Outcome]]]:
    """Each case on one rank, and on every rank of two."""
    with one_rank():
        expected = [planned(case) for case in CASES.values()]
    actual = ranks.run(2, on_ranks, 1, 2, list(CASES.values()))
    return {name: (expected[n], [rank[n] for rank in actual]) for n, name in enumerate(CASES)}


@pytest.mark.parametrize("name", named(ALL_CASES))
def test_two_ranks_equal_one(name: str, outcomes: dict[str, tuple[Outcome, list[Outcome]]]) -> None:
    expected, actual = outcomes[name]
    for outcome in actual:
        assert_equal(outcome, expected)


@pytest.mark.parametrize("name", named(ALL_CASES))
def test_the_settings_are_harmless_and_change_the_model(name: str) -> None:
    default, other = transformer_config(), transformer_config(**SETTINGS[name])
    for setting in SETTINGS[name].keys() - EXPERTS.keys():
        entry = entry_of(setting)
        assert entry is not None and entry.verdict == "ignored", setting
    changed = [setting for setting in SETTINGS[name] if getattr(default, setting) != getattr(other, setting)]
    assert len(changed) >= 2
