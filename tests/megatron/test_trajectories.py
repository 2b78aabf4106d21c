"""Trajectories as prefix trees in a GPT: loss and gradients of the trajectories one by one, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_cp import ConfigError, Documents, Plan, Topology, build_plan
from mindspeed_cp.algorithms.linear_layout import with_linear_layout
from mindspeed_cp.layout import PackedTrajectories
from mindspeed_cp.megatron import (
    attention_config,
    install,
    install_model,
    layer_attentions,
    loss_function,
    megatron_imports,
    micro_batch_seed,
    planned_batch,
    rows_multiple,
    target_losses,
    trajectory_batch,
    trajectory_loss_function,
)
from tests.megatron.gpt import (
    VOCABULARY,
    Case,
    Suite,
    available,
    build,
    layer_spec,
    named,
    one_rank,
    planned,
    transformer_config,
)
from tests.megatron.models import EXPERTS, FULL, LATENT, NEEDS_PACKED, SIX_HEADS
from tests.megatron.ranks import MegatronRanks
from tests.megatron.runs import LAYOUTS, Runs, assert_equal, equal_to_one_rank, on_layouts
from tests.megatron.test_gpt import DROPOUT, ROPE

with megatron_imports():
    from megatron.core import parallel_state

#: Seeds of the trajectories of two micro-batches.
TWO = ((1,), (2,))


def trajectories(seed: int) -> tuple[list[np.ndarray], list[Any]]:
    """Answers to two prompts, one of them empty, one a prefix of another, two equal; a trajectory alone, and one token.
    With weights of all kinds: of tokens, one number, negative, zero."""
    generator = np.random.default_rng(seed)

    def run(length: int) -> np.ndarray:
        return generator.integers(0, VOCABULARY, length)

    first, second = run(23), run(7)
    answer = np.concatenate([first, run(11)])
    branched = np.concatenate([answer, run(5)])
    listed = [np.concatenate([first, run(17)]), answer, first, branched, np.concatenate([answer, run(3)]), branched]
    listed += [np.concatenate([second, run(length)]) for length in (1, 9, 2)] + [run(13), run(1)]
    weights: list[Any] = [generator.normal(size=len(tokens)) for tokens in listed]
    weights[2], weights[4], weights[6] = 1.0, np.zeros(len(listed[4])), -0.5
    weights[7][:9] = 0.0
    return listed, weights


def plans_of(case: Case, config: Any, documents: Documents) -> list[Plan]:
    plans = [
        build_plan(documents, Topology(1, parallel_state.get_context_parallel_world_size()), attention, case.algorithm,
                   **case.options)
        for attention in dict.fromkeys(layer_attentions(config, alibi=case.alibi))
    ]  # fmt: skip
    return plans if case.remap is None else [with_linear_layout(plan, case.remap) for plan in plans]


def tree_step(case: Case, config: Any, step: int, batches: Iterator[int], model: torch.nn.Module) -> Any:
    """A forward step of trees."""
    index = next(batches)
    listed, weights = trajectories(case.batches[index][0])
    packed = Documents.from_trajectories(listed)
    batch, params = trajectory_batch(
        packed, plans_of(case, config, packed.documents), parallel_state.get_context_parallel_rank(), weights,
        rows_multiple=rows_multiple(config), dropout_seed=micro_batch_seed(1, index),
    )  # fmt: skip
    logits = model(
        batch["tokens"], batch["position_ids"], None, packed_seq_params=params, **params.padding_arguments(model)
    )
    return logits, partial(trajectory_loss_function, batch, model)


def flat_step(case: Case, config: Any, step: int, batches: Iterator[int], model: torch.nn.Module) -> Any:
    """A forward step of the same trajectories, each a document of its own."""
    listed, weights = trajectories(case.batches[next(batches)][0])
    labels = [np.append(tokens[1:], 0) for tokens in listed]
    masks = [
        np.append((np.ones(len(tokens)) * weight)[1:], 0.0) for tokens, weight in zip(listed, weights, strict=True)
    ]
    whole = {"tokens": np.concatenate(listed), "labels": np.concatenate(labels)}
    batch, params = planned_batch(
        {**whole, "loss_mask": np.concatenate(masks).astype(np.float32)},
        plans_of(case, config, Documents([len(tokens) for tokens in listed])),
        parallel_state.get_context_parallel_rank(),
    )
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], packed_seq_params=params)
    return losses, partial(loss_function, batch["loss_mask"])


TREE = Case(TWO, forward=tree_step)
ALL_CASES = {
    "ring": TREE,
    "hierarchical": replace(TREE, algorithm="hierarchical"),
    "ulysses, one micro-batch": replace(TREE, batches=((3,),), algorithm="ulysses", config=dict(num_query_groups=4)),
    "balanced, linear layout": replace(TREE, algorithm="direct", options={"layout": "balanced"}, remap="hidden"),
    "all-gather, window": replace(TREE, algorithm="all_gather", config=dict(window_size=(9, 0))),
    "window in every other layer": replace(TREE, config=dict(window_size=(9, 0), window_attn_skip_freq=2)),
    "ALiBi": replace(TREE, alibi=True, config=SIX_HEADS),
    "latent": replace(TREE, config=LATENT),
    "partial rotary": replace(TREE, model=ROPE, config=dict(rotary_interleaved=True)),
    "learned positions": replace(TREE, model=dict(position_embedding_type="learned_absolute")),
    "learned sinks, full recompute": replace(TREE, config=dict(softmax_type="learnable", **FULL)),
    "tied embeddings": replace(TREE, model=dict(share_embeddings_and_output_weights=True)),
}
#: What has no equal flat run: one mask drops a shared token's weights; experts' losses are means over tokens.
TREES_ONLY = {
    "dropout": replace(TREE, config=DROPOUT),
    "experts": replace(TREE, config=EXPERTS),
    "float32 optimizer": replace(TREE, optimizer="float32", steps=2),
}
CASES = available({**ALL_CASES, **TREES_ONLY})


#: Cases by default: on tensor-parallel ranks what these split or share.
DEFAULT = {
    "cp3": tuple(CASES),
    "tp2 x cp2": ("ring", "ALiBi", "latent", "learned sinks, full recompute", "tied embeddings", "float32 optimizer"),
}


@pytest.fixture(scope="module")
def runs(ranks: MegatronRanks) -> Runs:
    return Runs(ranks, CASES)


@pytest.mark.parametrize("name", named(ALL_CASES))
def test_trees_give_the_loss_and_gradients_of_flat_trajectories(name: str, runs: Runs) -> None:
    trees = runs.alone(name)
    with one_rank():
        flat = planned(replace(CASES[name], forward=flat_step))
    assert_equal(trees, flat)
    assert flat.tokens == sum(
        np.count_nonzero((np.ones(len(tokens)) * weight)[1:])
        for (seed,) in CASES[name].batches
        for tokens, weight in zip(*trajectories(seed), strict=True)
    )


@pytest.mark.parametrize(
    ("layout", "name", "among"), on_layouts({**ALL_CASES, **TREES_ONLY}, DEFAULT, not_on_tensor_ranks=("experts",))
)  # experts need sequence parallelism there
def test_any_layout_equals_one_rank(layout: str, name: str, among: tuple[str, ...], runs: Runs) -> None:
    runs.check(name, LAYOUTS[layout], among)


def test_replicas_and_sequence_parallelism_equal_one_rank(ranks: MegatronRanks) -> None:
    """With rows of padding behind the tokens of a rank."""
    equal_to_one_rank(ranks, (1, 2, 1, 4), {"replicas": (TREE, TREE)})
    equal_to_one_rank(ranks, (2, 2), {"shares": (replace(TREE, config=dict(sequence_parallel=True)), TREE)})


def packed_and_plan(seed: int = 1, cp: int = 1) -> tuple[PackedTrajectories, Plan]:
    packed = Documents.from_trajectories(trajectories(seed)[0])
    return packed, build_plan(packed.documents, Topology(1, cp), attention_config(transformer_config()))


def test_every_target_is_on_one_rank_with_the_losses_of_its_log_probabilities() -> None:
    packed, plan = packed_and_plan(cp=3)
    batches = [trajectory_batch(packed, plan, rank)[0] for rank in range(3)]
    numbers = np.concatenate([batch["targets"].numpy() for batch in batches])
    assert sorted(numbers.tolist()) == list(range(len(packed.targets)))
    assert any(len(batch["branch_rows"]) for batch in batches)
    assert sum(int(batch["counted_tokens"]) for batch in batches) == sum(len(path) - 1 for path in packed.tree_tokens)
    logits = torch.randn(packed.documents.tokens, VOCABULARY)
    expected = -logits.log_softmax(-1)[packed.targets.source, packed.targets.token]
    with one_rank():
        config = transformer_config()
        model = torch.nn.ModuleDict({"module": build(config, install(layer_spec(config), Suite()))})["module"]
        for rank, batch in enumerate(batches):
            rows = torch.from_numpy(plan.batch_layout.tokens(rank))
            losses = target_losses(batch, model, logits[rows][None].clone())
            torch.testing.assert_close(losses, expected[batch["targets"]])


# bad input


def refused(words: str, call: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match=words):
        call()


def test_a_plan_of_other_documents_is_refused() -> None:
    packed, _ = packed_and_plan()
    attention = attention_config(transformer_config())
    for documents in (Documents(packed.documents.lengths), packed_and_plan(2)[0].documents):
        plan = build_plan(documents, Topology(1, 1), attention)
        refused(
            r"\[tokens\]|valid: build_plan\(packed\.documents|but the plan has",
            lambda p=plan: trajectory_batch(packed, p, 0),
        )  # type: ignore[misc]


def test_logits_are_needed() -> None:
    packed, plan = packed_and_plan()
    batch, _ = trajectory_batch(packed, plan, 0)
    refused("call the model without labels", lambda: target_losses(batch, torch.nn.Module(), torch.zeros(1, 5)))


@pytest.mark.parametrize(
    ("config", "model", "words"),
    [
        pytest.param(dict(mtp_num_layers=1), {}, "set mtp_num_layers to None", marks=NEEDS_PACKED),
        (dict(mrope_section=[1, 1, 2]), dict(position_embedding_type="mrope"), "'mrope'"),
    ],
    ids=["multi-token prediction", "mrope"],
)
def test_trees_refuse_multi_token_prediction_and_mrope(
    config: dict[str, Any], model: dict[str, Any], words: str
) -> None:
    from mindspeed_cp.megatron import local_mtp_spec

    packed, plan = packed_and_plan()
    batch, params = trajectory_batch(packed, plan, 0)
    with one_rank():
        whole = transformer_config(**config)
        spec = install(layer_spec(whole), Suite())
        later = {"mtp_block_spec": local_mtp_spec(whole, spec)} if "mtp_num_layers" in config else {}
        gpt = install_model(build(whole, spec, **model, **later))
        more = (
            {"labels": batch["labels"], "loss_mask": torch.ones_like(batch["labels"], dtype=torch.float32)}
            if later
            else {}
        )
        refused(words, lambda: gpt(batch["tokens"], batch["position_ids"], None, packed_seq_params=params, **more))
