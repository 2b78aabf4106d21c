"""Wrong calls of the fused attention operators through the real torch_npu: refused, with the reason in the error."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch_npu

from mindspeed_cp.ops.attention import attention, attention_backward
from tests.host_cann import oracle
from tests.host_cann.oracle_cases import band
from tests.host_cann.oracle_wrong import WRONG, arguments, sound
from tests.npu.operators import UNEVEN, gradient_v2, on_npu, refused, to_npu


@pytest.fixture
def calls():
    oracle.calls.clear()
    return oracle.calls


@pytest.mark.ends_queue(2)
@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_wrong_call_is_refused_with_the_reason(wrong, calls):
    call = {name: to_npu(x) for name, x in arguments(wrong).items()}
    with refused(wrong.host or f"refused by the stand-in.*{wrong.says}", IndexError):
        torch_npu.npu_fusion_attention_v2(**call)
    assert not calls


@pytest.mark.parametrize("layout", ["TND", "BNSD"])
def test_the_sound_call_is_accepted(layout, calls):
    torch_npu.npu_fusion_attention_v2(**{name: to_npu(x) for name, x in sound(layout).items()})
    torch.npu.synchronize()
    assert [x.layout for x in calls] == [layout]


def test_statistics_that_no_forward_gives_are_refused():
    _, leaves, dy, options = on_npu(UNEVEN, torch.float32)
    results = torch_npu.npu_fusion_attention_v2(*leaves, 4, "TND", **options)
    empty = torch.full_like(results[1], -torch.inf)
    with refused("softmax_max that is not finite"):
        gradient_v2(leaves, dy, 4, results, options, softmax_max=empty)


ROPE = dict.fromkeys(("query_rope", "key_rope"), torch.zeros(32, 4, 8))


@pytest.mark.ends_queue(2)
@pytest.mark.parametrize("more, says", [
    (ROPE, "aclnnFlashAttentionVarLenScoreV3 .* not in libopapi"),
    (dict(sink=torch.zeros(4)), "sink is not supported in this CANN version"),
], ids=["rope", "sink"])  # fmt: skip
def test_what_the_stand_in_does_not_have_is_refused_by_torch_npu(more, says, calls):
    """As on a CANN without these operators."""
    call = {name: to_npu(x) for name, x in (sound("TND") | more).items()}
    with refused(says):
        torch_npu.npu_fusion_attention_v2(**call)
    assert not calls


def test_a_mask_on_the_cpu_is_refused(calls):
    call = {name: to_npu(x) for name, x in sound("BNSD").items()}
    with refused("atten_mask is on cpu"):
        torch_npu.npu_fusion_attention_v2(**call, sparse_mode=1, atten_mask=torch.zeros(32, 32, dtype=torch.bool))
    assert not calls


BAND = replace(
    UNEVEN, sees=band(0, 0), options=dict(sparse_mode=4, pre_tokens=0, next_tokens=0), sizes=((5, 5), (9, 12))
)


@pytest.mark.ends_queue(2)
def test_the_gradient_of_a_band_of_one_key_is_refused_and_its_forward_is_not(calls):
    _, leaves, dy, options = on_npu(BAND, torch.float32)
    results = torch_npu.npu_fusion_attention_v2(*leaves, 4, "TND", **options)
    torch.npu.synchronize()
    with refused(r"pre_tokens \+ next_tokens above 0; got 0 and 0 \(rule band-gradient; "):
        gradient_v2(leaves, dy, 4, results, options)
    assert [call.operator for call in calls] == ["fused_attention"]


@pytest.mark.parametrize("alibi", [False, True])
def test_the_backend_has_another_way_to_a_window_of_one_key(calls, alibi):
    inputs = [torch.randn(42, heads, 16) for heads in (4, 2, 2, 4)]
    how = dict(window=(0, 0), alibi=alibi)
    results = []
    for device in ("cpu", "npu"):
        q, k, v, dout = (x.to(device) for x in inputs)
        out, lse = attention(q, k, v, [0, 5, 42], [0, 5, 42], backend=device, **how)
        grads = attention_backward(dout, q, k, v, out, lse, [0, 5, 42], [0, 5, 42], backend=device, **how)
        results.append([x.cpu() for x in (out, lse, *grads)])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    assert [(call.layout, set(call.sizes)) for call in calls] == [("BSND", {(1, 1)})] * 2


@pytest.mark.ends_queue(2)
def test_ring_update_of_a_head_size_that_is_no_multiple_of_64():
    out, stats = torch.ones(6, 2, 32, device="npu"), torch.ones(6, 2, 8, device="npu")
    with refused("multiples of 64"):
        torch_npu.npu_ring_attention_update(
            out, stats, stats, out, stats, stats, actual_seq_qlen=torch.tensor([0, 6], device="npu"), input_layout="TND"
        )
