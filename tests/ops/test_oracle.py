"""The oracle of the stand-in for CANN, on its own: against dense fp64 attention, and against the operator's rules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.host_cann import oracle
from tests.host_cann.oracle_cases import (
    MODES,
    PACKED,
    SQUARE,
    Case,
    bias_gradient,
    bottom_right,
    compare,
    compressed,
    everything,
    inputs_of,
    lse_of,
    reference,
)
from tests.ops.test_dropout import splitmix

LAYOUTS = ("BSH", "SBH", "BSND", "BNSD")
DENSE = [replace(case, name=f"{layout}, {case.name}", layout=layout) for layout in LAYOUTS for case in MODES]
TYPES = (torch.float32, torch.float16, torch.bfloat16)
FLT_MAX = torch.finfo(torch.float32).max


@pytest.fixture(autouse=True)
def sound():
    """No fault is left behind, and calls are of one test."""
    oracle.set_fault(None)
    oracle.calls.clear()
    yield
    oracle.set_fault(None)


def dropped(case, options, seed=3, offset=12):
    """The options with a dropout mask, where the case drops; and its bits."""
    keep = options.get("keep_prob", 1.0)
    if keep == 1:
        return options, None
    bits = oracle.dropout_bits(seed, offset, oracle.dropout_numels(case.heads[0], case.sizes), 1 - keep)
    return options | {"drop_mask": bits}, bits


def results(case, inputs, options):
    """Forward, and the gradient with the forward's own output and statistics."""
    q, k, v, dy = inputs.tensors
    out, largest, total = oracle.fused_attention(q, k, v, case.heads[0], case.layout, scale=inputs.scale, **options)
    given = dict(softmax_max=largest, softmax_sum=total, attention_in=out, scale_value=inputs.scale)
    grads = oracle.fused_attention_grad(q, k, v, dy, case.heads[0], case.layout, **given, **options)
    return dict(zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True), lse=lse_of(largest, total))


def check(case, dtype=torch.float32):
    inputs = inputs_of(case, dtype)
    options, bits = dropped(case, inputs.options)
    got = results(case, inputs, options)
    assert all(got[name].dtype == dtype for name in ("out", "dq", "dk", "dv"))
    compare(got, reference(case, inputs, bits), dtype)


@pytest.mark.parametrize("case", PACKED, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_packed(case, dtype):
    check(case, dtype)


@pytest.mark.parametrize("case", DENSE, ids=str)
def test_equal_lengths(case):
    check(case)


def test_it_does_not_import_torch_npu():
    for path in Path(oracle.__file__).parent.glob("oracle*.py"):
        assert "import torch_npu" not in path.read_text(), path.name


def test_statistics_in_tnd_order():
    """softmax_layout "TND" is the transpose, sequence by sequence, of what is the default."""
    case = PACKED[7]
    inputs = inputs_of(case, torch.float32)
    q, k, v, _ = inputs.tensors
    plain = oracle.fused_attention(q, k, v, 4, "TND", **inputs.options)
    tnd = oracle.fused_attention(q, k, v, 4, "TND", softmax_layout="TND", **inputs.options)
    assert torch.equal(plain[0], tnd[0])
    first = 0
    for sq, _ in case.sizes:
        block = plain[1].flatten()[first * 32 : (first + sq) * 32].view(4, sq, 8)
        assert torch.equal(tnd[1][first : first + sq], block.transpose(0, 1))
        first += sq


def test_a_row_that_sees_nothing_has_the_statistics_of_nothing():
    case = next(x for x in DENSE if "rows that see nothing" in x.name and x.layout == "BNSD")
    inputs = inputs_of(case, torch.float32)
    out, largest, total = oracle.fused_attention(*inputs.tensors[:3], 4, "BNSD", **inputs.options)
    assert not out[:, :, :4].any() and (largest[:, :, :4] == -FLT_MAX).all() and (total[:, :, :4] == FLT_MAX).all()
    assert (total[:, :, 4:] < 100).all()


BIASED = [
    Case(f"{pse}, type {kind}", ((6, 9),) * 2, everything, layout="BNSD", pse=pse, options=dict(pse_type=kind))
    for pse in ("each", "shared", "row") for kind in (0, 1)
]  # fmt: skip


@pytest.mark.parametrize("case", BIASED, ids=str)
def test_the_gradient_of_an_external_bias(case):
    inputs = inputs_of(case, torch.float32)
    q, k, v, dy = inputs.tensors
    out, largest, total = oracle.fused_attention(q, k, v, 4, "BNSD", scale=inputs.scale, **inputs.options)
    given = dict(softmax_max=largest, softmax_sum=total, attention_in=out, scale_value=inputs.scale)
    dpse = oracle.gradients(q, k, v, dy, 4, "BNSD", **given, **inputs.options)[3]
    compare({"dpse": dpse}, {"dpse": bias_gradient(case, inputs)}, torch.float32)


def split_keys(q, k, v, half, **options):
    """Attention over the first keys and over the others, and lse of each, [T, N]."""
    parts = []
    for rows in (slice(0, half), slice(half, None)):
        ends = dict(actual_seq_qlen=[len(q)], actual_seq_kvlen=[len(k[rows])])
        parts.append((rows, ends, oracle.fused_attention(q, k[rows], v[rows], 4, "TND", **ends, **options)))
    return parts


def test_gradients_of_parts_with_the_statistics_of_the_whole_add_up():
    """As a ring does it; with (max = lse, sum = 1) in place of (max, sum)."""
    case = Case("whole", ((24, 30),), everything, dims=(64, 64))
    inputs = inputs_of(case, torch.float32)
    want = reference(case, inputs)
    q, k, v, dy = inputs.tensors
    parts = split_keys(q, k, v, 11, scale=inputs.scale)
    ends = torch.tensor([0, 24])
    merged = oracle.ring_attention_update(*parts[0][2], *parts[1][2], actual_seq_qlen=ends, input_layout="TND")
    lse = merged[1] + merged[2].log()
    given = dict(softmax_max=lse, softmax_sum=torch.ones_like(lse), attention_in=merged[0], scale_value=inputs.scale)
    got = [oracle.fused_attention_grad(q, k[rows], v[rows], dy, 4, "TND", **given, **e) for rows, e, _ in parts]
    dk, dv = (torch.cat([got[0][x], got[1][x]]) for x in (1, 2))
    actual = dict(out=merged[0], dq=got[0][0] + got[1][0], dk=dk, dv=dv, lse=lse_of(merged[1], merged[2]))
    compare(actual, want, torch.float32)


@pytest.mark.parametrize("order", ["", "TND"])
def test_ring_update_of_packed_rows(order):
    sizes = ((5, 6), (17, 8), (10, 20))
    case = Case("packed", sizes, everything, heads=(2, 2), dims=(64, 64))
    inputs = inputs_of(case, torch.float32)
    q, k, v, _ = inputs.tensors
    ends = dict(actual_seq_qlen=[5, 22, 32], softmax_layout=order, scale=inputs.scale)
    cut = [(0, 2), (2, 6), (6, 9), (9, 14), (14, 20), (20, 34)]  # keys of each sequence in two
    parts = []
    for half in (cut[::2], cut[1::2]):
        rows = torch.cat([torch.arange(a, b) for a, b in half])
        counts = torch.tensor([b - a for a, b in half]).cumsum(0).tolist()
        parts.append(oracle.fused_attention(q, k[rows], v[rows], 2, "TND", actual_seq_kvlen=counts, **ends))
    named = dict(actual_seq_qlen=torch.tensor([0, 5, 22, 32]), input_layout="TND", input_softmax_layout=order)
    out, largest, total = oracle.ring_attention_update(*parts[0], *parts[1], **named)
    whole = oracle.fused_attention(q, k, v, 2, "TND", actual_seq_kvlen=[6, 14, 34], **ends)
    torch.testing.assert_close(out, whole[0], atol=1e-5, rtol=0)
    assert (lse_of(largest, total) - lse_of(*whole[1:])).abs().max() < 1e-5


def test_ring_update_rounds_at_every_call():
    o = torch.full((3, 1, 64), 1.0, dtype=torch.bfloat16)
    other = torch.full((3, 1, 64), 1.01, dtype=torch.bfloat16)  # 1.0078125
    m, x = torch.zeros(1, 1, 3, 8), torch.ones(1, 1, 3, 8)
    out = oracle.ring_attention_update(o, m, x, other, m, x)[0]
    assert out.dtype == torch.bfloat16 and (out == 1.0).all()  # 1.00390625 is no bf16


def test_dropout_bits_are_what_the_docstring_says():
    seed, offset, count, drop = 2**63 - 5, 12, 300, 0.3
    bits = oracle.dropout_bits(seed, offset, count, drop)
    assert bits.dtype == torch.uint8 and bits.numel() == 48
    start = splitmix(splitmix(seed, 0) ^ offset, 0)
    for i in range(48 * 8):
        want = i < count and (splitmix(start, i) >> 40) / 2**24 >= drop
        assert bool(bits[i // 8] >> (i % 8) & 1) == want, i


@pytest.mark.parametrize("seed, offset", [(0, 0), (0, 12), (5, 0)])
def test_the_share_that_is_kept(seed, offset):
    bits = oracle.dropout_bits(seed, offset, 2**18, 0.1)
    share = sum(((bits >> b) & 1).sum().item() for b in range(8)) / 2**18
    assert abs(share - 0.9) < 5 * (0.09 / 2**18) ** 0.5
    other = oracle.dropout_bits(seed, offset + 1, 2**18, 0.1)
    same = sum((1 - ((bits ^ other) >> b & 1)).sum().item() for b in range(8)) / 2**18
    assert abs(same - 0.82) < 5 * (0.82 * 0.18 / 2**18) ** 0.5


def test_a_call_is_recorded():
    case = Case("one", SQUARE, bottom_right, mask="upper", pse="slopes", options=dict(sparse_mode=3, pse_type=2, q_start_idx=[7], kv_start_idx=[2]))  # fmt: skip
    inputs = inputs_of(case, torch.bfloat16)
    results(case, inputs, inputs.options)
    first, second = oracle.calls
    assert (first.operator, second.operator) == ("fused_attention", "fused_attention_grad")
    assert first.layout == "TND" and first.sparse_mode == 3 and first.pse_type == 2 and first.sizes == SQUARE
    assert first.dtype == torch.bfloat16 and first.starts == (7, 2) and first.mask_bytes == 2048**2
    assert first.pse_bytes == 4 * 4 and first.drop_bytes == 0 and first.shapes["key"] == (31, 2, 16)
    assert second.shapes["dy"] == (31, 4, 8)


def test_shapes_alone_are_checked_and_recorded():
    """A million tokens, without memory for them."""
    t = 1_000_000
    q, k = torch.empty(t, 4, 128, device="meta"), torch.empty(t, 2, 128, device="meta")
    ends = dict(actual_seq_qlen=[t], actual_seq_kvlen=[t])
    out, largest, _ = oracle.fused_attention(q, k, k, 4, "TND", sparse_mode=3, atten_mask=compressed(2048), **ends)
    assert out.shape == (t, 4, 128) and largest.shape == (t, 4, 8) and out.is_meta
    with pytest.raises(oracle.Refused, match="1000000"):
        more = torch.empty(t + 1, 2, 128, device="meta")
        oracle.fused_attention(more, more, more, 2, "TND", actual_seq_qlen=[t + 1], actual_seq_kvlen=[t + 1])
    mask = torch.empty(t, t, dtype=torch.bool, device="meta")
    oracle.fused_attention(q, k, k, 4, "TND", sparse_mode=1, atten_mask=mask, **ends)
    assert [x.mask_bytes for x in oracle.calls] == [2048**2, t * t]


CAUSAL, FAR, ALIBI, DROPOUT, GIVEN, PARTS, UPDATE = (
    "mode 3", "mode 3, past 512 columns", "slopes, no mask, keys before", "dropout, mode 3", "mode 1", "parts of a whole",
    "ring update",
)  # fmt: skip
SPOILED = {
    "mask ignored past 512 columns": {FAR},
    "statistics in TND order": {CAUSAL, ALIBI, DROPOUT, GIVEN, PARTS},
    "kv_start_idx ignored": {ALIBI},
    "gradient ignores given statistics": {PARTS},
    "sparse_mode 3 from the top left": {CAUSAL, FAR, DROPOUT},
    "key heads interleaved": {CAUSAL, ALIBI, DROPOUT, GIVEN, PARTS},
    "dropout without 1/keep_prob": {DROPOUT},
    "gradient drops other weights": {DROPOUT},
    "sparse_mode 1 as causal": {GIVEN},
    "ring update without maxima": {UPDATE, PARTS},
    "ring update keeps the first output": {UPDATE, PARTS},
}


def spoiled():
    """Names of the checks above that fail now."""
    checks = {x.name: lambda x=x: check(x) for x in PACKED if x.name in (CAUSAL, FAR, ALIBI, DROPOUT, GIVEN)}
    checks[PARTS] = test_gradients_of_parts_with_the_statistics_of_the_whole_add_up
    checks[UPDATE] = lambda: test_ring_update_of_packed_rows("TND")
    failed = set()
    for name, run in checks.items():
        try:
            run()
        except AssertionError:
            failed.add(name)
    return failed


def test_faults_are_what_the_table_says():
    assert set(SPOILED) == set(oracle.FAULTS)


@pytest.mark.parametrize("fault", SPOILED)
def test_a_fault_shows_where_it_must_and_nowhere_else(fault):
    assert not spoiled()
    oracle.set_fault(fault)
    assert spoiled() == SPOILED[fault]
    oracle.set_fault(None)
    assert not spoiled()


def test_an_unknown_fault_names_the_known_ones():
    with pytest.raises(ValueError, match="kv_start_idx ignored"):
        oracle.set_fault("sleepy")
