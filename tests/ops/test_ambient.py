"""What torch's default type, default device and dispatch modes are when the operator is called changes neither that
call nor later ones."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from mindspeed_cp.ops.attention.cpu import kernels
from mindspeed_cp.ops.attention.operator import attention, attention_backward
from tests.ops.yardstick import tensors

SETTINGS = [dict(), dict(window=(20, 0)), dict(mask="full", alibi=True), dict(alibi=(8.0, 0.5, 0.1, 0.01)), dict(window=(30, 0), alibi=True, dropout_p=0.3, dropout_key=(3, 1))]  # fmt: skip
every_attention = pytest.mark.parametrize("settings", SETTINGS, ids=str)


def results(settings, x):
    q, k, v, dout = x
    out, lse = attention(q, k, v, [0, 90, 100], [0, 90, 100], **settings)
    return [out, lse, *attention_backward(dout, q, k, v, out, lse, [0, 90, 100], [0, 90, 100], **settings)]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def inputs(request):
    return tensors(100, 100, (4, 2, 16, 16), request.param)


@pytest.fixture
def want(settings, inputs):
    """Results of a normal call; tables that it left are forgotten."""
    out = results(settings, inputs)
    kernels._cached_table.cache_clear()
    yield out
    kernels._cached_table.cache_clear()


def same(a, b):
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


@every_attention
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_the_default_type(dtype, settings, inputs, want):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        inside = results(settings, inputs)
    finally:
        torch.set_default_dtype(before)
    assert same(inside, want) and same(results(settings, inputs), want)


@every_attention
def test_the_default_device(settings, inputs, want):
    with torch.device("meta"):
        inside = results(settings, inputs)
    assert same(inside, want) and same(results(settings, inputs), want)


@every_attention
def test_fake_tensors(settings, inputs, want):
    with FakeTensorMode() as mode:
        inside = results(settings, [mode.from_tensor(x) for x in inputs])
    assert all(isinstance(x, FakeTensor) and x.shape == y.shape for x, y in zip(inside, want, strict=True))
    assert same(results(settings, inputs), want)
