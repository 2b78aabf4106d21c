"""Trajectories packed as trees equal the same trajectories one by one: loss, norm of gradients and every gradient."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch

from mindspeed_cp import ConfigError, Documents
from mindspeed_cp.integrations import huggingface as cp
from tests.integrations.huggingface.models import MODELS, make_config, mesh_of
from tests.integrations.huggingface.test_families import cases, check
from tests.integrations.huggingface.trees import (
    differing_call,
    old_log_probs,
    reference_step,
    sum_of_negative_weights,
    token_weights,
    trajectories,
    tree_step,
    wrapped_step,
)

_FIRST = ("llama", "qwen2", "mistral", "gpt_oss", "deepseek_v3", "gpt2", "qwen3", "gemma3")
FAMILIES = (*_FIRST, *(name for name in MODELS if name not in (*_FIRST, "bert", "modernbert", "eurobert")))


@pytest.mark.parametrize(("name", "algorithm", "ranks"), cases(FAMILIES, 8))
def test_a_tree_equals_its_trajectories_one_by_one(pool, name: str, algorithm: str, ranks: int) -> None:
    check(pool.run(ranks, tree_step, name, "cross entropy", algorithm), reference_step(name, "cross entropy"))


@pytest.mark.parametrize("kind", ["clipped", "sequence"])
@pytest.mark.parametrize(
    ("name", "algorithm", "ranks"),
    [("llama", "hierarchical", 3), pytest.param("gpt_oss", "direct", 2, marks=pytest.mark.thorough),
     pytest.param("mistral", "ring", 1, marks=pytest.mark.thorough)],
)  # fmt: skip
def test_losses_of_trajectories_with_advantages(pool, name: str, algorithm: str, ranks: int, kind: str) -> None:
    steps = pool.run(ranks, tree_step, name, kind, algorithm, old_log_probs(name))
    check(steps, reference_step(name, kind))
    assert abs(steps[0].loss - reference_step(name, "cross entropy").loss) > 0.1


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_replicas_with_trees_of_their_own(pool, kind: str) -> None:
    check(pool.run(4, wrapped_step, "llama", kind), reference_step("llama", "cross entropy", (0, 1)))


def test_dropout_is_that_of_one_rank_and_of_one_tree(pool) -> None:
    changes = {"attention_dropout": 0.3}
    alone, *_ = pool.run(1, tree_step, "llama", "cross entropy", "ring", (), changes)
    check(pool.run(3, tree_step, "llama", "cross entropy", "direct", (), changes), alone)
    assert alone.largest_error(reference_step("llama", "cross entropy")) > 1e-3


@pytest.mark.parametrize("fault", ["order", "token", "weight", "none"])
def test_ranks_with_other_trajectories_are_found(pool, fault: str) -> None:
    for text in pool.run(3, differing_call, fault):
        assert re.search("trains" if fault == "none" else "batch_digest: rank 1 has", text)


def planned(packed: Any, rank: int = 0, ranks: int = 1, name: str = "llama", weights: Any = None) -> tuple[dict[str, Any], cp.RankTargets]:  # fmt: skip
    return cp.planned_trajectories(packed, make_config(name), mesh_of(ranks, rank), "ring", weights=weights)


def test_targets_of_all_ranks_are_all_targets_once() -> None:
    batch = trajectories()
    packed = Documents.from_trajectories(batch)
    weights = token_weights([len(tokens) for tokens in batch])
    wanted, seen, most_of_a_row = packed.targets.weights(weights), np.zeros(len(packed.targets), int), 0
    for rank in range(3):
        rows, targets = planned(packed, rank, 3, weights=weights)
        tokens = rows["plan"].plans.layout.tokens(rank)
        assert rows["input_ids"][0].tolist() == packed.tokens[tokens].tolist()
        assert rows["position_ids"][0].tolist() == rows["plan"].plans.layout.positions(rank).tolist()
        assert rows["use_cache"] is False and "labels" not in rows and "shift_labels" not in rows
        np.add.at(seen, targets.numbers.numpy(), 1)
        assert (packed.targets.source[targets.numbers] == tokens[targets.rows]).all()
        assert (packed.targets.token[targets.numbers] == targets.labels.numpy()).all()
        assert targets.weights.numpy() == pytest.approx(wanted[targets.numbers], abs=1e-6)
        most_of_a_row = max(most_of_a_row, int(targets.rows.bincount().max()))
    assert (seen == 1).all()
    assert most_of_a_row == 3  # the prompt's last token, before three answers


def test_a_rank_without_targets_has_a_loss_of_zero_with_gradients() -> None:
    packed = Documents.from_trajectories([[3, 4], [3, 5]])
    for rank in range(3):
        _, targets = planned(packed, rank, 3)
        logits = torch.randn(1, targets.plan.padded_rows, 61, requires_grad=True)
        share = cp.tree_loss(logits, targets, 2.0)
        share.backward()
        assert logits.grad is not None
        if not len(targets.rows):
            assert share == 0.0 and not logits.grad.any()
    assert {len(planned(packed, rank, 3)[1].rows) for rank in range(3)} == {0, 2}


def test_a_tree_is_a_loss_of_weights_and_a_divisor() -> None:
    packed = Documents.from_trajectories([[3, 4, 6], [3, 5], [3, 4]])
    _, targets = planned(packed, weights=[[9, 1, 2], 3.0, [9, 4]])
    assert targets.labels.tolist() == [4, 5, 6] and targets.weights.tolist() == [5.0, 3.0, 2.0]
    logits = torch.randn(1, 4, 9, generator=torch.Generator().manual_seed(1))
    log_probs = logits[0].log_softmax(-1)
    wanted = -(5 * log_probs[0, 4] + 3 * log_probs[0, 5] + 2 * log_probs[1, 6])
    assert cp.sum_weights(targets) == 10.0 and cp.sum_weights([targets, targets]) == 20.0
    assert cp.tree_loss(logits, targets, cp.sum_weights(targets)) == pytest.approx(float(wanted) / 10)
    assert cp.tree_loss(logits, targets, 4) == pytest.approx(float(wanted) / 4)
    for none in (0, torch.zeros(())):
        assert cp.tree_loss(logits, targets, none) == pytest.approx(float(wanted))
    whole = cp.trajectory_log_probs(logits, targets)
    assert [x.tolist() for x in whole] == [
        pytest.approx([float(log_probs[0, 4]), float(log_probs[1, 6])]),
        pytest.approx([float(log_probs[0, 5])]),
        pytest.approx([float(log_probs[0, 4])]),
    ]


def test_weights_below_zero_are_refused_on_all_ranks(pool) -> None:
    for text in pool.run(2, sum_of_negative_weights):
        assert re.match(r"\d+ targets have weights below 0, so that their sum is no divisor of a mean; valid: a", text)


def test_models_with_a_full_mask_are_refused() -> None:
    packed = Documents.from_trajectories(trajectories())
    apart = Documents.from_trajectories([[3, 4], [5, 6]], must_share=False)
    assert planned(apart)[1].labels.tolist() == [4, 6]  # no tree is needed
    for name, documents in (("bert", packed), ("modernbert", packed), ("bert", apart)):
        with pytest.raises(ConfigError, match=f"model_type is '{name}', .*valid: a model with a causal mask"):
            planned(documents, name=name)


def test_labels_that_are_shifted_inside_documents_are_refused() -> None:
    packed = Documents.from_trajectories(trajectories())
    tokens = torch.from_numpy(packed.tokens)[None]
    with pytest.raises(ConfigError, match="predicted by its parent's last token; valid: planned_trajectories"):
        cp.planned_batch({"input_ids": tokens}, make_config("llama"), None, documents=packed.documents)


def test_the_trainer_takes_no_trees() -> None:
    packed = Documents.from_trajectories(trajectories())
    collator = cp.PlannedCollator(make_config("llama"), None)
    with pytest.raises(ConfigError, match=r"valid under the Trainer, .*: lists of documents; for trees .*tree_loss"):
        collator([cp.RepeatedRows([packed], 1)[0]])  # type: ignore[list-item]


def test_trajectories_that_do_not_fit_are_refused() -> None:
    packed = Documents.from_trajectories(trajectories())
    _, targets = planned(packed)
    with pytest.raises(ConfigError, match=r"packed is a list; valid: Documents.from_trajectories"):
        cp.planned_trajectories(trajectories(), make_config("llama"), None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="weights has 2 entries; valid: one for each of the 11 trajectories"):
        planned(packed, weights=[1.0, 2.0])
    with pytest.raises(ConfigError, match=r"logits have shape \[1, 9, 61\], the targets' rows are \[1, \d+\]"):
        cp.trajectory_log_probs(torch.zeros(1, 9, 61), targets)
    with pytest.raises(ConfigError, match="targets has none of a batch; valid: what planned_trajectories"):
        cp.sum_weights([])
