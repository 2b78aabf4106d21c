"""The fused attention operators through the real torch_npu: its schemas, its checks on the host, its autograd nodes and its
calls of aclnn are those of a device; the arithmetic behind them is the stand-in's (tests/host_cann)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch_npu

from mindspeed_cp.ops.attention.operator import attention, attention_backward
from tests.host_cann import oracle
from tests.host_cann.oracle_cases import (
    EQUAL,
    LIMITS,
    PACKED,
    WRONG,
    Case,
    band,
    case_of,
    compare,
    everything,
    inputs_of,
    lse_of,
    reference,
    sound,
)
from tests.npu.operators import UNEVEN, bits_of, check, gradient_v2, on_npu, refused, to_npu

DROPPED = case_of("dropout, mode 3")


@pytest.fixture(autouse=True)
def calls():
    oracle.set_fault(None)
    oracle.calls.clear()
    yield oracle.calls
    oracle.set_fault(None)


@pytest.mark.parametrize("case", [*PACKED, *EQUAL], ids=lambda case: f"{case.layout}, {case}")
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_forward_and_gradient_agree_with_fp64(case, dtype):
    check(case, dtype)


def test_slopes_have_no_gradient():
    """There is none in the operator; what comes out is NaN here, so that nobody takes it for one."""
    case = case_of("slopes, mode 3")
    _, leaves, dy, options = on_npu(case, torch.float32)
    pse = options.pop("pse").requires_grad_()
    torch_npu.npu_fusion_attention_v2(*leaves, case.heads[0], "TND", pse=pse, **options)[0].backward(dy)
    assert pse.grad.cpu().isnan().all() and leaves[0].grad.cpu().isfinite().all()


@pytest.mark.parametrize("name", ["mode 3", "slopes, keys before", "dropout, mode 3"])
def test_the_gradient_by_hand(name):
    case = case_of(name)
    inputs, leaves, dy, options = on_npu(case, torch.float32)
    results = torch_npu.npu_fusion_attention_v2(*leaves, 4, "TND", **options)
    bits = bits_of(results, case) if "keep_prob" in options else None
    grads = gradient_v2(leaves, dy, 4, results, options)
    want = reference(case, inputs, bits)
    compare(dict(zip(("dq", "dk", "dv"), grads, strict=False)), {x: want[x] for x in ("dq", "dk", "dv")}, torch.float32)


def merged_parts(dtype=torch.float32):
    """What a ring does: two calls over half the keys, merged by the ring update; (max = lse, sum = 1) for the gradient."""
    case = Case("whole", ((24, 30),), everything, dims=(64, 64))
    inputs, (q, k, v), dy, options = on_npu(case, dtype)
    want, parts = reference(case, inputs), []
    for rows in (slice(0, 11), slice(11, 30)):
        more = options | {"actual_seq_kvlen": [len(k[rows])]}
        kv = [x.detach()[rows].contiguous() for x in (k, v)]
        parts.append((kv, more, torch_npu.npu_fusion_attention_v2(q.detach(), *kv, 4, "TND", **more)))

    def padded(results):
        """TND of one sequence as SBH: statistics lie there as [N, S, 8] anyway."""
        out, *statistics = results[:3]
        return out.reshape(24, 1, -1), *(x.reshape(1, 4, 24, 8) for x in statistics)

    merged = torch_npu.npu_ring_attention_update(*padded(parts[0][2]), *padded(parts[1][2]))
    out, largest, total = merged[0].view(24, 4, 64), *(x.view(24, 4, 8) for x in merged[1:])
    assert out.dtype == dtype
    lse = largest + total.log()
    change = dict(softmax_max=lse, softmax_sum=torch.ones_like(lse), attention_in=out)
    grads = [gradient_v2([q, *kv], dy, 4, results, more, **change) for kv, more, results in parts]
    dk, dv = (torch.cat([grads[0][x], grads[1][x]]) for x in (1, 2))
    got = dict(out=out, lse=lse_of(largest, total), dq=grads[0][0] + grads[1][0], dk=dk, dv=dv)
    compare(got, want, dtype)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_gradients_of_parts_of_the_keys_with_the_statistics_of_all_add_up(dtype):
    merged_parts(dtype)


def test_rows_apart_in_memory():
    """Strides are the operator's business, gradients included."""
    _, leaves, dy, options = on_npu(UNEVEN, torch.float32)
    want = torch_npu.npu_fusion_attention_v2(*leaves, 4, "TND", **options)
    want[0].backward(dy)
    apart = [x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in leaves]
    assert not apart[0].is_contiguous()
    got = torch_npu.npu_fusion_attention_v2(*apart, 4, "TND", **options)
    got[0].backward(dy)
    assert torch.equal(got[0], want[0]) and all(torch.equal(a.grad, b.grad) for a, b in zip(apart, leaves, strict=True))


@pytest.mark.parametrize("fault", oracle.FAULTS)
def test_a_fault_named_in_the_environment_shows(fault, monkeypatch):
    """As `doctor` must see it; each by a case that it spoils."""
    case = {
        "mask ignored past 512 columns": case_of("mode 3, past 512 columns"),
        "kv_start_idx ignored": case_of("slopes, keys before"),
        "dropout without 1/keep_prob": DROPPED,
        "gradient drops other weights": DROPPED,
        "sparse_mode 1 as causal": EQUAL[1],
    }
    by_case = case.get(fault, UNEVEN) if "ring update" not in fault and "given statistics" not in fault else None
    monkeypatch.setenv("HOST_CANN_FAULT", fault)
    with pytest.raises(AssertionError, match=r": \d"):  # "dq: 1.2e-01"
        check(by_case, torch.float32) if by_case else merged_parts()
    monkeypatch.setenv("HOST_CANN_FAULT", "")
    check(UNEVEN, torch.float32)


# dropout


def dropped(**more):
    _, leaves, _, options = on_npu(DROPPED, torch.float32)
    return torch_npu.npu_fusion_attention_v2(*leaves, 4, "TND", **options, **more)


def test_every_call_drops_other_weights_and_a_seed_drops_them_again_whatever_the_caller_gives():
    """torch_npu overwrites a seed of the caller by the generator's on this kind of device."""
    torch.npu.manual_seed(7)
    first, two = dropped(), dropped()
    torch.npu.manual_seed(7)
    again = dropped(seed=99, offset=3)
    assert first[4] == 7 and first[4:7] == again[4:7] != two[4:7]
    assert torch.equal(first[0], again[0]) and not torch.equal(first[0], two[0])


def test_a_dropout_mask_of_the_caller_is_used(calls):
    numels = oracle.dropout_numels(4, DROPPED.sizes)
    bits = oracle.dropout_bits(5, 6, numels, 0.3)
    results = dropped(dropout_mask=bits.to("npu"), seed=5, offset=6)
    want = reference(DROPPED, inputs_of(DROPPED, torch.float32), bits)["out"]
    compare({"out": results[0]}, {"out": want}, torch.float32)
    torch.npu.synchronize()
    assert results[4:7] == (5, 6, numels) and calls[-1].drop_bytes == bits.numel()


# refusals


@pytest.mark.ends_queue(2)
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: f"{wrong.layout}, {wrong.name}")
def test_a_wrong_call_is_refused_with_the_reason(wrong, calls):
    call = {name: to_npu(x) for name, x in wrong.arguments().items()}
    with refused(wrong.host or f"refused by the stand-in.*{wrong.says}", IndexError):
        torch_npu.npu_fusion_attention_v2(**call)
    assert not calls


@pytest.mark.parametrize("layout", ["TND", "BSND"])
def test_the_sound_call_is_accepted(layout, calls):
    torch_npu.npu_fusion_attention_v2(**{name: to_npu(x) for name, x in sound(layout).items()})
    torch.npu.synchronize()
    assert [x.layout for x in calls] == [layout]


def test_statistics_that_no_forward_gives_are_refused():
    _, leaves, dy, options = on_npu(UNEVEN, torch.float32)
    results = torch_npu.npu_fusion_attention_v2(*leaves, 4, "TND", **options)
    with refused("softmax_max that is not finite"):
        gradient_v2(leaves, dy, 4, results, options, softmax_max=torch.full_like(results[1], -torch.inf))


@pytest.mark.ends_queue(2)
def test_an_operator_that_the_stand_in_lacks_is_refused_by_torch_npu(calls):
    """As on a CANN without it."""
    rope = dict.fromkeys(("query_rope", "key_rope"), torch.zeros(32, 4, 8))
    with refused("aclnnFlashAttentionVarLenScoreV3 .* not in libopapi"):
        torch_npu.npu_fusion_attention_v2(**{name: to_npu(x) for name, x in (sound("TND") | rope).items()})
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
def test_a_window_of_one_key_is_a_masked_call(calls, alibi):
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
    assert [(call.layout, set(call.sequences)) for call in calls] == [("BSND", {(42, 42)})] * 2
