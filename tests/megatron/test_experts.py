"""Experts: loss, gradients and weights of one rank, whichever ranks hold them, and for any number of tokens on a rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan
from mindspeed_cp.algorithms.linear_layout import LINEAR_LAYOUT_MODES
from mindspeed_cp.megatron import install, install_model, megatron_imports, planned_params
from mindspeed_cp.megatron.adaptors import params as params_module
from tests.megatron.gpt import (
    Case,
    Suite,
    available,
    build,
    data,
    experts_of,
    layer_spec,
    one_rank,
    planned,
    transformer_config,
)
from tests.megatron.models import EXPERTS, NEEDS_PLANNED_ROUTER, SELECTIVE
from tests.megatron.packed import plain_params
from tests.megatron.ranks import MegatronRanks
from tests.megatron.runs import LAYOUTS, Runs, on_layouts
from tests.megatron.test_gpt import BALANCED, LONG, TWO
from tests.megatron.test_gpt import ODD as BATCHES  # one for each of two replicas, whose ranks share experts

with megatron_imports():
    from megatron.core.transformer.moe.router import TopKRouter

ALL_CASES = {
    "both losses": Case(BATCHES, config=EXPERTS),
    "loss of sequences": Case(
        BATCHES, config={**EXPERTS, "moe_router_load_balancing_type": "seq_aux_loss", "moe_layer_freq": [0, 1]}
    ),
    "selective recompute": Case(BATCHES, config={**EXPERTS, **SELECTIVE}),
    "no losses of the router": Case(BATCHES, config={**EXPERTS, "moe_router_load_balancing_type": "none"}),
    "steps": Case(BATCHES, optimizer="float32", steps=3, config=EXPERTS),
    **{
        f"{mode} moves": Case((LONG, (1, 2, 1)), **BALANCED, remap=mode, config=EXPERTS) for mode in LINEAR_LAYOUT_MODES
    },
    "later tokens": Case(BATCHES, config={**TWO, **EXPERTS}),
}
CASES = available(ALL_CASES)
#: By default of a layout; --thorough has all.
DEFAULT: dict[str, tuple[str, ...]] = {
    "dp2 cp2 ep4": ("both losses",), "tp2 cp2 ep2": ("both losses", "hidden moves", "later tokens"),
    "cp3": (), "cp4 ep4": (), "tp2 cp2 ep1": (),
}  # fmt: skip


@pytest.fixture(scope="module")
def reference(ranks: MegatronRanks) -> Runs:
    return Runs(ranks, CASES)


@pytest.fixture(scope="module")
def runs(ranks: MegatronRanks, reference: Runs) -> dict[bool, Runs]:
    """Without and with sequence parallelism, which experts on tensor-parallel ranks need."""
    made = {}
    for shares in (False, True):
        cases = {
            name: replace(
                case, config={**case.config, "sequence_parallel": shares}, optimizer=case.optimizer and "distributed"
            )
            for name, case in CASES.items()
        }
        made[shares] = Runs(ranks, cases, reference=reference)
    return made


@pytest.mark.parametrize(("layout", "name", "among"), on_layouts(ALL_CASES, DEFAULT))
def test_any_layout_equals_one_rank(layout: str, name: str, among: tuple[str, ...], runs: dict[bool, Runs]) -> None:
    runs[LAYOUTS[layout][0] > 1].check(name, LAYOUTS[layout], among)


@NEEDS_PLANNED_ROUTER
def test_on_one_rank_the_losses_of_the_router_are_megatrons(alone: None) -> None:
    """The same gradients as Megatron's own router, whose weights of the losses are right on one rank."""
    config = transformer_config(**EXPERTS)
    _, whole = data(Case(((24, 24),)), 0)
    results = []
    for router in ("ours", TopKRouter):
        spec = install(layer_spec(config), Suite())
        if router is TopKRouter:
            for layer in spec.layer_specs:
                experts_of(layer).router = TopKRouter
        model = install_model(build(config, spec))
        tokens, labels = (whole[name][None] for name in ("tokens", "labels"))
        model(tokens, tokens, None, labels=labels, packed_seq_params=plain_params([24, 24])).sum().backward()
        results.append({name: parameter.grad for name, parameter in model.named_parameters()})
    ours, theirs = results
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, atol=1e-5 * float(gradient.abs().max()), rtol=0)


@NEEDS_PLANNED_ROUTER
def test_rows_of_padding_do_not_count_for_the_bias_of_experts(alone: None) -> None:
    more = dict(moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid")
    config = transformer_config(**{**EXPERTS, **more})
    model = install_model(build(config, install(layer_spec(config), Suite())))
    tokens = torch.arange(10)[None]
    with torch.compiler.set_stance("force_eager"):
        model(tokens, tokens, None, padding_mask=tokens >= 7, packed_seq_params=plain_params([10]))
    for layer in model.decoder.layers:
        assert layer.mlp.router.local_tokens_per_expert.sum() == 7 * config.moe_router_topk


@NEEDS_PLANNED_ROUTER
@pytest.mark.parametrize("rank", [0, 1])
def test_a_later_stage_gets_the_padding_of_the_rows_that_its_router_has(
    rank: int, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron splits the mask over sequence-parallel ranks on the first stage alone."""
    config = transformer_config(**EXPERTS)
    first, later = (build(config, install(layer_spec(config), Suite()), pre_process=first) for first in (True, False))
    dense = build(transformer_config(), install(layer_spec(transformer_config()), Suite()))
    config.tensor_model_parallel_size, config.sequence_parallel = 2, True
    monkeypatch.setattr(params_module.parallel_state, "get_tensor_model_parallel_rank", lambda: rank)
    plan = build_plan(Documents([4, 3]), Topology(1, 1), AttentionConfig(4, 2, 8))
    params = planned_params(plan, 0, rows_multiple=2)
    assert params.padding_arguments(first)["padding_mask"].tolist() == [[False] * 7 + [True]]
    assert params.padding_arguments(later)["padding_mask"].tolist() == [[False] * 3 + [rank == 1]]
    assert not params.padding_arguments(dense) and not planned_params(plan, 0).padding_arguments(later)


@NEEDS_PLANNED_ROUTER
def test_the_cases_can_tell_the_losses_of_the_router(reference: Runs) -> None:
    both = reference.alone("both losses")
    with one_rank():
        without = planned(Case(BATCHES, config={**EXPERTS, "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None}))
        aux_only = planned(Case(BATCHES, config={**EXPERTS, "moe_z_loss_coeff": None}))
    name = "decoder.layers.1.mlp.router.weight"
    scale = abs(without.tensors[name]).max()
    assert abs(aux_only.tensors[name] - without.tensors[name]).max() > 1e-2 * scale
    assert abs(aux_only.tensors[name] - both.tensors[name]).max() > 1e-2 * scale
