"""The fused attention operators through the real torch_npu: its schemas, its checks on the host, its autograd nodes and its
calls of aclnn are those of a device; the arithmetic behind them is the stand-in's (tests/host_cann)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests import host_cann
from tests.host_cann import oracle
from tests.host_cann.oracle_cases import (
    LIMITS,
    MODES,
    PACKED,
    Case,
    compare,
    everything,
    inputs_of,
    lse_of,
    reference,
)
from tests.host_cann.oracle_wrong import WRONG, arguments, sound

LAYOUTS = ("BSH", "SBH", "BSND", "BNSD")
DENSE = [replace(case, name=f"{layout}, {case.name}", layout=layout) for layout in LAYOUTS for case in MODES]
UNEVEN = next(case for case in PACKED if case.name == "mode 3")


@pytest.fixture(scope="module")
def npu():
    return host_cann.load()


@pytest.fixture(autouse=True)
def calls(npu):
    oracle.set_fault(None)
    oracle.calls.clear()
    yield oracle.calls
    oracle.set_fault(None)


def to_npu(x):
    return x.to("npu") if isinstance(x, torch.Tensor) else x


def on_npu(case, dtype):
    """Inputs of the case, leaves on the device, and keyword arguments there."""
    inputs = inputs_of(case, dtype)
    *leaves, dy = (to_npu(x) for x in inputs.tensors)
    options = {name: to_npu(x) for name, x in inputs.options.items()}
    return inputs, [x.requires_grad_() for x in leaves], dy, options | {"scale": inputs.scale}


def bits_of(results, case):
    """The dropout mask that seed, offset and numels, as torch_npu returns them, stand for."""
    seed, offset, numels = results[4:7]
    assert numels == oracle.dropout_numels(case.heads[0], case.sizes)
    return oracle.dropout_bits(seed, offset, numels, 1 - case.options["keep_prob"])


def check(npu, case, dtype):
    """v2 forward and its autograd node against the dense reference."""
    inputs, leaves, dy, options = on_npu(case, dtype)
    results = npu.npu_fusion_attention_v2(*leaves, case.heads[0], case.layout, **options)
    results[0].backward(dy)
    bits = bits_of(results, case) if "keep_prob" in options else None
    got = dict(zip(("dq", "dk", "dv"), (x.grad for x in leaves), strict=True))
    assert results[0].dtype == dtype and results[1].dtype == results[2].dtype == torch.float32
    compare(got | {"out": results[0], "lse": lse_of(*results[1:3])}, reference(case, inputs, bits), dtype)


@pytest.mark.parametrize("case", PACKED, ids=str)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_packed(npu, case, dtype):
    check(npu, case, dtype)


@pytest.mark.parametrize("case", DENSE, ids=str)
def test_equal_lengths(npu, case):
    check(npu, case, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["mode 3", "slopes, mode 3", "bias, type 0", "dropout, mode 3"])
def test_equal_lengths_in_16_bits(npu, name, dtype):
    check(npu, next(case for case in DENSE if case.name == f"SBH, {name}"), dtype)


def test_layout_names_may_be_lower_case(npu):
    check(npu, replace(UNEVEN, layout="TND"), torch.float32)
    inputs, leaves, _, options = on_npu(UNEVEN, torch.float32)
    small = npu.npu_fusion_attention_v2(*leaves, 4, "tnd", **options)
    assert torch.equal(
        small[0].cpu(), oracle.fused_attention(*inputs.tensors[:3], 4, "TND", scale=inputs.scale, **inputs.options)[0]
    )


def gradient_v2(npu, leaves, dy, heads, results, options, **change):
    """grad_v2 called by hand, as a ring does it; statistics and output are the forward's unless replaced."""
    given = dict(softmax_max=results[1], softmax_sum=results[2], attention_in=results[0].detach()) | change
    more = dict(options)
    more["scale_value"] = more.pop("scale")
    if "keep_prob" in more:
        more |= dict(zip(("seed", "offset", "numels"), results[4:7], strict=True))
    return npu.npu_fusion_attention_grad_v2(*(x.detach() for x in leaves), dy, heads, "TND", **given, **more)


@pytest.mark.parametrize("name", ["mode 3", "slopes, no mask, keys before", "dropout, mode 3"])
def test_the_gradient_by_hand(npu, name):
    case = next(x for x in PACKED if x.name == name)
    inputs, leaves, dy, options = on_npu(case, torch.float32)
    results = npu.npu_fusion_attention_v2(*leaves, 4, "TND", **options)
    bits = bits_of(results, case) if "keep_prob" in options else None
    grads = gradient_v2(npu, leaves, dy, 4, results, options)
    want = reference(case, inputs, bits)
    compare(dict(zip(("dq", "dk", "dv"), grads, strict=False)), {x: want[x] for x in ("dq", "dk", "dv")}, torch.float32)


def test_gradients_of_parts_of_the_keys_with_the_statistics_of_all_add_up(npu):
    """What a ring does: two calls over half the keys, merged by the ring update; (max = lse, sum = 1) for the gradient."""
    case = Case("whole", ((24, 30),), everything, dims=(64, 64))
    inputs, (q, k, v), dy, options = on_npu(case, torch.float32)
    want, parts = reference(case, inputs), []
    for rows in (slice(0, 11), slice(11, 30)):
        more = options | {"actual_seq_kvlen": [len(k[rows])]}
        kv = [x.detach()[rows].contiguous() for x in (k, v)]
        parts.append((kv, more, npu.npu_fusion_attention_v2(q.detach(), *kv, 4, "TND", **more)))
    ends = torch.tensor([24], device="npu")
    out, largest, total = npu.npu_ring_attention_update(
        *parts[0][2][:3], *parts[1][2][:3], actual_seq_qlen=ends, input_layout="TND"
    )
    lse = largest + total.log()
    change = dict(softmax_max=lse, softmax_sum=torch.ones_like(lse), attention_in=out)
    grads = [gradient_v2(npu, [q, *kv], dy, 4, results, more, **change) for kv, more, results in parts]
    dk, dv = (torch.cat([grads[0][x], grads[1][x]]) for x in (1, 2))
    got = dict(out=out, lse=lse_of(largest, total), dq=grads[0][0] + grads[1][0], dk=dk, dv=dv)
    compare(got, want, torch.float32)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_ring_update_in_sbh(npu, dtype):
    case = Case("whole", ((12, 20),) * 2, everything, layout="SBH", dims=(16, 16))
    inputs, (q, k, v), _, options = on_npu(case, dtype)
    parts = []
    for rows in (slice(0, 5), slice(5, 20)):
        parts.append(
            npu.npu_fusion_attention_v2(q, k[rows].contiguous(), v[rows].contiguous(), 4, "SBH", **options)[:3]
        )
    out, largest, total = npu.npu_ring_attention_update(*parts[0], *parts[1])
    want = reference(case, inputs)
    assert out.dtype == dtype
    compare({"out": out, "lse": lse_of(largest, total)}, {x: want[x] for x in ("out", "lse")}, dtype)


# --- npu_fusion_attention, the first version


@pytest.mark.parametrize("layout", ["TND", *LAYOUTS])
def test_version_1(npu, layout):
    """It has neither pse_type nor start indices, and spells pre_tockens."""
    case = next(x for x in (PACKED if layout == "TND" else MODES) if x.name.startswith("mode 4"))
    case = replace(case, layout=layout)
    inputs, leaves, dy, options = on_npu(case, torch.float32)
    for name in ("pre", "next"):
        options[f"{name}_tockens"] = options.pop(f"{name}_tokens")
    results = npu.npu_fusion_attention(*leaves, 4, layout, **options)
    results[0].backward(dy)
    got = dict(zip(("dq", "dk", "dv"), (x.grad for x in leaves), strict=True))
    compare(got | {"out": results[0], "lse": lse_of(*results[1:3])}, reference(case, inputs), torch.float32)


def test_statistics_are_per_sequence_unless_version_1_is_asked_for_tnd(npu):
    """v2 takes softmax_layout and loses it on the way, on this kind of device."""
    inputs, leaves, dy, options = on_npu(UNEVEN, torch.float32)
    want = reference(UNEVEN, inputs)
    lse, first = [], 0
    for sq, _ in UNEVEN.sizes:
        lse.append(want["lse"][first * 4 : (first + sq) * 4].view(4, sq).T.flatten())
        first += sq
    results = npu.npu_fusion_attention(*leaves, 4, "TND", softmax_layout="TND", **options)
    assert (lse_of(*results[1:3]) - torch.cat(lse)).abs().max() < 1e-5
    results[0].backward(dy)
    compare({"dq": leaves[0].grad}, {"dq": want["dq"]}, torch.float32)
    for operator, layout in ((npu.npu_fusion_attention, ""), (npu.npu_fusion_attention_v2, "TND")):
        results = operator(*leaves, 4, "TND", softmax_layout=layout, **options)
        assert (lse_of(*results[1:3]) - want["lse"]).abs().max() < 1e-5


# --- dropout

DROPPED = next(case for case in PACKED if case.name == "dropout, mode 3")


def dropped(npu, **more):
    _, leaves, _, options = on_npu(DROPPED, torch.float32)
    return npu.npu_fusion_attention_v2(*leaves, 4, "TND", **options, **more)


def test_every_call_draws_other_weights_and_a_seed_draws_them_again(npu):
    torch.npu.manual_seed(7)
    one, two = dropped(npu), dropped(npu)
    torch.npu.manual_seed(7)
    again = dropped(npu)
    assert one[4] == 7 and one[4:7] == again[4:7] != two[4:7]
    assert torch.equal(one[0], again[0]) and not torch.equal(one[0], two[0])


def test_a_seed_of_the_caller_is_overwritten(npu):
    """By the generator's, as torch_npu does it on this kind of device unless a mask is given."""
    torch.npu.manual_seed(7)
    assert dropped(npu, seed=99, offset=3)[4] == 7


@pytest.mark.parametrize("how", [dict(gen_mask_parallel=False), dict(sync=True)], ids=str)
def test_the_stream_of_the_mask_changes_nothing(npu, how):
    torch.npu.manual_seed(7)
    want = dropped(npu)
    torch.npu.manual_seed(7)
    got = dropped(npu, **how)
    assert got[4:7] == want[4:7] and torch.equal(got[0], want[0])


def test_a_mask_of_the_caller_is_used(npu, calls):
    numels = oracle.dropout_numels(4, DROPPED.sizes)
    bits = oracle.dropout_bits(5, 6, numels, 0.3)
    results = dropped(npu, dropout_mask=bits.to("npu"), seed=5, offset=6)
    want = reference(DROPPED, inputs_of(DROPPED, torch.float32), bits)["out"]
    compare({"out": results[0]}, {"out": want}, torch.float32)
    assert results[4:7] == (5, 6, numels) and calls[-1].drop_bytes == bits.numel()


def test_without_dropout_there_is_no_mask(npu, calls):
    _, leaves, _, options = on_npu(UNEVEN, torch.float32)
    npu.npu_fusion_attention_v2(*leaves, 4, "TND", **options)
    assert calls[-1].drop_bytes == 0


def test_rows_apart_in_memory(npu):
    """Strides are the operator's business, gradients included."""
    _, leaves, dy, options = on_npu(UNEVEN, torch.float32)
    want = npu.npu_fusion_attention_v2(*leaves, 4, "TND", **options)
    want[0].backward(dy)
    apart = [x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in leaves]
    assert not apart[0].is_contiguous()
    got = npu.npu_fusion_attention_v2(*apart, 4, "TND", **options)
    got[0].backward(dy)
    assert torch.equal(got[0], want[0]) and all(torch.equal(a.grad, b.grad) for a, b in zip(apart, leaves, strict=True))


def test_what_a_call_received_is_recorded(npu, calls):
    check(npu, next(case for case in PACKED if case.name == "slopes, mode 3"), torch.bfloat16)
    forward, backward = calls
    assert (forward.operator, backward.operator) == ("fused_attention", "fused_attention_grad")
    for call in calls:
        assert call.layout == "TND" and call.sparse_mode == 3 and call.pse_type == 2 and call.starts == (0, 0)
        assert call.sizes == ((5, 5), (17, 17), (9, 9)) and call.dtype == torch.bfloat16
        assert call.mask_bytes == 2048**2 and call.pse_bytes == 16 and call.drop_bytes == 0


@pytest.mark.parametrize("fault", oracle.FAULTS)
def test_a_fault_named_in_the_environment_shows(npu, fault, monkeypatch):
    """As `doctor` must see it; each by a case that it spoils."""
    case = {
        "mask ignored past 512 columns": "mode 3, past 512 columns",
        "statistics in TND order": "mode 3",
        "kv_start_idx ignored": "slopes, no mask, keys before",
        "sparse_mode 3 from the top left": "mode 3",
        "key heads interleaved": "mode 3",
        "dropout without 1/keep_prob": "dropout, mode 3",
        "gradient drops other weights": "dropout, mode 3",
    }.get(fault)
    monkeypatch.setenv("HOST_CANN_FAULT", fault)
    oracle.connect(host_cann.library("opapi"))
    with pytest.raises(AssertionError, match=r": \d"):  # "dq: 1.2e-01"
        if case:
            check(npu, next(x for x in PACKED if x.name == case), torch.float32)
        else:
            test_gradients_of_parts_of_the_keys_with_the_statistics_of_all_add_up(npu)
    monkeypatch.delenv("HOST_CANN_FAULT")
    oracle.connect(host_cann.library("opapi"))
    check(npu, UNEVEN, torch.float32)


# --- refusals


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_wrong_call_is_refused_with_the_reason(npu, wrong, calls):
    call = {name: to_npu(x) for name, x in arguments(wrong).items()}
    with pytest.raises((RuntimeError, IndexError), match=wrong.host or f"refused by the stand-in.*{wrong.says}"):
        npu.npu_fusion_attention_v2(**call)
    assert not calls


@pytest.mark.parametrize("layout", ["TND", "BNSD"])
def test_the_sound_call_is_accepted(npu, layout, calls):
    npu.npu_fusion_attention_v2(**{name: to_npu(x) for name, x in sound(layout).items()})
    assert [x.layout for x in calls] == [layout]


def test_statistics_that_no_forward_gives_are_refused(npu):
    _, leaves, dy, options = on_npu(UNEVEN, torch.float32)
    results = npu.npu_fusion_attention_v2(*leaves, 4, "TND", **options)
    empty = torch.full_like(results[1], -torch.inf)
    with pytest.raises(RuntimeError, match="softmax_max that is not finite"):
        gradient_v2(npu, leaves, dy, 4, results, options, softmax_max=empty)


ROPE = dict.fromkeys(("query_rope", "key_rope"), torch.zeros(32, 4, 8))


@pytest.mark.parametrize("more, says", [
    (ROPE, "aclnnFlashAttentionVarLenScoreV3 .* not in libopapi"),
    (dict(sink=torch.zeros(4)), "sink is not supported in this CANN version"),
], ids=["rope", "sink"])  # fmt: skip
def test_what_the_stand_in_does_not_have_is_refused_by_torch_npu(npu, more, says, calls):
    """As on a CANN without these operators."""
    call = {name: to_npu(x) for name, x in (sound("TND") | more).items()}
    with pytest.raises(RuntimeError, match=says):
        npu.npu_fusion_attention_v2(**call)
    assert not calls


def test_a_mask_on_the_cpu_is_refused(npu, calls):
    call = {name: to_npu(x) for name, x in sound("BNSD").items()}
    with pytest.raises(RuntimeError, match="atten_mask is on cpu"):
        npu.npu_fusion_attention_v2(**call, sparse_mode=1, atten_mask=torch.zeros(32, 32, dtype=torch.bool))
    assert not calls


def test_ring_update_of_a_head_size_that_is_no_multiple_of_64(npu):
    out, stats = torch.ones(6, 2, 32, device="npu"), torch.ones(6, 2, 8, device="npu")
    with pytest.raises(RuntimeError, match="multiples of 64"):
        npu.npu_ring_attention_update(
            out, stats, stats, out, stats, stats, actual_seq_qlen=torch.tensor([6], device="npu"), input_layout="TND"
        )
