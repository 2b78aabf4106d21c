"""What torch's ambient state was when a mask was first made does not matter, then or later."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mindspeed_cp import ConfigError
from mindspeed_cp.ops.attention import attention
from mindspeed_cp.ops.attention.contract import checked_dropout_key
from mindspeed_cp.ops.attention.distances import _near

CU = np.array([0, 90])


@pytest.fixture(autouse=True)
def nothing_kept():
    """Every test makes its tables anew, and leaves none."""
    _near.cache_clear()
    yield
    _near.cache_clear()


def windowed():
    q, k, v = (torch.randn(90, 4, 16, generator=torch.Generator().manual_seed(i), dtype=torch.float32) for i in range(3))
    return attention(q, k, v, CU, CU, window=(20, 0), alibi=True)[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_default_type_changes_nothing(dtype):
    expected = windowed()
    _near.cache_clear()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        got = windowed()
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(got, expected)
    assert torch.equal(windowed(), expected)


def test_a_call_under_a_fake_mode_leaves_nothing_behind():
    expected = windowed()
    _near.cache_clear()
    with FakeTensorMode():
        try:
            windowed()
        except Exception as error:  # a fake run may not be possible; what counts is what it leaves
            assert not isinstance(error, ConfigError)
    assert torch.equal(windowed(), expected)


def test_another_default_device_leaves_nothing_behind():
    expected = windowed()
    _near.cache_clear()
    q, k, v = (torch.randn(90, 4, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    with torch.device("meta"):
        got = attention(q, k, v, CU, CU, window=(20, 0), alibi=True)[0]
    assert got.device.type == "meta" or torch.equal(got, expected)
    assert torch.equal(windowed(), expected)


@pytest.mark.parametrize("key", [7, (1, 2, 3), (1, 2.5), (1, -1), (True, 1), (2**63, 0), None, "ab"])
def test_dropout_keys_that_are_none_are_refused(key):
    with pytest.raises(ConfigError, match=r"dropout_key is|dropout_p is"):
        attention(*(torch.zeros(90, 4, 16) for _ in range(3)), CU, CU, dropout_p=0.1, dropout_key=key)


def test_numpys_whole_numbers_are_keys():
    assert checked_dropout_key((np.int64(3), 4)) == (3, 4)


def test_cumulative_lengths_that_are_not_whole_are_refused():
    with pytest.raises(ConfigError, match="cu_seqlens_q is of float64; valid: whole numbers"):
        attention(*(torch.zeros(90, 4, 16) for _ in range(3)), CU + 0.7, CU)
