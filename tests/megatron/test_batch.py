"""A rank's share of a micro-batch, and the parameters that carry its plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_cp import AttentionConfig, ConfigError, Documents, Plan, Topology, build_plan
from mindspeed_cp.integrations.huggingface.loss import shifted_labels
from mindspeed_cp.megatron import planned_batch, planned_params, shift_labels

ATTENTION = AttentionConfig(heads=4, kv_heads=2, head_dim=8)
LENGTHS = [7, 0, 1, 12, 5]


def plan_of(lengths: list[int], ranks: int) -> Plan:
    return build_plan(Documents(lengths), Topology(1, ranks), ATTENTION)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=6), st.integers(1, 5), st.integers(1, 4))
def test_slices_put_together_are_the_batch(lengths: list[int], ranks: int, multiple: int) -> None:
    plan = plan_of(lengths, ranks)
    tokens = torch.arange(1, plan.documents.tokens + 1)
    parts = []
    for rank in range(ranks):
        batch, params = planned_batch({"tokens": tokens}, plan, rank, rows_multiple=multiple)
        rows = params.rows
        assert batch["tokens"].shape == batch["position_ids"].shape == (1, rows + params.padding)
        assert (rows + params.padding) % multiple == 0 and rows + params.padding > 0
        assert not batch["tokens"][0, rows:].any() and not batch["position_ids"][0, rows:].any()
        assert batch["position_ids"][0, :rows].tolist() == plan.layout.positions(rank).tolist()
        parts.append(batch["tokens"][0, :rows])
    assert torch.equal(plan.layout.unshard(parts), tokens)


def test_rows_of_a_tensor_and_back() -> None:
    params = planned_params(plan_of([13, 13], 2), 1, rows_multiple=5)
    assert params.padding
    x = torch.randn(params.rows + params.padding, 4, 8)
    rows = params.to_rows(x, "query")
    assert torch.equal(rows, x[: params.rows])
    back = params.from_rows(rows)
    assert torch.equal(back[: params.rows], rows.flatten(1))
    assert back.shape == x.flatten(1).shape and not back[params.rows :].any()


def test_parameters_describe_the_whole_batch_as_megatron_does() -> None:
    params = planned_params(plan_of(LENGTHS, 2), 0)
    assert params.cu_seqlens_q.dtype == torch.int32
    assert params.cu_seqlens_q.tolist() == [0, 7, 7, 8, 20, 25]
    assert (params.max_seqlen_q, params.max_seqlen_kv, params.qkv_format) == (12, 12, "thd")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(rank=2), "rank is 2, but the plan has ranks 0 to 1"),
        (dict(rank=-1), "rank is -1"),
        (dict(rows_multiple=0), "rows_multiple is 0; valid: 1 or more"),
    ],
)
def test_ranks_and_multiples_beside_the_plan_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned_params(plan_of(LENGTHS, 2), **{"rank": 0, **arguments})


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"tokens": torch.zeros(24)}, r"tokens has shape \[24\], but the plan has 25 tokens"),
        ({"tokens": torch.zeros(5, 5)}, r"tokens has shape \[5, 5\]"),
        ({"tokens": torch.zeros(25), "position_ids": torch.zeros(25)}, "leave positions in one dimension out"),
        ({"attention_mask": torch.zeros(1, 1, 25, 25)}, "has an attention_mask of shape"),
    ],
)
def test_a_batch_that_is_not_the_plans_is_refused(batch: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned_batch(batch, plan_of(LENGTHS, 2), 0)


def test_a_tensor_of_other_rows_is_refused() -> None:
    params = planned_params(plan_of(LENGTHS, 2), 1)
    with pytest.raises(
        ConfigError, match=r"query has shape \[99, 4, 8\].*rank 1 of the plan of 25 tokens has \[12, heads"
    ):
        params.to_rows(torch.zeros(99, 4, 8), "query")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=6))
def test_labels_are_the_next_token_of_the_same_document(lengths: list[int]) -> None:
    documents = Documents(lengths)
    tokens = np.arange(10, 10 + documents.tokens)
    labels, mask = shift_labels(tokens, documents)
    expected_labels, expected_mask = [], []
    for start, stop in zip(documents.offsets[:-1], documents.offsets[1:], strict=True):
        own = tokens[start:stop].tolist()
        expected_labels += [*own[1:], *([0] if own else [])]
        expected_mask += [*([1.0] * (len(own) - 1)), *([0.0] if own else [])]
    assert labels.tolist() == expected_labels
    assert mask.tolist() == expected_mask and mask.dtype == torch.float32


def test_a_token_that_sees_the_next_one_predicts_nothing() -> None:
    labels, mask = shift_labels(torch.arange(10, 18), Documents([5, 3], None, [(1, 4), (5, 8)]))
    assert labels.tolist() == [11, 0, 0, 14, 0, 0, 0, 0] and mask.tolist() == [1, 0, 0, 1, 0, 0, 0, 0]
    given = torch.arange(10, 18)
    assert shifted_labels(given, Documents([5, 3], None, [(1, 4)])).tolist() == [11, -100, -100, 14, -100, 16, 17, -100]


def test_shift_labels_refuses_trees() -> None:
    with pytest.raises(
        ConfigError, match=r"a document with a parent is predicted by its parent.* valid: trajectory_batch"
    ):
        shift_labels(torch.zeros(5), Documents([3, 2], [-1, 0]))


def test_shift_labels_refuses_another_number_of_tokens() -> None:
    with pytest.raises(ConfigError, match="tokens has 3 elements, but the documents have 4 tokens"):
        shift_labels(torch.zeros(3), Documents([4]))
