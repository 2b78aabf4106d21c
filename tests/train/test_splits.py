"""Every way of splitting the work, of every kind of model, gives the curve of one rank; so does a run that goes on with
another one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindspeed_cp.config.settings import Settings
from tests.train.fresh_ranks import FreshRanks
from tests.train.test_training import assert_same_curve, curve, tiny

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "latent": dict(
        model__num_query_groups=4, model__multi_latent_attention=True, model__q_lora_rank=20, model__kv_lora_rank=12,
        model__qk_head_dim=9, model__qk_pos_emb_head_dim=4, model__v_head_dim=6, model__qk_layernorm=True,
    ),
    "experts": dict(
        model__num_moe_experts=4, model__moe_ffn_hidden_size=32, model__moe_aux_loss_coeff=0.05,
        model__moe_z_loss_coeff=1e-3, model__moe_shared_expert_intermediate_size=16, model__moe_layer_freq=[0, 1],
    ),
    "biased": dict(
        model__position_embedding_type="alibi", model__num_attention_heads=6, model__num_query_groups=2,
        model__attention_dropout=0.2, model__window_size=[40, 0], model__window_attn_skip_freq=2,
    ),
    "one embedding": dict(model__untie_embeddings_and_output_weights=False),
}  # fmt: skip

CP, ALGORITHM = "context_parallel_suite__context_parallel_size", "context_parallel_suite__algorithm"
TP, EP = "train__tensor_model_parallel_size", "train__expert_model_parallel_size"
RECOMPUTE, SP = "model__recompute_granularity", "train__sequence_parallel"
PROVED: dict[str, Any] = dict(context_parallel_suite__verify_plans=True)

#: Model, ranks, settings. tests/megatron compares loss and gradients of one step of many more.
SPLITS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "dp2 cp2": ("plain", 4, {CP: 2}),
    "tp2 cp2": ("plain", 4, {TP: 2, CP: 2}),
    "latent dp2 cp2": ("latent", 4, {CP: 2}),
    "experts ep2 tp2 cp2, selective recompute": ("experts", 4, {TP: 2, SP: True, CP: 2, EP: 2, RECOMPUTE: "selective"}),
    "biased tp2 cp2, selective recompute": ("biased", 4, {TP: 2, SP: True, CP: 2, RECOMPUTE: "selective"}),
}
MORE_SPLITS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "cp3, proved": ("plain", 3, {CP: 3, **PROVED}),
    "tp2 cp2, one embedding, full recompute": ("one embedding", 4, {TP: 2, CP: 2, RECOMPUTE: "full"}),
    "experts ep4 dp2 cp2": ("experts", 4, {CP: 2, EP: 4}),
    "biased dp2 cp2, full recompute": ("biased", 4, {CP: 2, RECOMPUTE: "full"}),
    "dp2, checked": ("plain", 2, {"train__check_attention_interval": 1, **PROVED}),
    "latent, hierarchical on two nodes, hidden states move": (
        "latent", 4,
        {CP: 4, ALGORITHM: "hierarchical", "context_parallel_suite__nodes": 2, **PROVED,
         "context_parallel_suite__remap": "hidden"},
    ),
    "experts, hierarchical on two nodes": (
        "experts", 4, {CP: 4, ALGORITHM: "hierarchical", "context_parallel_suite__nodes": 2, **PROVED},
    ),
}  # fmt: skip

#: Model, and the ranks and settings with which each checkpoint goes on.
RESUMES: dict[str, tuple[str, list[tuple[int, dict[str, Any]]]]] = {
    "ranks and algorithms": ("plain", [(2, {CP: 2}), (1, {}), (4, {CP: 2, TP: 2, ALGORITHM: "ulysses"})]),
    "experts": ("experts", [(2, {CP: 2, EP: 2}), (1, {CP: 1, EP: 1}), (4, {CP: 2, EP: 4})]),
}  # fmt: skip
DEFAULT_RESUME = "ranks and algorithms"


def settings_of(model: str, corpus: Path, folder: Path, steps: int = 4, **changes: Any) -> Settings:
    common = {"train__train_iters": steps, "train__lr_decay_iters": 20}
    return tiny(corpus, folder, **{**common, **MODELS[model], **changes})


@pytest.fixture(scope="module")
def one_rank(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], list[dict[str, Any]]]:
    """The curve of a model on one rank."""
    curves: dict[str, list[dict[str, Any]]] = {}

    def curve_of(model: str) -> list[dict[str, Any]]:
        if model not in curves:
            curves[model] = curve(fresh_ranks, settings_of(model, corpus, tmp_path_factory.mktemp("one")), 1)
        return curves[model]

    return curve_of


@pytest.mark.parametrize("name", [*SPLITS, *(pytest.param(name, marks=pytest.mark.thorough) for name in MORE_SPLITS)])
def test_curve_is_that_of_one_rank(
    name: str,
    fresh_ranks: FreshRanks,
    corpus: Path,
    tmp_path: Path,
    one_rank: Callable[[str], list[dict[str, Any]]],
) -> None:
    model, ranks, changes = (SPLITS | MORE_SPLITS)[name]
    lines = curve(fresh_ranks, settings_of(model, corpus, tmp_path, **changes), ranks)
    assert_same_curve(lines, one_rank(model))
    assert all(line["imbalance"] >= 1 for line in lines)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == DEFAULT_RESUME else pytest.mark.thorough) for name in RESUMES]
)
def test_run_goes_on_with_another_split(
    name: str,
    fresh_ranks: FreshRanks,
    corpus: Path,
    tmp_path: Path,
    one_rank: Callable[[str], list[dict[str, Any]]],
) -> None:
    model, splits = RESUMES[name]
    for step, (ranks, changes) in enumerate(splits, 1):
        lines = curve(fresh_ranks, settings_of(model, corpus, tmp_path, step, **changes), ranks)
        assert len(lines) == step
    assert_same_curve(lines, one_rank(model))
