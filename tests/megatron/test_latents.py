"""Latents that travel in Megatron's multi-latent attention: loss and all gradients as with its own dense attention."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_cp import ConfigError
from mindspeed_cp.megatron import attention_config, install, install_model, local_spec, megatron_imports
from mindspeed_cp.megatron.adaptors.latent import latent_projections
from tests.megatron.gpt import Case, Outcome, Suite, available, named, one_rank, planned, transformer_config
from tests.megatron.models import FULL, LATENT, LATENT_YARN, SELECTIVE
from tests.megatron.oracle import plain
from tests.megatron.ranks import MegatronRanks
from tests.megatron.runs import LAYOUTS, Runs, assert_equal, equal_to_one_rank
from tests.megatron.test_gpt import MORE, ODD, RAGGED

with megatron_imports():
    from megatron.core.models.gpt.gpt_model import GPTModel

ON: dict[str, Any] = dict(options={"latents": "on"})

ALL_CASES = {
    "packed": Case((RAGGED, MORE), config=LATENT, **ON),
    "queries not compressed, latents normed": Case(
        (RAGGED,), config={**LATENT, "q_lora_rank": None, "qk_layernorm": True}, **ON
    ),
    "YaRN": Case((RAGGED,), config={**LATENT, **LATENT_YARN}, **ON),
    "sbhd": Case(((29, 29),), qkv_format="sbhd", config=LATENT, **ON),
    "core attention recomputed": Case((RAGGED,), config={**LATENT, **SELECTIVE}, **ON),
    "fully recomputed": Case(((29,),), qkv_format="sbhd", config={**LATENT, **FULL}, **ON),
    "hierarchical": Case((RAGGED, MORE), algorithm="hierarchical", config=LATENT, **ON),
    "dropout, fully recomputed": Case((RAGGED,), config={**LATENT, **FULL, "attention_dropout": 0.3}, **ON),
    "distributed optimizer": Case((RAGGED, MORE), optimizer="distributed", steps=2, config=LATENT, **ON),
}
CASES = available(ALL_CASES)


def reference_step(case: Case) -> Outcome:
    """Megatron's own attention, each document alone; with dropout or an optimizer, planned attention without latents."""
    if case.optimizer or "attention_dropout" in case.config:
        return planned(replace(case, options={"latents": "off"}))
    return plain(case)


@pytest.fixture(scope="module")
def expected(ranks: MegatronRanks) -> Runs:
    return Runs(ranks, CASES, reference_step)


@pytest.fixture(scope="module")
def runs(ranks: MegatronRanks) -> Runs:
    return Runs(ranks, CASES)


@pytest.mark.parametrize("name", named(ALL_CASES))
@pytest.mark.parametrize("layout", ["one rank", "cp3", "tp2 x cp2"])
def test_latents_equal_megatrons_own_attention(layout: str, name: str, runs: Runs, expected: Runs) -> None:
    wanted = expected.alone(name)
    outcomes = [{name: runs.alone(name)}] if layout == "one rank" else runs.on(LAYOUTS[layout])
    for outcome in outcomes:
        assert_equal(outcome[name], wanted)


def test_sequence_parallel_ranks_equal_megatrons_own_attention(ranks: MegatronRanks) -> None:
    config = {**LATENT, "qk_layernorm": True}
    plain_case = Case(ODD, config=config)
    case = Case(ODD, config={**config, "sequence_parallel": True}, **ON)
    equal_to_one_rank(ranks, (2, 2), {"latents": (case, plain_case)}, plain)


def test_attention_of_a_model_says_what_its_latents_are() -> None:
    assert attention_config(transformer_config(**LATENT)).latent == (16, 4)
    assert attention_config(transformer_config()).latent is None
    recomputed = dict(recompute_granularity="selective", recompute_modules=["mla_up_proj"])
    assert attention_config(transformer_config(**LATENT, **recomputed)).latent is None


class Projections(torch.nn.Module):
    """What latent_projections reads of a layer, with the norm inside the up-projection, as in Transformer Engine's."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            q_lora_rank=None,
            kv_lora_rank=5,
            qk_pos_emb_head_dim=2,
            qk_head_dim=3,
            v_head_dim=3,
            sequence_parallel=False,
        )
        self.linear_q_proj = self.linear_kv_down_proj = lambda x: (torch.cat([x, x], -1)[..., : 7 + 3], None)
        self.linear_kv_down_proj = lambda x: (x[..., :7], None)
        self.kv_layernorm = torch.nn.Identity()
        self.linear_kv_up_proj = torch.nn.Linear(5, 12, bias=False)
        for name, value in {
            "layer_norm_weight": torch.linspace(-1, 1, 5), "normalization": "RMSNorm", "eps": 1e-5,
            "zero_centered_gamma": True, **changes,
        }.items():  # fmt: skip
            setattr(self.linear_kv_up_proj, name, value)


def test_a_norm_inside_the_up_projection_is_applied_by_the_owner() -> None:
    layer, x = Projections(), torch.randn(4, 1, 8)
    with one_rank():
        _, shared, latent, *_ = latent_projections(layer, x, False)
    rows = x[..., :5]
    normed = rows / (rows.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (1 + torch.linspace(-1, 1, 5))
    np.testing.assert_allclose(latent[..., 0, :].numpy(), normed.numpy(), rtol=1e-5, atol=1e-6)
    assert torch.equal(shared[..., 0, :], x[..., 5:7])
    assert "forward" not in vars(layer.linear_kv_up_proj)


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"normalization": "LayerNorm"}, "norms its input by 'LayerNorm'; valid: 'RMSNorm', or context_parallel_suite"),
     ({"bias": torch.nn.Parameter(torch.ones(12))}, "is a Linear with a bias; valid: a linear layer without bias"),
     ({"weight": None}, "is a Linear with no weight of its own")],
)  # fmt: skip
def test_up_projections_that_readers_cannot_apply_are_refused(changes: dict[str, Any], says: str) -> None:
    with one_rank(), pytest.raises(ConfigError, match=says):
        latent_projections(Projections(**changes), torch.randn(4, 1, 8), False)


def test_checkpoints_have_the_up_projection_once() -> None:
    config = transformer_config(**LATENT)
    with one_rank():
        model = GPTModel(config, install(local_spec(config), Suite(context_parallel_size=1)), 96, 64)
        install_model(model)
        names = [name for name in model.state_dict() if "kv_up" in name and not name.endswith("_extra_state")]
    assert names == [f"decoder.layers.{n}.self_attention.linear_kv_up_proj.weight" for n in range(config.num_layers)]
