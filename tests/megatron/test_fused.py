"""Where fused operators come into Megatron's modules. They are replaced by counted plain ones here, so results are equal to
the bit; tests/npu/test_fused.py has the operators themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional

from mindspeed_cp.megatron import LatentRotary, PlannedRotary, install, install_model, local_spec, megatron_imports
from mindspeed_cp.ops.fused import npu, plain
from tests.megatron import gpt
from tests.megatron.gpt import Case, Suite, build, layer_spec, planned, transformer_config
from tests.megatron.models import EXPERTS, LATENT

with megatron_imports():
    from megatron.core.transformer import mlp

    from mindspeed_cp.megatron.adaptors.fused import FusedNorm, FusedRMSNorm, use_fused_rotary
    from mindspeed_cp.megatron.patches.swiglu import fused_swiglu

GATED = dict(gated_linear_unit=True, activation_func=functional.silu, bias_activation_fusion=False)
CASES: dict[str, dict[str, Any]] = {
    "dense": GATED,
    "with bias": {**GATED, "add_bias_linear": True},
    "experts": {**GATED, **EXPERTS, "moe_shared_expert_intermediate_size": 24},
    "recomputed": {**GATED, "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Calls of the fused operators, which plain ones stand for."""
    made: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            made[name] += 1
            return function(*args)

        return call

    for name in ("rms_norm", "rotary_mul", "swiglu"):
        monkeypatch.setattr(npu, name, counted(name, getattr(plain, name)))
    yield made


@pytest.mark.parametrize("name", CASES)
def test_a_step_calls_them_and_is_the_same(
    name: str, calls: Counter[str], alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = ((9, 5, 1),)
    expected = planned(Case(lengths, config=CASES[name]))
    assert not calls

    def use_fused(model: torch.nn.Module) -> torch.nn.Module:
        use_fused_rotary(install_model(model))
        return model

    monkeypatch.setattr(gpt, "layer_spec", partial(local_spec, norm=FusedNorm))
    monkeypatch.setattr(gpt, "install_model", use_fused)
    with fused_swiglu():
        outcome = planned(Case(lengths, config={**CASES[name], "bias_activation_fusion": True}))
    times = 2 if name == "recomputed" else 1
    assert calls["rms_norm"] == 4 * times + 1 and calls["rotary_mul"] == 4 * times  # two layers; q and k of each
    assert calls["swiglu"] >= 2 * times if name == "experts" else calls["swiglu"] == 2 * times
    assert outcome.loss == expected.loss
    for key, gradient in expected.tensors.items():
        assert (outcome.tensors[key] == gradient).all(), key


def test_every_expert_and_the_shared_one_are_fused(calls: Counter[str], alone: None) -> None:
    config = transformer_config(**{**CASES["experts"], "bias_activation_fusion": True, "moe_router_topk": 4})
    model = install_model(build(config, install(layer_spec(config), Suite())))
    tokens = torch.arange(24)[None]
    with fused_swiglu():
        model(tokens, tokens, None)
    assert calls["swiglu"] == 2 * (4 + 1)  # layers, experts and the shared one


def test_all_norms_are_fused_with_torchs_parameters(alone: None) -> None:
    config = transformer_config(**LATENT, qk_layernorm=True)
    models = [build(config, install(local_spec(config, norm=norm), Suite())) for norm in (FusedNorm, None)]

    def count(model: torch.nn.Module, kind: type) -> int:
        return sum(type(module) is kind for module in model.modules())

    ours, torchs = models
    assert count(ours, FusedRMSNorm) == count(torchs, torch.nn.RMSNorm) > 5
    assert count(ours, torch.nn.RMSNorm) == count(torchs, FusedRMSNorm) == 0
    assert ours.state_dict().keys() == torchs.state_dict().keys()
    layer_norms = transformer_config(normalization="LayerNorm")
    model = build(layer_norms, install(local_spec(layer_norms, norm=FusedNorm), Suite()))
    assert any(type(module) is torch.nn.LayerNorm for module in model.modules())


@pytest.mark.parametrize("kind", [PlannedRotary, LatentRotary])
def test_every_rotary_module_is_fused(kind: type[PlannedRotary], alone: None) -> None:
    config = transformer_config(**(LATENT if kind is LatentRotary else {}))
    model = install_model(build(config, install(layer_spec(config), Suite())))
    rotaries = [module for module in model.modules() if isinstance(module, kind)]
    assert rotaries and all(rotary.rotary_mul is plain.rotary_mul for rotary in rotaries)
    use_fused_rotary(model)
    assert all(rotary.rotary_mul is npu.rotary_mul for rotary in rotaries)


def test_megatrons_functions_are_its_own_again(alone: None) -> None:
    before = mlp.bias_swiglu_impl
    with pytest.raises(KeyError), fused_swiglu():
        assert mlp.bias_swiglu_impl is not before
        raise KeyError
    assert mlp.bias_swiglu_impl is before
