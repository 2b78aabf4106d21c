"""Models and layouts beside context parallelism: every way of splitting gives the curve of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mindspeed_cp.algorithms import ALGORITHMS
from tests.train.fresh_ranks import FreshRanks
from tests.train.test_training import assert_same_curve, curve, tiny, train_here, values

STEPS = 4
COMMON: dict[str, Any] = dict(train__train_iters=STEPS, train__lr_decay_iters=20)

MODELS: dict[str, dict[str, Any]] = {
    "latent": dict(
        model__num_query_groups=4, model__multi_latent_attention=True, model__q_lora_rank=20, model__kv_lora_rank=12,
        model__qk_head_dim=9, model__qk_pos_emb_head_dim=4, model__v_head_dim=6, model__qk_layernorm=True,
        model__rope_type="yarn", model__rotary_scaling_factor=4.0, model__original_max_position_embeddings=64,
    ),
    "experts": dict(
        model__num_moe_experts=4, model__moe_ffn_hidden_size=32, model__moe_aux_loss_coeff=0.05,
        model__moe_z_loss_coeff=1e-3, model__moe_shared_expert_intermediate_size=16, model__moe_layer_freq=[0, 1],
    ),
    "biased": dict(
        model__position_embedding_type="alibi", model__num_attention_heads=6, model__num_query_groups=2,
        model__attention_dropout=0.2, model__window_size=[40, 0], model__window_attn_skip_freq=2,
    ),
}  # fmt: skip

TP2: dict[str, Any] = dict(train__tensor_model_parallel_size=2, train__sequence_parallel=True)
CP2: dict[str, Any] = dict(context_parallel_suite__context_parallel_size=2)
SPREAD: dict[str, Any] = dict(train__use_distributed_optimizer=True)
RUNS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "latent tp2 cp2, full recompute": ("latent", 4, {**TP2, **CP2, "model__recompute_granularity": "full"}),
    "latent dp2 cp2, distributed optimizer": ("latent", 4, {**CP2, **SPREAD}),
    "experts ep2 cp2": ("experts", 2, {**CP2, "train__expert_model_parallel_size": 2}),
    "experts ep4 dp2 cp2, distributed optimizer": ("experts", 4, {**CP2, **SPREAD, "train__expert_model_parallel_size": 4}),
    "experts ep2 tp2 cp2, selective recompute": (
        "experts", 4,
        {**TP2, **CP2, "train__expert_model_parallel_size": 2, "model__recompute_granularity": "selective"},
    ),
    "biased tp2 cp2, selective recompute": ("biased", 4, {**TP2, **CP2, "model__recompute_granularity": "selective"}),
    "biased dp2 cp2, full recompute": ("biased", 4, {**CP2, **SPREAD, "model__recompute_granularity": "full"}),
}  # fmt: skip


#: tests/megatron compares loss and gradients of the others with one rank: test_experts, test_gpt, test_remap.
DEFAULT = (
    "latent dp2 cp2, distributed optimizer",
    "experts ep2 tp2 cp2, selective recompute",
    "biased tp2 cp2, selective recompute",
)


@pytest.fixture(scope="module")
def references(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """Every model on one rank."""
    return {
        name: curve(fresh_ranks, tiny(corpus, tmp_path_factory.mktemp(name), **COMMON, **model), 1)
        for name, model in MODELS.items()
    }


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.thorough) for name in RUNS]
)
def test_the_curve_is_that_of_one_rank(
    name: str, fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path, references: dict[str, list[dict[str, Any]]]
) -> None:
    model, ranks, changes = RUNS[name]
    lines = curve(fresh_ranks, tiny(corpus, tmp_path, **{**COMMON, **MODELS[model], **changes}), ranks)
    assert_same_curve(lines, references[model])


@pytest.mark.parametrize("model", [pytest.param("latent", marks=pytest.mark.thorough), "experts"])
@pytest.mark.thorough
def test_hierarchical_on_two_supposed_nodes_gives_the_curve_of_one_rank(
    model: str, fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path, references: dict[str, list[dict[str, Any]]]
) -> None:
    """Documents on one rank, some ranks or by heads on a node, and linear layers on their own layout."""
    settings = tiny(
        corpus, tmp_path, **COMMON, **MODELS[model], context_parallel_suite__algorithm="hierarchical",
        context_parallel_suite__context_parallel_size=4, context_parallel_suite__nodes=2,
        context_parallel_suite__verify_plans=True,
        context_parallel_suite__remap="hidden" if model == "latent" else "qkv",
    )  # fmt: skip
    assert_same_curve(curve(fresh_ranks, settings, 4), references[model])


@pytest.mark.thorough  # tests/megatron/test_algorithms.py compares a step of each
@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name not in ("ring", "hierarchical")])
def test_every_algorithm_gives_the_curve_of_one_rank(
    algorithm: str, fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path, references: dict[str, list[dict[str, Any]]]
) -> None:
    """With windows in some layers, ALiBi and dropout; plans are proved before they run."""
    settings = tiny(
        corpus, tmp_path, **COMMON, **MODELS["biased"], context_parallel_suite__algorithm=algorithm,
        context_parallel_suite__context_parallel_size=4, context_parallel_suite__verify_plans=True,
    )  # fmt: skip
    assert_same_curve(curve(fresh_ranks, settings, 4), references["biased"])


@pytest.mark.thorough  # tests/train/test_training.py goes on with other ranks by default, without experts
def test_experts_move_between_ranks_with_a_checkpoint(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path, references: dict[str, list[dict[str, Any]]]
) -> None:
    for step, (ranks, ep) in enumerate(((2, 2), (1, 1), (4, 4)), 1):
        changes = {
            "train__train_iters": step,
            "train__expert_model_parallel_size": ep,
            "train__use_distributed_optimizer": True,
            "context_parallel_suite__context_parallel_size": min(ranks, 2),
        }
        lines = curve(fresh_ranks, tiny(corpus, tmp_path, **{**COMMON, **MODELS["experts"], **changes}), ranks)
    assert_same_curve(lines, references["experts"])


def watched(settings: str) -> tuple[list[dict[str, Any]], list[bool]]:
    """In a rank: train; the metrics, and whether torch was bound to deterministic algorithms in each step and after."""
    import torch

    from mindspeed_cp.train import loop

    run, seen = loop.run_step, []

    def watching(*args: Any) -> Any:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return run(*args)

    loop.run_step = watching
    lines = train_here(settings)["lines"]
    return lines, [*seen, torch.are_deterministic_algorithms_enabled()]


def test_two_deterministic_runs_give_the_same_bits(fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path) -> None:
    """Of a model with experts, windows, biases and dropout."""
    runs = []
    for number in range(2):
        settings = tiny(
            corpus, tmp_path / str(number), **COMMON, **{**MODELS["experts"], **MODELS["biased"]}, **CP2,
            train__expert_model_parallel_size=2, train__deterministic_mode=True,
        )  # fmt: skip
        runs.append(fresh_ranks.run(2, watched, settings.model_dump_json())[0])
    (first, seen), (second, _) = runs
    assert seen == [True] * STEPS + [False]
    for key in ("loss", "grad_norm"):
        assert values(first, key) == values(second, key)
    assert len(set(values(first))) == STEPS
