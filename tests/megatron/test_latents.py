"""Latents that travel in Megatron's multi-latent attention: projections, refusals, checkpoints (losses: test_gpt.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_cp import ConfigError
from mindspeed_cp.megatron import attention_config, install, install_model, local_spec, megatron_imports
from mindspeed_cp.megatron.adaptors.latent import latent_projections
from tests.megatron.gpt import Suite, one_rank, transformer_config
from tests.megatron.models import LATENT

with megatron_imports():
    from megatron.core.models.gpt.gpt_model import GPTModel


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
