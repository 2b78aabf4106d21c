"""Operators and asynchronous streams: an operator comes after what its own stream had to do, and waits for no other."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from tests import host_cann
from tests.host_cann import oracle

MILLISECONDS = 1000


@pytest.fixture(scope="module")
def npu():
    return host_cann.load()


@pytest.fixture
def world(npu):
    """Old and new rows and what attention makes of each; a call; a stream besides the current one."""
    g = torch.Generator().manual_seed(0)
    old, new = (torch.randn(12, 2, 16, generator=g) for _ in range(2))
    ends = dict(actual_seq_qlen=[12], actual_seq_kvlen=[12])
    want = {name: oracle.fused_attention(x, x, x, 2, "TND", **ends)[0] for name, x in (("old", old), ("new", new))}
    rows, source = old.to("npu"), new.to("npu")
    torch.npu.synchronize()

    def attend():
        return npu.npu_fusion_attention_v2(rows, rows, rows, 2, "TND", **ends)[0].cpu()

    acl = host_cann.library("acl")
    return SimpleNamespace(rows=rows, source=source, want=want, attend=attend, acl=acl, other=torch.npu.Stream())


def handle(stream):
    return ctypes.c_void_p(stream.npu_stream)


def test_after_what_the_same_stream_had_to_do(world):
    world.acl.host_cann_delay(handle(torch.npu.current_stream()), 50 * MILLISECONDS)
    world.rows.copy_(world.source, non_blocking=True)
    assert torch.equal(world.attend(), world.want["new"])


def test_before_what_another_stream_has_yet_to_do(world):
    """The missing wait shows: old rows are attended to."""
    with torch.npu.stream(world.other):
        world.acl.host_cann_hold(handle(world.other))
        world.rows.copy_(world.source, non_blocking=True)
    assert torch.equal(world.attend(), world.want["old"])
    world.acl.host_cann_release(handle(world.other))
    world.other.synchronize()
    assert torch.equal(world.attend(), world.want["new"])


def test_after_another_stream_that_is_waited_for(world):
    with torch.npu.stream(world.other):
        world.acl.host_cann_delay(handle(world.other), 50 * MILLISECONDS)
        world.rows.copy_(world.source, non_blocking=True)
    torch.npu.current_stream().wait_stream(world.other)
    assert torch.equal(world.attend(), world.want["new"])


def test_on_a_stream_of_its_own(world):
    with torch.npu.stream(world.other):
        world.acl.host_cann_delay(handle(world.other), 50 * MILLISECONDS)
        world.rows.copy_(world.source, non_blocking=True)
        assert torch.equal(world.attend(), world.want["new"])


def test_contents_are_not_looked_at_before_their_time(npu, world):
    """A mask that is still on its way, and wrong until then, is no reason to refuse the call."""
    upper = torch.ones(2048, 2048, dtype=torch.bool).triu(1).to("npu")
    mask = torch.zeros_like(upper)
    torch.npu.synchronize()
    world.acl.host_cann_delay(handle(torch.npu.current_stream()), 50 * MILLISECONDS)
    mask.copy_(upper, non_blocking=True)
    ends = dict(actual_seq_qlen=[12], actual_seq_kvlen=[12])
    rows = world.rows
    npu.npu_fusion_attention_v2(rows, rows, rows, 2, "TND", sparse_mode=3, atten_mask=mask, **ends)
    mask.zero_()
    with pytest.raises(RuntimeError, match="must be 1 above the diagonal"):
        npu.npu_fusion_attention_v2(rows, rows, rows, 2, "TND", sparse_mode=3, atten_mask=mask, **ends)
