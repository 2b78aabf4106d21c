"""Models of every family, planned over ranks, against the documents one by one: loss and all gradients."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from tests.integrations.huggingface.models import MODELS, OWN, Step, planned_step, reference_step

LENGTHS = (23, 1, 0, 40, 9)
SHORT = (2, 1)  # fewer tokens than ranks have chunks: some ranks have no row
ALGORITHMS = ("ring", "direct", "ulysses", "hierarchical")
RANKS = (1, 2, 3)

reference = cache(reference_step)


def cases(names: Iterable[str], default: int) -> list[object]:
    """Every model with every algorithm and number of ranks; by default one of them each, for the first models."""
    return [
        pytest.param(
            *(name, algorithm, ranks),
            marks=() if i < default and i % len(ALGORITHMS) == j and ranks == 2 + i // 2 % 2 else pytest.mark.thorough,
        )
        for i, name in enumerate(names)
        for j, algorithm in enumerate(ALGORITHMS)
        for ranks in RANKS
    ]


def check(steps: list[Step], wanted: Step) -> None:
    for step in steps:
        assert step.gradients.keys() == wanted.gradients.keys()
        assert step.largest_error(wanted) < 1e-5


@pytest.mark.parametrize(("name", "algorithm", "ranks"), cases(MODELS, OWN))
def test_a_model_equals_its_documents_one_by_one(pool, name: str, algorithm: str, ranks: int) -> None:
    steps = pool.run(ranks, planned_step, name, LENGTHS, algorithm, False, {})
    check(steps, reference(name, LENGTHS))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_recomputed_layers_get_the_same_plan(pool, name: str) -> None:
    check(pool.run(2, planned_step, name, LENGTHS, "direct", True, {}), reference(name, LENGTHS))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if i < OWN and i % 4 == 0 else pytest.mark.thorough) for i, name in enumerate(MODELS)],
)
def test_a_rank_without_rows_takes_part(pool, name: str) -> None:
    check(pool.run(3, planned_step, name, SHORT, "direct", False, {}), reference(name, SHORT))


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_dropout_is_that_of_one_rank(pool, name: str) -> None:
    setting = {"gpt2": "attn_pdrop", "bert": "attention_probs_dropout_prob"}.get(name, "attention_dropout")
    alone, *_ = pool.run(1, planned_step, name, LENGTHS, "ring", False, {setting: 0.3})
    check(pool.run(3, planned_step, name, LENGTHS, "ring", False, {setting: 0.3}), alone)
    assert alone.largest_error(reference(name, LENGTHS)) > 1e-3
