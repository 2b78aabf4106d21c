"""Dropout keys and cumulative lengths that mean nothing are refused, by both directions, not bent into something."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mindspeed_cp import ConfigError
from mindspeed_cp.ops.attention.contract import checked_dropout_key
from mindspeed_cp.ops.attention.operator import attention, attention_backward

X = torch.zeros(90, 4, 16)
CU = np.array([0, 90])


def forward(cu_q=CU, cu_k=CU, **more):
    return attention(X, X, X, cu_q, cu_k, **more)


def backward(cu_q=CU, cu_k=CU, **more):
    return attention_backward(X, X, X, X, X, X[..., 0], cu_q, cu_k, **more)


both = pytest.mark.parametrize("call", [forward, backward])


@both
@pytest.mark.parametrize("key", [7, (1, 2, 3), (1,), (), (1, 2.5), (1, -1), (True, 1), (np.bool_(1), 1), (2**63, 0), (np.float64(1), 1), "ab"], ids=str)  # fmt: skip
def test_dropout_keys_that_are_none_are_refused(call, key):
    with pytest.raises(
        ConfigError, match=r"dropout_key is .*; valid: \(seed, layer\), whole numbers from 0 to below 2\*\*63"
    ):
        call(dropout_p=0.1, dropout_key=key)


def test_numpys_whole_numbers_are_keys():
    key = checked_dropout_key((np.int64(3), np.uint64(2**63 - 1)))
    assert key == (3, 2**63 - 1) and all(type(n) is int for n in key)


def test_a_key_of_numpys_numbers_drops_the_same():
    x = torch.randn(90, 4, 16, generator=torch.Generator().manual_seed(0))
    a, b = (
        attention(x, x, x, CU, CU, dropout_p=0.3, dropout_key=key)[0] for key in ((3, 4), (np.int64(3), np.int32(4)))
    )
    assert torch.equal(a, b)


@both
@pytest.mark.parametrize("cu", [CU + 0.0, torch.tensor([0.0, 90.0]), CU > 0, [0, 90.5]], ids=str)
def test_cumulative_lengths_that_are_not_whole_are_refused(call, cu):
    with pytest.raises(ConfigError, match=r"cu_seqlens_q is of (float|bool)\d*; valid: whole numbers"):
        call(cu)
    with pytest.raises(ConfigError, match=r"cu_seqlens_kv is of (float|bool)\d*; valid: whole numbers"):
        call(CU, cu)
