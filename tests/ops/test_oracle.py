"""The oracle of the stand-in for CANN on its own: random packed calls against dense fp64, and what it refuses.

tests/npu/test_operators.py goes through torch_npu with every mode, type and kind of wrong call; test_cann_rules.py has a
call for each rule.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.host_cann import oracle
from tests.host_cann.oracle_cases import (
    Case,
    band,
    bottom_right,
    compare,
    compressed,
    everything,
    inputs_of,
    lse_of,
    reference,
    sound,
)
from tests.ops.test_dropout import splitmix


@pytest.fixture(autouse=True)
def calls():
    oracle.set_fault(None)
    oracle.calls.clear()
    yield oracle.calls
    oracle.set_fault(None)


LENGTH = st.integers(0, 12)


@st.composite
def cases(draw):
    """A call that the operator takes."""
    mode = draw(st.sampled_from([0, 3, 4]))
    sizes = [(q, q + more) for q, more in draw(st.lists(st.tuples(LENGTH, LENGTH), min_size=1, max_size=5))]
    if mode == 0:  # the only one that also takes more queries than keys
        sizes = [(q, max(k - draw(LENGTH), min(q, 1))) for q, k in sizes]
    sizes = sizes if all(map(sum, zip(*sizes, strict=True))) else [*sizes, (3, 5)]
    options, sees = dict(sparse_mode=mode), bottom_right if mode else everything
    if mode == 4:
        pre = draw(st.integers(0, 9))
        following = draw(st.integers(0 if pre else 1, 4))  # the gradient refuses a band of one key
        sees, options = band(pre, following), options | dict(pre_tokens=pre, next_tokens=following)
    slopes = mode in (0, 3) and all(q for q, _ in sizes) and draw(st.booleans())
    if slopes:
        sizes, starts = [(q, q) for q, _ in sizes], [draw(st.integers(0, 50)) for _ in range(2)]
        options |= dict(pse_type=2, q_start_idx=starts[:1], kv_start_idx=starts[1:])
    kv, group = draw(st.sampled_from([(1, 1), (1, 3), (2, 2), (3, 1)]))
    if draw(st.booleans()):
        options["keep_prob"] = draw(st.sampled_from([0.5, 0.9]))
    mask = "upper" if mode else "none"
    return Case(
        "random", tuple(sizes), sees, mask=mask, slopes=slopes, heads=(kv * group, kv), dims=(8, 4), options=options
    )


@settings(max_examples=120, deadline=None)
@given(cases())
def test_random_calls_agree_with_fp64(case):
    inputs = inputs_of(case, torch.float32)
    options, bits = inputs.options, None
    if "keep_prob" in options:
        numels = oracle.dropout_numels(case.heads[0], case.sizes)
        bits = oracle.dropout_bits(1, 2, numels, 1 - options["keep_prob"])
        options = options | {"drop_mask": bits}
    q, k, v, dy = inputs.tensors
    out, largest, total = oracle.fused_attention(q, k, v, case.heads[0], "TND", scale=inputs.scale, **options)
    given_ = dict(softmax_max=largest, softmax_sum=total, attention_in=out, scale_value=inputs.scale)
    grads = oracle.fused_attention_grad(q, k, v, dy, case.heads[0], "TND", **given_, **options)
    got = dict(zip(("dq", "dk", "dv"), grads, strict=True), out=out, lse=lse_of(largest, total))
    compare(got, reference(case, inputs, bits), torch.float32)


def test_ring_update_rounds_at_every_call():
    o = torch.full((3, 1, 64), 1.0, dtype=torch.bfloat16)
    other = torch.full((3, 1, 64), 1.01, dtype=torch.bfloat16)  # 1.0078125
    m, x = torch.zeros(1, 1, 3, 8), torch.ones(1, 1, 3, 8)
    out = oracle.ring_attention_update(o, m, x, other, m, x)[0]
    assert out.dtype == torch.bfloat16 and (out == 1.0).all()  # 1.00390625 is no bf16


def test_dropout_bits_are_splitmix64_of_seed_and_offset():
    seed, offset, count, drop = 2**63 - 5, 12, 300, 0.3
    bits = oracle.dropout_bits(seed, offset, count, drop)
    assert bits.dtype == torch.uint8 and bits.numel() == 48
    start = splitmix(splitmix(seed, 0) ^ offset, 0)
    for i in range(48 * 8):
        want = i < count and (splitmix(start, i) >> 40) / 2**24 >= drop
        assert bool(bits[i // 8] >> (i % 8) & 1) == want, i


def test_shapes_alone_are_checked_and_recorded():
    """A million tokens, without memory for them."""
    t = 1_000_000
    q, k = torch.empty(t, 4, 128, device="meta"), torch.empty(t, 2, 128, device="meta")
    ends = dict(actual_seq_qlen=[t], actual_seq_kvlen=[t])
    out, largest, _ = oracle.fused_attention(q, k, k, 4, "TND", sparse_mode=3, atten_mask=compressed(), **ends)
    assert out.shape == (t, 4, 128) and largest.shape == (t, 4, 8) and out.is_meta
    with pytest.raises(oracle.Refused, match="1000000"):
        more = torch.empty(t + 1, 2, 128, device="meta")
        oracle.fused_attention(more, more, more, 2, "TND", actual_seq_qlen=[t + 1], actual_seq_kvlen=[t + 1])
    assert [x.mask_bytes for x in oracle.calls] == [2048**2]


STATISTICS = dict(
    softmax_max=torch.zeros(32, 4, 8), softmax_sum=torch.ones(32, 4, 8), attention_in=torch.zeros(32, 4, 32)
)


def gradient(**change):
    call = sound("TND") | STATISTICS | dict(dy=torch.ones(32, 4, 32)) | change
    return oracle.fused_attention_grad(**call)


UNEQUAL = torch.ones(32, 4, 8).index_fill(2, torch.tensor([3]), 2.0)


@pytest.mark.parametrize("change, says", [
    (dict(softmax_max=torch.full((32, 4, 8), -torch.inf)), "softmax_max that is not finite"),
    (dict(softmax_sum=torch.zeros(32, 4, 8)), "softmax_sum must be positive"),
    (dict(softmax_sum=UNEQUAL), "each value 8 times"),
])  # fmt: skip
def test_statistics_that_no_forward_gives_are_refused(change, says, calls):
    gradient()
    with pytest.raises(oracle.Refused, match=says):
        gradient(**change)
    assert [x.operator for x in calls] == ["fused_attention_grad"]


BITS = oracle.dropout_bits(1, 2, oracle.dropout_numels(4, [(20, 20), (12, 12)]), 0.5)


@pytest.mark.parametrize("change, says", [
    (dict(keep_prob=0.5), "needs the dropout mask"),
    (dict(keep_prob=0.5, drop_mask=BITS[:-1]), "one bit for each weight"),
    (dict(keep_prob=0.5, drop_mask=BITS.bool()), "must be uint8"),
    (dict(drop_mask=BITS), "not modelled: a dropout mask with keep_prob 1"),
])  # fmt: skip
def test_dropout_needs_its_bits(change, says):
    with pytest.raises(oracle.Refused, match=says):
        oracle.fused_attention(**sound("TND") | change)
    assert oracle.fused_attention(**sound("TND") | dict(keep_prob=0.5, drop_mask=BITS))[0].isfinite().all()
