"""install: what it replaces, what it leaves alone, what it refuses."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_cp import AttentionConfig, ConfigError, Documents, Topology, build_plan
from mindspeed_cp.config import SuiteSettings
from mindspeed_cp.megatron import (
    PlannedAttention,
    PlannedRouter,
    install,
    install_model,
    local_spec,
    megatron_imports,
    planned_params,
)
from mindspeed_cp.megatron.adaptors.latent import PlannedMLASelfAttention
from tests.megatron.gpt import Suite, build, experts_of, layer_spec, transformer_config
from tests.megatron.models import EXPERTS, HAS_PLANNED_ROUTER, LATENT

with megatron_imports():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.transformer.attention import CrossAttention, CrossAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

SUITE = Suite()


def core(layer: Any) -> Any:
    return layer.submodules.self_attention.submodules.core_attention


def test_a_layer_spec_is_copied_and_its_core_attention_replaced() -> None:
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    new = install(spec, SUITE)
    assert core(new).module is PlannedAttention
    assert core(new).params == {"suite": SUITE, "alibi": False}
    assert core(install(spec, SUITE, alibi=True)).params == {"suite": SUITE, "alibi": True}
    assert core(spec) is DotProductAttention
    assert new.submodules.self_attention.module is spec.submodules.self_attention.module
    assert repr(new.submodules.mlp) == repr(spec.submodules.mlp)


def test_every_layer_of_a_block_is_replaced(alone: None) -> None:
    config = transformer_config(num_layers=3)
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    new = install(block, SUITE)
    assert [core(layer).module for layer in new.layer_specs] == [PlannedAttention] * 3
    assert [core(layer) for layer in block.layer_specs] == [DotProductAttention] * 3
    held = install(ModuleSpec(module=TransformerBlock, submodules=block), SUITE)
    assert [core(layer).module for layer in held.submodules.layer_specs] == [PlannedAttention] * 3


def test_layers_without_attention_stay_as_they_are(alone: None) -> None:
    block = get_gpt_decoder_block_spec(transformer_config(), use_transformer_engine=False, normalization="RMSNorm")
    block.layer_specs[0] = ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules())
    new = install(block, SUITE)
    assert new.layer_specs[0].submodules.self_attention is IdentityOp
    assert core(new.layer_specs[1]).module is PlannedAttention


def test_a_stage_without_layers_stays_as_it_is(alone: None) -> None:
    """As with --pipeline-model-parallel-layout "E|tt|L": embedding and loss have stages of their own."""
    config = transformer_config()
    block = layer_spec(config)
    empty = copy.copy(block)
    empty.layer_specs = []
    stages = [
        build(config, install(spec, SUITE), pre_process=first, post_process=last)
        for spec, first, last in ((empty, True, False), (block, False, False), (empty, False, True))
    ]
    assert install_model(stages[0]) is stages[0]
    assert install_model(stages) is stages
    whole = install_model(build(config, install(block, SUITE)))
    weights = whole.state_dict()
    for stage in stages:
        stage.load_state_dict({name: weights[name] for name in stage.state_dict()})
    tokens = torch.arange(12)[None]
    plan = build_plan(Documents([5, 7]), Topology(1, 1), AttentionConfig(4, 2, 8))
    params = planned_params(plan, 0)
    hidden = stages[0](tokens, tokens, None, packed_seq_params=params)
    for stage in stages[1:]:
        stage.set_input_tensor(hidden)
        hidden = stage(tokens, tokens, None, packed_seq_params=params)
    assert torch.equal(hidden, whole(tokens, tokens, None, packed_seq_params=params))


def test_a_module_without_a_transformer_is_refused() -> None:
    with pytest.raises(ConfigError, match="the model has no planned attention"):
        install_model(torch.nn.Linear(2, 2))


def test_installing_twice_is_installing_once_with_the_later_suite() -> None:
    once = install(get_gpt_layer_local_spec(), SUITE)
    twice = install(once, Suite(timeout_seconds=5.0))
    assert core(twice).module is PlannedAttention
    assert core(twice).params["suite"].timeout_seconds == 5.0
    assert core(once).params["suite"].timeout_seconds == SUITE.timeout_seconds


def test_a_model_has_no_new_state(alone: None) -> None:
    config = transformer_config()
    ours = install_model(build(config, install(layer_spec(config), SUITE)))
    theirs = build(config, layer_spec(config))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert ours.sharded_state_dict().keys() == theirs.sharded_state_dict().keys()


@pytest.mark.parametrize(
    "spec",
    [
        SimpleNamespace(),
        ModuleSpec(module=TransformerLayer),
        ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules()),
    ],
)
def test_a_spec_without_attention_is_refused(spec: Any) -> None:
    with pytest.raises(ConfigError, match=r"found no self attention .* valid: a transformer layer's ModuleSpec"):
        install(spec, SUITE)


def test_attention_that_no_plan_covers_is_refused() -> None:
    class OtherLatent(MLASelfAttention):
        pass

    mla = get_gpt_layer_local_spec(multi_latent_attention=True)
    mla.submodules.self_attention.module = OtherLatent
    with pytest.raises(ConfigError, match=r"the layer uses OtherLatent; valid: MLASelfAttention.* or SelfAttention"):
        install(mla, SUITE)

    linear = get_gpt_layer_local_spec()
    linear.submodules.self_attention = ModuleSpec(module=TransformerLayer, submodules=SimpleNamespace(conv=None))
    with pytest.raises(ConfigError, match="mixes tokens by TransformerLayer"):
        install(linear, SUITE)

    crossed = get_gpt_layer_local_spec()
    inner = CrossAttentionSubmodules(
        linear_q=None, linear_kv=None, core_attention=DotProductAttention, linear_proj=None
    )
    crossed.submodules.cross_attention = ModuleSpec(module=CrossAttention, submodules=inner)
    with pytest.raises(ConfigError, match="cross attention"):
        install(crossed, SUITE)


class OwnAttention(torch.nn.Module):
    """A core attention that computes something else."""


@pytest.mark.parametrize("as_spec", [False, True])
def test_a_core_attention_of_ones_own_is_not_dropped_without_a_word(as_spec: bool, alone: None) -> None:
    spec = layer_spec(transformer_config())
    inner = spec.layer_specs[0].submodules.self_attention.submodules
    inner.core_attention = ModuleSpec(module=OwnAttention) if as_spec else OwnAttention
    with pytest.raises(
        ConfigError, match=r"core_attention of layer 0 is OwnAttention, .*valid: .*replaces=.OwnAttention"
    ):
        install(spec, SuiteSettings())
    replaced = install(spec, SuiteSettings(), replaces=[OwnAttention])
    assert core(replaced.layer_specs[0]).module is PlannedAttention


def test_the_layer_at_fault_is_named(alone: None) -> None:
    block = get_gpt_decoder_block_spec(transformer_config(), use_transformer_engine=False)
    block.layer_specs[1] = copy.deepcopy(block.layer_specs[1])
    block.layer_specs[1].submodules.self_attention = ModuleSpec(module=TransformerLayer, submodules=SimpleNamespace())
    with pytest.raises(ConfigError, match="layer 1 mixes tokens by TransformerLayer"):
        install(block, SUITE)


def test_latent_attention_and_routers_are_exchanged_for_ours_of_the_same_weights(alone: None) -> None:
    config = transformer_config(**LATENT, **EXPERTS)
    spec = get_gpt_layer_local_spec(multi_latent_attention=True, num_experts=4, normalization="RMSNorm")
    new = install(install(spec, SUITE), SUITE)
    assert new.submodules.self_attention.module is PlannedMLASelfAttention
    assert spec.submodules.self_attention.module is MLASelfAttention
    if HAS_PLANNED_ROUTER:
        assert experts_of(new).router is PlannedRouter
        assert experts_of(spec).router is TopKRouter
    ours = install_model(build(config, new))
    weights = build(config, install(local_spec(config), SUITE)).state_dict()
    assert ours.state_dict().keys() == weights.keys()
    assert all(torch.equal(ours.state_dict()[name], tensor) for name, tensor in weights.items() if tensor is not None)


def test_install_model_refuses_a_model_from_another_spec(alone: None) -> None:
    config = transformer_config()
    with pytest.raises(ConfigError, match=r"decoder\.layers\.0\.self_attention\.core_attention is DotProductAttention"):
        install_model(build(config, layer_spec(config)))
