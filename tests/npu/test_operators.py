"""The fused attention operators through the real torch_npu: its schemas, its checks on the host, its autograd nodes and its
calls of aclnn are those of a device; the arithmetic behind them is the stand-in's (tests/host_cann)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch_npu

from tests.host_cann import oracle
from tests.host_cann.oracle_cases import (
    LIMITS,
    MODES,
    PACKED,
    Case,
    bias_gradient,
    compare,
    everything,
    lse_of,
    reference,
)
from tests.npu.operators import LAYOUTS, UNEVEN, bits_of, check, gradient_v2, on_npu, refused

DENSE = [replace(case, name=f"{layout}, {case.name}", layout=layout) for layout in LAYOUTS for case in MODES]


@pytest.fixture(autouse=True)
def calls():
    oracle.set_fault(None)
    oracle.calls.clear()
    yield oracle.calls
    oracle.set_fault(None)


@pytest.mark.parametrize("case", PACKED, ids=str)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_packed(case, dtype):
    check(case, dtype)


@pytest.mark.parametrize("case", DENSE, ids=str)
def test_equal_lengths(case):
    check(case, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["mode 3", "slopes, mode 3", "bias, type 0", "dropout, mode 3"])
def test_equal_lengths_in_16_bits(name, dtype):
    check(next(case for case in DENSE if case.name == f"SBH, {name}"), dtype)


def test_layout_names_may_be_lower_case():
    check(replace(UNEVEN, layout="TND"), torch.float32)
    inputs, leaves, _, options = on_npu(UNEVEN, torch.float32)
    small = torch_npu.npu_fusion_attention_v2(*leaves, 4, "tnd", **options)
    assert torch.equal(
        small[0].cpu(), oracle.fused_attention(*inputs.tensors[:3], 4, "TND", scale=inputs.scale, **inputs.options)[0]
    )


@pytest.mark.parametrize("kind", [0, 1])
def test_the_gradient_of_an_external_bias(kind):
    case = Case("bias", ((6, 9),) * 2, everything, layout="BNSD", pse="each", options=dict(pse_type=kind))
    inputs, leaves, dy, options = on_npu(case, torch.float32)
    pse = options.pop("pse").requires_grad_()
    torch_npu.npu_fusion_attention_v2(*leaves, 4, "BNSD", pse=pse, **options)[0].backward(dy)
    compare({"dpse": pse.grad}, {"dpse": bias_gradient(case, inputs)}, torch.float32)


def test_slopes_have_no_gradient():
    """There is none in the operator; what comes out is NaN here, so that nobody takes it for one."""
    case = next(x for x in PACKED if x.name == "slopes, mode 3")
    _, leaves, dy, options = on_npu(case, torch.float32)
    pse = options.pop("pse").requires_grad_()
    torch_npu.npu_fusion_attention_v2(*leaves, case.heads[0], "TND", pse=pse, **options)[0].backward(dy)
    assert pse.grad.cpu().isnan().all() and leaves[0].grad.cpu().isfinite().all()


@pytest.mark.parametrize("name", ["mode 3", "slopes, no mask, keys before", "dropout, mode 3"])
def test_the_gradient_by_hand(name):
    case = next(x for x in PACKED if x.name == name)
    inputs, leaves, dy, options = on_npu(case, torch.float32)
    results = torch_npu.npu_fusion_attention_v2(*leaves, 4, "TND", **options)
    bits = bits_of(results, case) if "keep_prob" in options else None
    grads = gradient_v2(leaves, dy, 4, results, options)
    want = reference(case, inputs, bits)
    compare(dict(zip(("dq", "dk", "dv"), grads, strict=False)), {x: want[x] for x in ("dq", "dk", "dv")}, torch.float32)


def test_gradients_of_parts_of_the_keys_with_the_statistics_of_all_add_up():
    """What a ring does: two calls over half the keys, merged by the ring update; (max = lse, sum = 1) for the gradient."""
    case = Case("whole", ((24, 30),), everything, dims=(64, 64))
    inputs, (q, k, v), dy, options = on_npu(case, torch.float32)
    want, parts = reference(case, inputs), []
    for rows in (slice(0, 11), slice(11, 30)):
        more = options | {"actual_seq_kvlen": [len(k[rows])]}
        kv = [x.detach()[rows].contiguous() for x in (k, v)]
        parts.append((kv, more, torch_npu.npu_fusion_attention_v2(q.detach(), *kv, 4, "TND", **more)))
    ends = torch.tensor([0, 24], device="npu")
    out, largest, total = torch_npu.npu_ring_attention_update(
        *parts[0][2][:3], *parts[1][2][:3], actual_seq_qlen=ends, input_layout="TND"
    )
    lse = largest + total.log()
    change = dict(softmax_max=lse, softmax_sum=torch.ones_like(lse), attention_in=out)
    grads = [gradient_v2([q, *kv], dy, 4, results, more, **change) for kv, more, results in parts]
    dk, dv = (torch.cat([grads[0][x], grads[1][x]]) for x in (1, 2))
    got = dict(out=out, lse=lse_of(largest, total), dq=grads[0][0] + grads[1][0], dk=dk, dv=dv)
    compare(got, want, torch.float32)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_ring_update_in_sbh(dtype):
    case = Case("whole", ((12, 20),) * 2, everything, layout="SBH", dims=(16, 16))
    inputs, (q, k, v), _, options = on_npu(case, dtype)
    parts = []
    for rows in (slice(0, 5), slice(5, 20)):
        parts.append(
            torch_npu.npu_fusion_attention_v2(q, k[rows].contiguous(), v[rows].contiguous(), 4, "SBH", **options)[:3]
        )
    out, largest, total = torch_npu.npu_ring_attention_update(*parts[0], *parts[1])
    want = reference(case, inputs)
    assert out.dtype == dtype
    compare({"out": out, "lse": lse_of(largest, total)}, {x: want[x] for x in ("out", "lse")}, dtype)


# --- npu_fusion_attention, the first version


@pytest.mark.parametrize("layout", ["TND", *LAYOUTS])
def test_version_1(layout):
    """It has neither pse_type nor start indices, and spells pre_tockens."""
    case = next(x for x in (PACKED if layout == "TND" else MODES) if x.name.startswith("mode 4"))
    case = replace(case, layout=layout)
    inputs, leaves, dy, options = on_npu(case, torch.float32)
    for name in ("pre", "next"):
        options[f"{name}_tockens"] = options.pop(f"{name}_tokens")
    results = torch_npu.npu_fusion_attention(*leaves, 4, layout, **options)
    results[0].backward(dy)
    got = dict(zip(("dq", "dk", "dv"), (x.grad for x in leaves), strict=True))
    compare(got | {"out": results[0], "lse": lse_of(*results[1:3])}, reference(case, inputs), torch.float32)


def test_statistics_are_per_sequence_unless_version_1_is_asked_for_tnd():
    """v2 takes softmax_layout and loses it on the way, on this kind of device."""
    inputs, leaves, dy, options = on_npu(UNEVEN, torch.float32)
    want = reference(UNEVEN, inputs)
    lse, first = [], 0
    for sq, _ in UNEVEN.sizes:
        lse.append(want["lse"][first * 4 : (first + sq) * 4].view(4, sq).T.flatten())
        first += sq
    results = torch_npu.npu_fusion_attention(*leaves, 4, "TND", softmax_layout="TND", **options)
    assert (lse_of(*results[1:3]) - torch.cat(lse)).abs().max() < 1e-5
    results[0].backward(dy)
    compare({"dq": leaves[0].grad}, {"dq": want["dq"]}, torch.float32)
    for operator, layout in ((torch_npu.npu_fusion_attention, ""), (torch_npu.npu_fusion_attention_v2, "TND")):
        results = operator(*leaves, 4, "TND", softmax_layout=layout, **options)
        assert (lse_of(*results[1:3]) - want["lse"]).abs().max() < 1e-5


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


def test_what_a_call_received_is_recorded(calls):
    check(next(case for case in PACKED if case.name == "slopes, mode 3"), torch.bfloat16)
    forward, backward = calls
    assert (forward.operator, backward.operator) == ("fused_attention", "fused_attention_grad")
    for call in calls:
        assert call.layout == "TND" and call.sparse_mode == 3 and call.pse_type == 2 and call.starts == (0, 0)
        assert call.sizes == ((5, 5), (17, 17), (9, 9)) and call.dtype == torch.bfloat16
        assert call.mask_bytes == 2048**2 and call.pse_bytes == 16 and call.drop_bytes == 0


@pytest.mark.parametrize("fault", oracle.FAULTS)
def test_a_fault_named_in_the_environment_shows(fault, monkeypatch):
    """As `doctor` must see it; each by a case that it spoils."""
    case = {
        "mask ignored past 512 columns": "mode 3, past 512 columns",
        "statistics in TND order": "mode 3",
        "kv_start_idx ignored": "slopes, no mask, keys before",
        "sparse_mode 3 from the top left": "mode 3",
        "key heads interleaved": "mode 3",
        "dropout without 1/keep_prob": "dropout, mode 3",
        "gradient drops other weights": "dropout, mode 3",
        "sparse_mode 1 as causal": "mode 1",
    }.get(fault)
    monkeypatch.setenv("HOST_CANN_FAULT", fault)
    with pytest.raises(AssertionError, match=r": \d"):  # "dq: 1.2e-01"
        if case:
            check(next(x for x in PACKED if x.name == case), torch.float32)
        else:
            test_gradients_of_parts_of_the_keys_with_the_statistics_of_all_add_up()
    monkeypatch.setenv("HOST_CANN_FAULT", "")
    check(UNEVEN, torch.float32)


@pytest.mark.ends_queue(2)
def test_a_fault_that_there_is_not_is_an_error(monkeypatch):
    monkeypatch.setenv("HOST_CANN_FAULT", "sleepy")
    with refused("no fault is called 'sleepy'; valid: mask ignored"):
        check(UNEVEN, torch.float32)
