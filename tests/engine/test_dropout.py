"""Dropout: which weights are dropped is the same on any number of ranks and by any algorithm."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mindspeed_cp import ConfigError, context_parallel_attention
from mindspeed_cp.algorithms import ALGORITHMS
from mindspeed_cp.ops.attention.reference import dense_packed_attention
from mindspeed_cp.ops.dropout import keep_mask
from tests.engine.cases import VARIANTS, Case, all_ranks, attend, attend_here, local, run_here, whole

#: Values are one-hot, as wide as there are keys: the output is the matrix of attention weights, zero where one is dropped.
TOKENS = 64
SEEN = Case((37, 0, 3, 24), 1, 6, 2, 16, TOKENS, dropout=0.4)


def one_hot(plan, rank):
    """Values of this rank: token t is the t-th unit vector, for every head."""
    v = torch.eye(TOKENS)[:, None].expand(TOKENS, plan.attention.kv_heads, TOKENS).contiguous()
    return plan.layout.shard(v, rank)


def matrix_of(case, training=True):
    """The attention weights after dropout, [tokens, heads, keys]."""
    plan, (q, k, _), _ = all_ranks(case)
    values = [one_hot(plan, rank) for rank in range(case.ranks)]
    return plan.layout.unshard([x.detach() for x in attend_here(case, plan, [q, k, values], training=training)])


@pytest.fixture(scope="module")
def alone():
    """The matrix at cp 1."""
    return matrix_of(SEEN)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_weights_are_dropped_at_cp_1_and_cp_4(alone, variant):
    for ranks in (4, 3):
        matrix = matrix_of(SEEN.on(ranks, variant))
        assert torch.equal(matrix == 0, alone == 0)
        assert torch.allclose(matrix, alone, atol=1e-6)


def test_what_is_dropped_is_what_the_generator_says(alone):
    """Weights of one document in turn; nothing of another document or of the future was there before."""
    kept = torch.zeros(TOKENS, SEEN.heads, TOKENS, dtype=torch.bool)
    start = 0
    for number, length in enumerate(SEEN.lengths):
        position, rows = torch.arange(length), slice(start, start + length)
        keep = keep_mask(*SEEN.dropout_key, torch.arange(SEEN.heads), number, position, position, SEEN.dropout)
        kept[rows, :, rows] = (keep & (position[:, None] >= position[None, :])).transpose(0, 1)
        start += length
    assert torch.equal(alone != 0, kept)
    assert 0.35 < 1 - kept.sum() / (SEEN.heads * sum(n * (n + 1) // 2 for n in SEEN.lengths)) < 0.45


@pytest.mark.parametrize("change", [dict(dropout_key=(11, 4)), dict(dropout_key=(12, 3)), dict(first_head=6)])
def test_other_layers_seeds_and_heads_drop_others(alone, change):
    case = replace(SEEN.on(4, "direct"), **change)
    matrix, visible = matrix_of(case), torch.tril(torch.ones(37, 37, dtype=torch.bool))
    same = ((matrix == 0) == (alone == 0))[:37, :, :37].transpose(0, 1)[:, visible]  # of the first document
    assert 0.4 < same.float().mean() < 0.64  # two independent draws agree in 0.4² + 0.6² of all weights


def test_heads_documents_and_queries_drop_others(alone):
    first, third = alone[:24, :, :24], alone[40:, :, 40:]
    assert not torch.equal(first == 0, third == 0)
    assert not torch.equal(alone[:, 0] == 0, alone[:, 1] == 0)
    assert not torch.equal(alone[30, :, :30] == 0, alone[31, :, :30] == 0)


def test_tensor_parallel_ranks_drop_what_one_rank_would(alone):
    """Two slices of heads, numbered by first_head, are the whole layer."""
    q, k, _, _ = SEEN.inputs()
    values, columns = torch.eye(TOKENS)[:, None].contiguous(), []
    for half in range(2):
        part = replace(SEEN, heads=3, kv_heads=1, first_head=3 * half)
        leaves = [q[:, 3 * half : 3 * half + 3].contiguous(), k[:, half : half + 1].contiguous(), values]
        columns.append(attend(part, part.plan(), leaves, None))
    assert torch.equal(torch.cat(columns, 1) == 0, alone == 0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_nothing_is_dropped_outside_of_training(algorithm):
    case = SEEN.on(3, algorithm)
    matrix = matrix_of(case, training=False)
    plain = matrix_of(replace(case, dropout=0.0))
    assert torch.allclose(matrix, plain, atol=1e-6)
    assert torch.allclose(matrix.sum(-1), torch.ones(TOKENS, SEEN.heads), atol=1e-5)


def test_kept_weights_grow_so_that_the_mean_stays():
    """Over many layers the mean of the output is that without dropout."""
    plan, leaves, _ = local(0, SEEN)
    leaves = [leaves[0].detach(), leaves[1].detach(), one_hot(plan, 0)]
    layers = [context_parallel_attention(*leaves, plan, dropout_key=(5, layer)) for layer in range(300)]
    exact, _ = dense_packed_attention(SEEN.attention, *leaves, SEEN.documents)
    wrong = torch.stack(layers).mean(0) - exact
    spread = (exact * (0.4 / 0.6) ** 0.5 / 300**0.5).clamp(min=1e-6)
    assert (wrong.abs() < 6 * spread).all()


def test_gradients_pass_only_through_what_was_kept(alone):
    """dv of one head is that head's matrix, transposed, times dout: the same matrix in the backward."""
    case = replace(SEEN, kv_heads=6)
    seen = matrix_of(case)
    for algorithm in ALGORITHMS:
        there = replace(case.on(4, algorithm), head_dim_v=16)
        dv = whole(there, run_here(there))[3]
        dout = there.inputs()[3]
        assert torch.allclose(dv, torch.einsum("qhk,qhd->khd", seen, dout), atol=1e-5)


@pytest.mark.parametrize(
    ("key", "says"),
    [
        (None, r"attention.dropout is 0.4 and no dropout_key was given; valid: dropout_key=\(seed, layer\)"),
        (7, r"dropout_key is 7; valid: \(seed, layer\)"),
        ((1, 2, 3), "valid: "),
        ((1, -1), "valid: "),
        ((1, 0.5), "valid: "),
        ((2**63, 0), "whole numbers from 0 to below 2"),
    ],
)
def test_a_key_that_is_missing_or_wrong_is_refused(key, says):
    plan, leaves, _ = local(0, SEEN)
    with pytest.raises(ConfigError, match=says):
        context_parallel_attention(*leaves, plan, dropout_key=key)
