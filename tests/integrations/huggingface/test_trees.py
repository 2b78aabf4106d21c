"""Trajectories packed as trees equal the same trajectories one by one: loss, norm of gradients and every gradient."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from tests.integrations.huggingface.trees import old_log_probs, reference_step, tree_step

FAMILIES = ("llama", "qwen2", "mistral", "gpt_oss", "deepseek_v3", "bloom", "gpt2", "mpt", "qwen3", "gemma3", "qwen3_moe")
ALGORITHMS = ("ring", "direct", "ulysses", "hierarchical")


def cases() -> list[object]:
    """Every family with every algorithm and number of ranks; by default one of them each."""
    return [
        pytest.param(
            *(name, algorithm, ranks),
            marks=() if i < 8 and i % 4 == j and ranks == 2 + i // 2 % 2 else pytest.mark.thorough,
        )
        for i, name in enumerate(FAMILIES)
        for j, algorithm in enumerate(ALGORITHMS)
        for ranks in (1, 2, 3)
    ]


@pytest.mark.parametrize(("name", "algorithm", "ranks"), cases())
def test_a_tree_equals_its_trajectories_one_by_one(pool, name: str, algorithm: str, ranks: int) -> None:
    wanted = reference_step(name, "cross entropy")
    for step in pool.run(ranks, tree_step, name, "cross entropy", algorithm, old_log_probs(name)):
        assert step.gradients.keys() == wanted.gradients.keys()
        assert step.largest_error(wanted) < 1e-5
