"""The doctor's reference, made in blocks of rows, is dense attention of the whole batch and its gradient."""

from __future__ import annotations

import pytest
import torch

from mindspeed_cp.doctor.operator import DTYPES, SHORT_CASES, OperatorCase
from mindspeed_cp.doctor.reference import (
    BLOCK_ROWS,
    DROPOUT_KEY,
    RESULT_NAMES,
    reference_inputs,
    reference_results,
    relative_difference,
)
from mindspeed_cp.layout import Documents
from mindspeed_cp.ops.attention import dense_packed_attention
from mindspeed_cp.plan import AttentionConfig

LENGTHS = [2 * BLOCK_ROWS + 37, 0, BLOCK_ROWS, 5]
CASES = (
    *SHORT_CASES,
    OperatorCase("blocks", LENGTHS, AttentionConfig(4, 2, 16)),
    OperatorCase("blocks, window", LENGTHS, AttentionConfig(2, head_dim=16, window=(70, 0))),
    OperatorCase("blocks, full window", LENGTHS, AttentionConfig(2, head_dim=16, mask="full", window=(7, 90))),
    OperatorCase("blocks, right window", LENGTHS, AttentionConfig(2, head_dim=16, mask="full", window=(-1, 3))),
    OperatorCase("blocks, ALiBi, dropout", LENGTHS, AttentionConfig(2, head_dim=16, alibi=True, dropout=0.3)),
    OperatorCase("blocks, fewer keys", LENGTHS, AttentionConfig(2, head_dim=16), [90, 7, 0, 300]),
    OperatorCase("blocks, fewer keys, window", LENGTHS, AttentionConfig(2, head_dim=16, window=(40, 0)), [90, 7, 0, 3]),
    OperatorCase("no document", [], AttentionConfig(2, head_dim=16)),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_reference_made_in_blocks_is_dense_attention(case: OperatorCase) -> None:
    key = case.reference_key(3)
    q, k, v, dout = (x.double() for x in reference_inputs(key))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    documents, keys = Documents(case.lengths), Documents(case.kv_rows)
    results = reference_results(key)
    assert tuple(results) == RESULT_NAMES and all(x.dtype == torch.float64 for x in results.values())
    if not case.lengths:
        assert [x.shape[0] for x in results.values()] == [0] * 5
        return
    dropout_key = DROPOUT_KEY if case.attention.dropout else None
    out, lse = dense_packed_attention(case.attention, q, k, v, documents, kv_documents=keys, dropout_key=dropout_key)
    whole = (out, lse, *torch.autograd.grad(out, leaves, dout))
    for name, expected in zip(RESULT_NAMES, whole, strict=True):
        assert relative_difference(results[name], expected.detach()) < 1e-12, name


def test_every_type_holds_the_inputs() -> None:
    inputs = reference_inputs(CASES[0].reference_key(0))
    for dtype in DTYPES.values():
        assert all(torch.equal(x.to(dtype).float(), x) for x in inputs)
    assert max(float(x.abs().max()) for x in inputs) > 2 and len(torch.unique(inputs[0])) > 80
