"""The attention operator and its backward against the dense fp64 reference, on every backend of this machine."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_cp import AttentionConfig, ConfigError, Documents
from mindspeed_cp.ops.attention.backends import BACKENDS
from mindspeed_cp.ops.attention.npu.backend import NpuAttention
from mindspeed_cp.ops.attention.operator import attention, attention_backward
from mindspeed_cp.ops.attention.reference import dense_attention, dense_packed_attention
from mindspeed_cp.ops.dropout import keep_mask
from tests.ops.npu_oracle import OracleOperator
from tests.ops.yardstick import compare, reference, tensors

SHAPES = [
    (4, 4, 32, 32),
    (8, 2, 32, 32),
    (6, 3, 24, 16),
    (4, 1, 16, 40),
    (1, 1, 1, 1),
]  # heads, kv heads, head_dim, head_dim_v

#: The npu backend runs on CPU tensors with the oracle of the stand-in as its operator.
RUNNERS = ["cpu", NpuAttention(operator=OracleOperator())]
LENGTHS = [[5, 37, 0, 130, 300], [1] * 20, [3, 60, 64, 65, 20, 9], [], [0, 0], [129]]


@pytest.mark.parametrize("backend", RUNNERS, ids=["cpu", "npu over the oracle"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_forward_and_backward(lengths, shape, mask, dtype, backend):
    documents = Documents(lengths)
    q, k, v, dout = tensors(documents.tokens, documents.tokens, shape, dtype)
    cu = documents.offsets
    out, lse = attention(q, k, v, cu, cu, mask=mask, backend=backend)
    grads = attention_backward(dout, q, k, v, out, lse, cu, cu, mask=mask, backend=backend)
    compare([out, lse, *grads], reference(AttentionConfig(*shape, mask=mask), q, k, v, dout, documents), dtype)


WINDOWS = {
    "causal": [None, (0, 0), (6, 0), (70, 0), (1000, 0)],
    "full": [None, (9, 0), (0, 70), (40, 25), (-1, 3), (64, -1)],
}
CELLS = [(mask, window) for mask, windows in WINDOWS.items() for window in windows]


HEADS = [(6, 2, 16, 16), (5, 1, 16, 40), (3, 3, 24, 16)]


def combinations() -> list[Any]:
    """Each combination of masks, biases and dropout; by default with one of the shapes, in turn."""
    settings = itertools.product(CELLS, (False, True, "slopes"), (0.0, 0.3))
    return [
        pytest.param(*cell, alibi, dropout_p, shape, marks=() if (i + j) % 3 == 0 else pytest.mark.thorough)
        for i, (cell, alibi, dropout_p) in enumerate(settings)
        for j, shape in enumerate(HEADS)
    ]


@pytest.mark.parametrize(("mask", "window", "alibi", "dropout_p", "shape"), combinations(), ids=str)
def test_every_combination(mask, window, alibi, dropout_p, shape):
    """In fp32, and in bf16 where rounding `out` is not all there is of a gradient: a window of one key has none."""
    documents = Documents([5, 37, 0, 130, 160])
    if alibi == "slopes":
        alibi = torch.linspace(1.5, 0.01, shape[0])
    settings = dict(mask=mask, window=window, alibi=alibi)
    config = AttentionConfig(*shape, **settings, dropout=dropout_p)
    key = (7, 3) if dropout_p else None
    settings |= dict(dropout_p=dropout_p, dropout_key=key)
    for dtype in (torch.float32, torch.bfloat16) if window != (0, 0) else (torch.float32,):
        q, k, v, dout = tensors(documents.tokens, documents.tokens, shape, dtype)
        cu = documents.offsets
        out, lse = attention(q, k, v, cu, cu, **settings)
        grads = attention_backward(dout, q, k, v, out, lse, cu, cu, **settings)
        compare([out, lse, *grads], reference(config, q, k, v, dout, documents, dropout_key=key), dtype)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("window", [None, (30, 10), (0, -1)])
def test_queries_and_keys_of_different_lengths(window, alibi, dropout_p):
    """Under a full mask positions of both start at 0, so far queries may see no key of a window."""
    shape, queries, keys = (4, 2, 16, 24), Documents([70, 0, 9, 150, 3]), Documents([5, 20, 90, 60, 0])
    q, k, v, dout = tensors(queries.tokens, keys.tokens, shape, torch.float32)
    settings = dict(mask="full", window=window, alibi=alibi, dropout_p=dropout_p, dropout_key=(1, 2))
    arguments = q, k, v, queries.offsets, keys.offsets
    out, lse = attention(*arguments, **settings)
    grads = attention_backward(dout, q, k, v, out, lse, queries.offsets, keys.offsets, **settings)
    config = AttentionConfig(*shape, mask="full", window=window, alibi=alibi, dropout=dropout_p)
    want = reference(config, q, k, v, dout, queries, kv_documents=keys, dropout_key=(1, 2) if dropout_p else None)
    compare([out, lse, *grads], want, torch.float32)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("window", [None, (12, 0)])
def test_causal_queries_have_the_last_positions(window, dropout_p):
    """Sequences with more keys than queries, and one without keys."""
    n_q, n_k = np.array([4, 3, 30, 0, 64]), np.array([9, 0, 30, 8, 200])
    q, k, v, dout = tensors(int(n_q.sum()), int(n_k.sum()), (4, 2, 16, 16), torch.float32)
    cu_q, cu_k = (np.cumsum([0, *n]) for n in (n_q, n_k))
    settings = dict(window=window, alibi=True, dropout_p=dropout_p, dropout_key=(1, 2))
    out, lse = attention(q, k, v, cu_q, cu_k, **settings)
    grads = attention_backward(dout, q, k, v, out, lse, cu_q, cu_k, **settings)
    documents = np.repeat(np.arange(5), n_q), np.repeat(np.arange(5), n_k)
    ahead = np.where(n_k > 0, n_k - n_q, 0)
    positions = [np.arange(len(d)) - cu[d] for d, cu in zip(documents, (cu_q, cu_k), strict=True)]
    positions[0] += ahead[documents[0]]
    rows = [torch.from_numpy(x) for x in (*documents, *positions)]
    keep = None
    if dropout_p:
        keep = torch.zeros(4, len(q), len(k), dtype=torch.bool)
        for d in range(5):
            i, j = (torch.from_numpy(np.flatnonzero(x == d)) for x in documents)
            keep[:, i[:, None], j] = keep_mask(1, 2, torch.arange(4), d, rows[2][i], rows[3][j], dropout_p)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    slopes = AttentionConfig(4, alibi=True).slopes
    want, want_lse = dense_attention(*leaves, *rows, window=window, slopes=slopes, keep=keep, dropout_p=dropout_p)
    want_grads = torch.autograd.grad(want, leaves, dout.double())
    compare([out, lse, *grads], [want.detach(), want_lse.detach(), *want_grads], torch.float32)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(dict(alibi=True), marks=pytest.mark.thorough),
        pytest.param(dict(window=(1100, 0)), marks=pytest.mark.thorough),
        dict(window=(1100, 0), alibi=True),
        pytest.param(dict(mask="full", window=(900, 1000)), marks=pytest.mark.thorough),
        pytest.param(dict(mask="full", alibi=True), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_long_sequences_in_bf16(settings):
    """Long enough for every way in which tiles are cut."""
    shape = (2, 1, 16, 16)
    documents = Documents([2500])
    q, k, v, dout = tensors(2500, 2500, shape, torch.bfloat16)
    out, lse = attention(q, k, v, [0, 2500], [0, 2500], **settings)
    grads = attention_backward(dout, q, k, v, out, lse, [0, 2500], [0, 2500], **settings)
    compare(
        [out, lse, *grads], reference(AttentionConfig(*shape, **settings), q, k, v, dout, documents), torch.bfloat16
    )


def test_queries_without_keys_give_zero_and_minus_infinity():
    q, k, v, dout = tensors(7, 4, (2, 2, 8, 8), torch.float32)
    cu_q, cu_k = [0, 3, 7], [0, 0, 4]
    out, lse = attention(q, k, v, cu_q, cu_k)
    assert (out[:3] == 0).all() and (lse[:3] == float("-inf")).all() and torch.isfinite(lse[3:]).all()
    for grad in attention_backward(dout, q, k, v, out, lse, cu_q, cu_k):
        assert torch.isfinite(grad).all()
    reference, reference_lse = dense_attention(
        q.requires_grad_(),
        k,
        v,
        torch.tensor([0] * 3 + [1] * 4),
        torch.ones(4),
        torch.tensor([0, 1, 2, 0, 1, 2, 3]),
        torch.arange(4),
    )
    assert torch.allclose(out.double(), reference, atol=1e-6) and (reference_lse[:3] == float("-inf")).all()
    assert torch.isfinite(torch.autograd.grad(reference.sum(), q)[0]).all()


def test_scale_is_used_and_defaults_to_the_head_dim():
    q, k, v, _ = tensors(5, 5, (2, 2, 16, 16), torch.float32)
    assert torch.equal(attention(q, k, v, [0, 5], [0, 5])[0], attention(q, k, v, [0, 5], [0, 5], scale=0.25)[0])
    want, _ = dense_packed_attention(AttentionConfig(2, 2, 16, scale=0.7), q, k, v, Documents([5]))
    assert torch.allclose(attention(q, k, v, [0, 5], [0, 5], scale=0.7)[0].double(), want, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(k=torch.zeros(5, 3, 8)), "k .* do not fit q"),
        (dict(v=torch.zeros(4, 2, 8)), "do not fit"),
        (dict(q=torch.zeros(5, 8)), r"q has shape \(5, 8\)"),
        (dict(q=torch.zeros(5, 2, 8, dtype=torch.float64)), "k is torch.float32 .* they must agree"),
        (dict(cu_seqlens_q=[0, 4]), "cu_seqlens_q must rise from 0 to 5"),
        (dict(cu_seqlens_q=[0, 3, 5]), "alike for q and kv"),
        (dict(cu_seqlens_q=[0, 2, 5], cu_seqlens_kv=[0, 4, 5]), "sequence 1 has 3 queries and 1 keys"),
        (dict(mask="window"), "mask is 'window'"),
        (dict(window=(3, 4)), "attention.window is .3, 4., but under mask 'causal'"),
        (dict(alibi=[0.5]), "one finite slope for each of the 2 heads, in fp32 too"),
        (dict(dropout_p=1.0), "attention.dropout is 1.0; valid: a number from 0 to below 1"),
        (dict(dropout_p=0.1), r"dropout_p is 0.1, dropout_key is None; valid: \(seed, layer\)"),
        (dict(cu_seqlens_q=5), "cu_seqlens_q must rise"),
        (dict(backend="tpu"), "backend is 'tpu'; valid in this version: cpu, npu"),
        (dict(backend="npu"), "backend 'npu' does not run on tensors of device 'cpu'"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(change, says):
    q = torch.zeros(5, 2, 8)
    arguments = dict(q=q, k=q, v=q, cu_seqlens_q=[0, 5], cu_seqlens_kv=[0, 5]) | change
    with pytest.raises(ConfigError, match=says):
        attention(**arguments)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(dout=torch.zeros(4, 2, 8)), r"dout is torch.float32 \[4, 2, 8\] .* valid: torch.float32 \[5, 2, 8\]"),
        (dict(out=torch.zeros(5, 2, 8, dtype=torch.bfloat16)), "out is torch.bfloat16"),
        (dict(lse=torch.zeros(2, 5)), r"lse is torch.float32 \[2, 5\]"),
    ],
)
def test_bad_input_of_the_backward_is_refused(change, says):
    q = torch.zeros(5, 2, 8)
    arguments = dict(dout=q, q=q, k=q, v=q, out=q, lse=q[..., 0], cu_seqlens_q=[0, 5], cu_seqlens_kv=[0, 5]) | change
    with pytest.raises(ConfigError, match=says):
        attention_backward(**arguments)


def test_any_strides_give_the_same():
    q, k, v, dout = tensors(137, 137, (4, 2, 16, 16), torch.float32)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, dout)]
    out, lse = attention(q, k, v, [0, 137], [0, 137])
    other, other_lse = attention(*turned[:3], [0, 137], [0, 137])
    assert torch.equal(out, other) and torch.equal(lse, other_lse)
    want = attention_backward(dout, q, k, v, out, lse, [0, 137], [0, 137])
    got = attention_backward(
        turned[3], *turned[:3], out.transpose(1, 2).contiguous().transpose(1, 2), lse, [0, 137], [0, 137]
    )
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_the_operator_leaves_no_graph():
    q = torch.zeros(5, 2, 8, requires_grad=True)
    out, lse = attention(q, q, q, [0, 5], [0, 5])
    assert not out.requires_grad and not lse.requires_grad


def test_types_that_the_kernel_does_not_have_are_refused():
    with pytest.raises(
        ConfigError, match=r"dtype is torch.float64; the cpu backend supports float32, bfloat16, float16"
    ):
        BACKENDS["cpu"].check(AttentionConfig(4), torch.float64)
