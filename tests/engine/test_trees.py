"""Trees of documents: one tree in place of its trajectories, each of which is attended by itself in fp64."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_cp import Documents
from mindspeed_cp.engine import attend_in_process
from mindspeed_cp.ops.attention.reference import dense_packed_attention
from tests.engine.cases import VARIANTS, Case, run_all, worst
from tests.engine.draw import parents
from tests.engine.test_engine import PROBLEMS

TREES = {name: case for name, case in PROBLEMS.items() if case.parents is not None}


def blocks_of(case: Case, path: np.ndarray) -> list[tuple[int, int]]:
    """The blocks of a tree that are on a path, by positions."""
    position = {token: number for number, token in enumerate(path.tolist())}
    return [(position[a], position[b - 1] + 1) for a, b in case.blocks or () if a in position]


def by_trajectories(case: Case) -> list[torch.Tensor]:
    """out of the tree's tokens, dq, dk and dv, in fp64: every trajectory by itself, gradients summed over them.

    The gradient of a tree token's output is divided among the trajectories that it is in, with shares that differ.
    """
    documents = case.documents
    q, k, v, dout = (x.double() for x in case.inputs())
    trees, rng = documents.trees, np.random.default_rng(3)
    assert trees is not None
    paths = []
    for leaf in trees.leaves.tolist():
        path = trees.path(leaf)
        paths.append(np.concatenate([np.arange(documents.offsets[d], documents.offsets[d + 1]) for d in path]))
    shares = [rng.random(len(path)) for path in paths]
    total = np.zeros(documents.tokens)
    for path, share in zip(paths, shares, strict=True):
        total[path] += share
    out, grads = torch.zeros_like(dout), [torch.zeros_like(x) for x in (q, k, v)]
    for path, share in zip(paths, shares, strict=True):
        tokens = torch.from_numpy(path)
        leaves = [x[tokens].requires_grad_() for x in (q, k, v)]
        alone, _ = dense_packed_attention(case.attention, *leaves, Documents([len(path)], None, blocks_of(case, path)))
        out[tokens] = alone.detach()
        part = torch.from_numpy(share / total[path])[:, None, None] * dout[tokens]
        for whole, x in zip(grads, torch.autograd.grad(alone, leaves, part), strict=True):
            whole.index_add_(0, tokens, x)
    return [out, *grads]


@pytest.mark.parametrize("name", [name for name, case in TREES.items() if not case.dropout])
def test_a_tree_is_its_trajectories(name: str) -> None:
    case = TREES[name]
    for result, wanted in zip(case.reference(), by_trajectories(case), strict=True):
        torch.testing.assert_close(result, wanted, rtol=1e-12, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=2, max_size=12),
    st.integers(1, 7),
    st.sampled_from(sorted(VARIANTS)),
    st.sampled_from([None, (0, 0), (5, 0), (17, 0)]),
    st.randoms(use_true_random=False),
)
def test_random_forests_agree_with_fp64(
    lengths: list[int], ranks: int, variant: str, window: tuple[int, int] | None, rng: Random
) -> None:
    case = Case(tuple(lengths), 1, 4, 2, window=window, parents=parents(len(lengths), rng)).on(ranks, variant)
    result = attend_in_process(case.plan(), *case.inputs())
    for got, wanted in zip((result.out, result.dq, result.dk, result.dv), by_trajectories(case), strict=True):
        assert got is not None
        limit = 1e-5 * max(1.0, float(wanted.abs().max())) if wanted.numel() else 0.0
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=limit)


def test_processes_agree_with_fp64(workers: Any) -> None:
    cases = [case.on(3, variant) for case in TREES.values() for variant in ("ring", "ulysses", "hierarchical")]
    for case, results in zip(cases, zip(*workers.run(3, run_all, cases), strict=True), strict=True):
        assert worst(case, list(results)) <= 1e-5, case
