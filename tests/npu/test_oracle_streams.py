"""Operators and asynchronous streams: an operator comes after what its own stream had to do, and waits for no other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch_npu

from tests.host_cann import control, oracle
from tests.npu.operators import refused


@pytest.fixture
def world():
    """Old and new rows and what attention makes of each; a call; a stream besides the current one."""
    g = torch.Generator().manual_seed(0)
    old, new = (torch.randn(12, 2, 16, generator=g) for _ in range(2))
    ends = dict(actual_seq_qlen=[12], actual_seq_kvlen=[12])
    want = {name: oracle.fused_attention(x, x, x, 2, "TND", **ends)[0] for name, x in (("old", old), ("new", new))}
    rows, source = old.to("npu"), new.to("npu")
    torch.npu.synchronize()

    def attend():
        return torch_npu.npu_fusion_attention_v2(rows, rows, rows, 2, "TND", **ends)[0].cpu()

    return SimpleNamespace(rows=rows, source=source, want=want, attend=attend, other=torch.npu.Stream())


def test_after_what_the_same_stream_had_to_do(world):
    control.delay(torch.npu.current_stream(), 0.05)
    world.rows.copy_(world.source, non_blocking=True)
    assert torch.equal(world.attend(), world.want["new"])


def test_before_what_another_stream_has_yet_to_do(world):
    """The missing wait shows: old rows are attended to."""
    with torch.npu.stream(world.other):
        control.hold(world.other)
        world.rows.copy_(world.source, non_blocking=True)
    assert torch.equal(world.attend(), world.want["old"])
    control.release(world.other)
    world.other.synchronize()
    assert torch.equal(world.attend(), world.want["new"])


def test_after_another_stream_that_is_waited_for(world):
    with torch.npu.stream(world.other):
        control.delay(world.other, 0.05)
        world.rows.copy_(world.source, non_blocking=True)
    torch.npu.current_stream().wait_stream(world.other)
    assert torch.equal(world.attend(), world.want["new"])


def test_on_a_stream_of_its_own(world):
    with torch.npu.stream(world.other):
        control.delay(world.other, 0.05)
        world.rows.copy_(world.source, non_blocking=True)
        assert torch.equal(world.attend(), world.want["new"])


def test_contents_are_not_looked_at_before_their_time(world):
    """A mask that is still on its way, and wrong until then, is no reason to refuse the call."""
    upper = torch.ones(2048, 2048, dtype=torch.bool).triu(1).to("npu")
    mask = torch.zeros_like(upper)
    torch.npu.synchronize()
    control.delay(torch.npu.current_stream(), 0.05)
    mask.copy_(upper, non_blocking=True)
    ends = dict(actual_seq_qlen=[12], actual_seq_kvlen=[12])
    rows = world.rows
    torch_npu.npu_fusion_attention_v2(rows, rows, rows, 2, "TND", sparse_mode=3, atten_mask=mask, **ends)
    mask.zero_()
    with refused("must be 1 above the diagonal"):
        torch_npu.npu_fusion_attention_v2(rows, rows, rows, 2, "TND", sparse_mode=3, atten_mask=mask, **ends)


# --- with results that come late (HOST_CANN_LATE)


@pytest.fixture
def late():
    with control.late():
        yield


def attend(world):
    ends = dict(actual_seq_qlen=[12], actual_seq_kvlen=[12])
    return torch_npu.npu_fusion_attention_v2(world.rows, world.rows, world.rows, 2, "TND", **ends)[0]


def test_late_rows_that_are_overwritten_too_early_are_told(world, late):
    """A buffer is reused by another stream that did not wait for its reader."""
    stream = torch.npu.Stream()
    with torch.npu.stream(stream), control.operator_held(stream):
        attend(world)
        with torch.npu.stream(world.other):
            world.rows.copy_(world.source, non_blocking=True)
        world.other.synchronize()
    with pytest.raises(RuntimeError, match="input 0 of aclnnFlashAttentionVarLenScoreV2 was overwritten"):
        stream.synchronize()


def test_late_rows_that_wait_for_their_reader_are_safe(world, late):
    current = torch.npu.current_stream()
    with control.operator_held(current):
        out = attend(world)
        world.other.wait_stream(current)
        with torch.npu.stream(world.other):
            world.rows.copy_(world.source, non_blocking=True)
    assert torch.equal(out.cpu(), world.want["old"])
    world.other.synchronize()
    assert torch.equal(world.rows.cpu(), world.source.cpu())


@pytest.mark.parametrize("wait", [False, True])
def test_late_results_that_are_taken_without_a_wait_are_not_there(world, late, wait):
    taken, current = torch.zeros(12, 2, 16, device="npu"), torch.npu.current_stream()
    torch.npu.synchronize()
    with control.operator_held(current, 0.05 if wait else None):
        out = attend(world)
        if wait:
            world.other.wait_stream(current)
        with torch.npu.stream(world.other):
            taken.copy_(out, non_blocking=True)
        world.other.synchronize()
    assert torch.equal(out.cpu(), world.want["old"])
    assert torch.equal(taken.cpu(), world.want["old"]) == wait


def test_late_gradients(world):
    """Forward, backward and what is between them, on one stream; dropout masks on another."""
    rows = world.rows.clone().requires_grad_()
    ends = dict(actual_seq_qlen=[12], actual_seq_kvlen=[12])

    def gradient():
        torch.npu.manual_seed(3)
        out = torch_npu.npu_fusion_attention_v2(rows, rows, rows, 2, "TND", keep_prob=0.7, **ends)[0]
        return torch.autograd.grad((out * out).sum(), rows)[0].cpu()

    want = gradient()
    with control.late():
        assert torch.equal(gradient(), want)
