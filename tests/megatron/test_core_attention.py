"""PlannedAttention: Megatron's contract of core_attention, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mindspeed_cp import AttentionConfig, ConfigError, Documents, Plan, Topology, build_plan
from mindspeed_cp.megatron import (
    PlannedAttention,
    attention_config,
    megatron_imports,
    micro_batch_seed,
    planned_params,
)
from tests.megatron.gpt import Suite, transformer_config

with megatron_imports():
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType


def attention(**arguments: Any) -> PlannedAttention:
    settings: dict[str, Any] = dict(layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self")
    config = arguments.pop("config", None) or transformer_config()
    module = PlannedAttention(config, **{**settings, "suite": Suite(), **arguments})
    module.use_rotary(None)
    return module


def plan_for(module: PlannedAttention, lengths: list[int], ranks: int = 1) -> Plan:
    return build_plan(Documents(lengths), Topology(1, ranks), module.attention)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], causal: bool) -> torch.Tensor:
    """[t, heads, dim] each; every document by torch's own attention."""
    out = []
    for q1, k1, v1 in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        expected = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1) for x in (q1, k1, v1)), is_causal=causal, enable_gqa=True
        )
        out.append(expected.transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("mask", [AttnMaskType.causal, AttnMaskType.no_mask])
@pytest.mark.parametrize("width", [8, 24])
def test_packed_rows_keep_megatrons_shapes(mask: AttnMaskType, width: int, alone: None) -> None:
    """Values of another width than keys, as MLA has them, and both masks."""
    module = attention(attn_mask_type=mask, v_channels=width)
    lengths = [7, 1, 20]
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(28, heads, dim, generator=generator, requires_grad=True)
        for heads, dim in ((4, 8), (2, 8), (2, width))
    )
    params = planned_params(plan_for(module, lengths), 0)
    out = module(q, k, v, None, attn_mask_type=mask, attention_bias=None, packed_seq_params=params)
    expected = dense(q, k, v, lengths, mask is AttnMaskType.causal).flatten(1)
    assert out.shape == (28, 4 * width)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    weights = torch.randn(expected.shape, generator=generator)
    gradients = torch.autograd.grad((out * weights).sum(), (q, k, v))
    for a, b in zip(gradients, torch.autograd.grad((expected * weights).sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_nothing_is_kept_between_calls(alone: None) -> None:
    """Two micro-batches in flight, backward in the other order, give what each gives alone."""
    module = attention()
    inputs, outs, alone_grads = [], [], []
    for lengths in ([5, 9], [3, 1, 17]):
        x = [torch.randn(sum(lengths), heads, 8, requires_grad=True) for heads in (4, 2, 2)]
        params = planned_params(plan_for(module, lengths), 0)
        alone_grads.append(torch.autograd.grad(module(*x, None, packed_seq_params=params).square().sum(), x))
        inputs.append(x)
        outs.append(module(*x, None, packed_seq_params=params).square().sum())
    before = dict(module.__dict__)
    for x, out, expected in zip(inputs, outs, alone_grads, strict=True):
        for actual, own in zip(torch.autograd.grad(out, x), expected, strict=True):
            assert torch.equal(actual, own)
    assert module.__dict__ == before and not list(module.parameters())


def test_masks_biases_and_cross_attention_are_refused(alone: None) -> None:
    module = attention()
    q, k, v = (torch.randn(6, heads, 8) for heads in (4, 2, 2))
    with pytest.raises(ConfigError, match=r"attention_mask is a tensor of shape \[1, 1, 6, 6\]; valid: None"):
        module(q, k, v, torch.zeros(1, 1, 6, 6, dtype=torch.bool))
    with pytest.raises(ConfigError, match=r"attention_bias is a tensor .* valid: None"):
        module(q, k, v, None, attention_bias=torch.zeros(1))
    with pytest.raises(ConfigError, match="attn_mask_type is no_mask in this call; valid: causal"):
        module(q, k, v, None, attn_mask_type=AttnMaskType.no_mask)
    with pytest.raises(ConfigError, match=r"packed_seq_params has no cu_seqlens_q; valid: .*planned_params"):
        module(q, k, v, None, packed_seq_params=PackedSeqParams(qkv_format="thd"))
    with pytest.raises(ConfigError, match=r"packed_seq_params is None, which has no plan; valid: .*planned_batch_from"):
        module(q, k, v, None)
    with pytest.raises(ConfigError, match="attn_mask_type is arbitrary; valid"):
        attention(attn_mask_type=AttnMaskType.arbitrary)
    with pytest.raises(ConfigError, match="attention_type is 'cross'; valid with planned attention: 'self'"):
        attention(attention_type="cross")


def test_a_plan_for_something_else_is_refused(alone: None) -> None:
    module = attention()
    q, k, v = (torch.randn(6, heads, 8) for heads in (4, 2, 2))

    def call(params: Any) -> None:
        module(q, k, v, None, packed_seq_params=params)

    with pytest.raises(ConfigError, match="those of rank 1 of 2, but this is rank 0 of 1"):
        call(planned_params(plan_for(module, [12], 2), 1))
    with pytest.raises(ConfigError, match=r"query has shape \[6, 4, 8\], but rank 0 of the plan of 7 tokens has \[7"):
        call(planned_params(plan_for(module, [7]), 0))
    other = build_plan(Documents([6]), Topology(), attention_config(transformer_config(num_query_groups=4)))
    with pytest.raises(
        ConfigError, match=r"the plan was built for .*kv_heads=4.*computes .*kv_heads=2.*attention_config"
    ):
        call(planned_params(other, 0))
    same = attention_config(transformer_config(), scale=8**-0.5)  # the default scale, said aloud
    call(planned_params(build_plan(Documents([6]), Topology(), same), 0))


def test_dropout_needs_a_seed_follows_it_and_stops_in_evaluation(alone: None) -> None:
    module, plain = attention(attention_dropout=0.5), attention()
    q, k, v = (torch.randn(40, heads, 8) for heads in (4, 2, 2))

    def out(seed: int | None, layer: int = 1) -> torch.Tensor:
        module.layer_number = layer
        params = planned_params(plan_for(module, [9, 31]), 0, dropout_seed=seed)
        return module(q, k, v, None, packed_seq_params=params)

    with pytest.raises(ConfigError, match=r"attention_dropout is 0\.5, but the micro-batch has no dropout_seed; pass"):
        out(None)
    assert torch.equal(out(3), out(3))
    for other in (out(4), out(3, layer=2), out(micro_batch_seed(3, 0)), out(micro_batch_seed(3, 1))):
        assert not torch.equal(out(3), other)
    exact = plain(q, k, v, None, packed_seq_params=planned_params(plan_for(plain, [9, 31]), 0))
    assert not torch.allclose(out(3), exact)
    module.eval()
    assert torch.equal(out(None), exact)


def test_seeds_of_micro_batches_differ() -> None:
    seeds = {micro_batch_seed(seed, number) for seed in range(20) for number in range(50)}
    assert len(seeds) == 1000 and all(0 <= seed < 2**63 for seed in seeds)


def test_layers_with_other_windows_take_their_own_plan(alone: None) -> None:
    config = transformer_config(window_size=(3, 0), window_attn_skip_freq=2)
    first, second = attention(config=config), attention(config=config, layer_number=2)
    q, k, v = (torch.randn(20, heads, 8) for heads in (4, 2, 2))
    plans = [plan_for(second, [20]), plan_for(first, [20])]
    params = planned_params(plans, 0)
    assert params.plan is plans[0] and params.plan_for(first.attention) is plans[1]
    whole = second(q, k, v, None, packed_seq_params=params)
    torch.testing.assert_close(whole, dense(q, k, v, [20], True).flatten(1), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(first(q, k, v, None, packed_seq_params=params)[4:], whole[4:], atol=1e-3)
    with pytest.raises(
        ConfigError, match=r"the plan was built for .*window=None.* layer 1 computes .*layer_attentions"
    ):
        first(q, k, v, None, packed_seq_params=planned_params(plans[0], 0))


def test_plans_that_do_not_fit_each_other_are_refused(alone: None) -> None:
    first, other = plan_for(attention(), [20], 2), plan_for(attention(), [12, 8], 2)
    with pytest.raises(ConfigError, match="plan 1 gives ranks other tokens than plan 0"):
        planned_params([first, other], 0)
    with pytest.raises(ConfigError, match="no plan was given"):
        planned_params([], 0)
    full = AttentionConfig(heads=4, kv_heads=2, head_dim=8, mask="full")
    crossed = build_plan(Documents([20]), Topology(1, 2), full, kv_documents=Documents([30]))
    with pytest.raises(ConfigError, match="plan 0 has keys of other documents than its queries"):
        planned_params(crossed, 0)


def test_packed_rows_in_a_pipeline_need_variable_lengths(alone: None) -> None:
    config = transformer_config(pipeline_model_parallel_size=2)
    module = attention(config=config)
    q, k, v = (torch.randn(6, heads, 8) for heads in (4, 2, 2))
    params = planned_params(plan_for(module, [6]), 0)
    with pytest.raises(ConfigError, match=r"variable_seq_lengths is False; valid .* True"):
        module(q, k, v, None, packed_seq_params=params)
    config.variable_seq_lengths = True
    module(q, k, v, None, packed_seq_params=params)
