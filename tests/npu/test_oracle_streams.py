"""Operators and asynchronous streams: an operator comes after what its own stream had to do, and waits for no other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch_npu

from tests import host_cann
from tests.host_cann import control, oracle


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
    with pytest.raises(RuntimeError, match="must be 1 above the diagonal"):
        torch_npu.npu_fusion_attention_v2(rows, rows, rows, 2, "TND", sparse_mode=3, atten_mask=mask, **ends)


# --- operators that run late: as tasks of their stream. Python's lock is what they need: so these tests wait for them with
# synchronize, which lets go of it, before anything is read.


@pytest.fixture
def late():
    """Operators are under way when their call returns."""
    opapi = host_cann.library("opapi")
    opapi.host_cann_set_late(1)
    yield
    torch.npu.synchronize()
    opapi.host_cann_set_late(-1)


def held_attention(world):
    """An operator whose turn does not come before release()."""
    control.hold(torch.npu.current_stream())
    ends = dict(actual_seq_qlen=[12], actual_seq_kvlen=[12])
    return torch_npu.npu_fusion_attention_v2(world.rows, world.rows, world.rows, 2, "TND", **ends)[0]


def release():
    control.release(torch.npu.current_stream())


def read(x):
    torch.npu.synchronize()
    return x.cpu()


def test_late_rows_that_are_overwritten_too_early_show(world, late):
    """A buffer is reused by another stream that did not wait for its reader."""
    out = held_attention(world)
    with torch.npu.stream(world.other):
        world.rows.copy_(world.source, non_blocking=True)
    world.other.synchronize()
    release()
    assert torch.equal(read(out), world.want["new"])


def test_late_rows_that_wait_for_their_reader_are_safe(world, late):
    out = held_attention(world)
    world.other.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(world.other):
        world.rows.copy_(world.source, non_blocking=True)
    release()
    assert torch.equal(read(out), world.want["old"])
    assert torch.equal(read(world.rows), world.source.cpu())


def test_late_results_that_are_taken_too_early_are_not_there(world, late):
    taken = torch.zeros(12, 2, 16, device="npu")
    out = held_attention(world)
    with torch.npu.stream(world.other):
        taken.copy_(out, non_blocking=True)
    world.other.synchronize()
    release()
    assert torch.equal(read(out), world.want["old"])
    assert not torch.equal(read(taken), world.want["old"])


def test_late_errors_come_with_the_next_synchronize(world, late):
    mask = torch.zeros(2048, 2048, dtype=torch.bool, device="npu")
    torch.npu.synchronize()
    with torch.npu.stream(world.other):
        ends = dict(actual_seq_qlen=[12], actual_seq_kvlen=[12])
        torch_npu.npu_fusion_attention_v2(*[world.rows] * 3, 2, "TND", sparse_mode=3, atten_mask=mask, **ends)
        with pytest.raises(RuntimeError, match="must be 1 above the diagonal"):
            world.other.synchronize()


def test_late_gradients(world, late):
    """Forward, backward and what is between them, on one stream; dropout masks on another."""
    rows = world.rows.clone().requires_grad_()
    ends = dict(actual_seq_qlen=[12], actual_seq_kvlen=[12])
    found = []
    for on in (1, 0):
        host_cann.library("opapi").host_cann_set_late(on)
        torch.npu.manual_seed(3)
        out = torch_npu.npu_fusion_attention_v2(rows, rows, rows, 2, "TND", keep_prob=0.7, **ends)[0]
        found.append(read(torch.autograd.grad((out * out).sum(), rows)[0]))
    assert torch.equal(*found)
