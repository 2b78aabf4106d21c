"""The npu backend on whole plans, all ranks in this process, against dense attention in fp64. The fused operators are
the stand-in's oracle, which refuses what Ascend's operators refuse: no device is in these tests."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.isolated_rank import IsolatedRank, attend_virtually
from mindspeed_cp import AttentionConfig, ConfigError, Documents
from mindspeed_cp.config import SuiteSettings
from mindspeed_cp.engine import attend_in_process
from mindspeed_cp.ops.attention.backends import BACKENDS, backend_for_device, backend_from_settings
from mindspeed_cp.ops.attention.contract import uniform_head_groups
from mindspeed_cp.ops.attention.lowering.device_call import on_device
from mindspeed_cp.ops.attention.lowering.fused_backend import LARGEST_SCORE
from mindspeed_cp.ops.attention.npu.backend import NpuAttention
from mindspeed_cp.ops.attention.npu.fused_operator import StatisticsOrder
from mindspeed_cp.ops.attention.operator import attention, attention_backward
from mindspeed_cp.ops.attention.reference import dense_packed_attention
from tests.engine.cases import Case
from tests.engine.draw import problem
from tests.host_cann import oracle
from tests.ops.npu_oracle import OracleOperator, kept_weights
from tests.ops.test_npu_lowering import numbers, sequences
from tests.ops.yardstick import tensors
from tools import capabilities

NAMES = ("out", "lse", "dq", "dk", "dv")
KEY = (1, 2)


def run(case: Case, backend: NpuAttention):
    """out, lse, dq, dk, dv of the whole batch, and the ranks."""
    made = attend_virtually(case.plan(), *case.inputs(), backend, KEY if case.dropout else None)
    return [made.out, made.lse, made.dq, made.dk, made.dv], made.ranks


def rank_of(case: Case, rank: int, backend: NpuAttention) -> IsolatedRank:
    return IsolatedRank(case.plan(), rank, backend, *case.inputs(), KEY if case.dropout else None)


def reference(case: Case, keep=None):
    """The same in fp64."""
    q, k, v, dout = (x.double() for x in case.inputs())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = dense_packed_attention(
        case.attention, *leaves, case.documents, kv_documents=case.kv_documents, keep=keep
    )
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)]


def compare(case: Case, backend: NpuAttention, limits, keep=None):
    results, ranks = run(case, backend)
    for name, got, want, limit in zip(NAMES, results, reference(case, keep), limits, strict=True):
        assert got.shape == want.shape, (name, case)
        if not want.numel():
            continue
        blind = torch.isinf(want)
        assert (torch.isinf(got) == blind).all(), (name, case)
        wrong = (got.double() - want).masked_fill(blind, 0)
        assert torch.isfinite(wrong).all(), (name, case)
        scale = max(1 / (1 - case.dropout), float(want.masked_fill(blind, 0).abs().max()))
        assert float(wrong.abs().max()) / scale <= limit, (name, float(wrong.abs().max()) / scale, case)
    return ranks


EXACT = [1e-5] * 5
HALF = (2**-6, 2**-6, 2**-4, 2**-4, 2**-6)

CELLS = [
    cell
    for cell in capabilities.all_cells()
    if cell.backend == "cpu" and cell.dropout == "none" and capabilities.unsupported(cell) is None
]


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(CELLS),
    st.sampled_from((1, 2, 3, 4, 5, 8)),
    st.sampled_from(("tnd", "masks")),
    st.sampled_from(("shared", "split")),
    st.sampled_from(("fp32", "ring_update", "triton")),
    st.sampled_from(("max_sum", "lse")),
    st.sampled_from(("copied", "skipped")),
    st.sampled_from(("input", "fp16", "fp32")),
    st.sampled_from((torch.float32, torch.float32, torch.bfloat16, torch.float16)),
    st.randoms(use_true_random=False),
)
def test_any_plan_agrees_with_fp64(cell, ranks, lowering, alibi, merge, statistics, key_gaps, precision, dtype, rng):
    case = replace(problem(cell, ranks, rng), dtype=dtype)
    lowering = "tnd" if case.alibi else lowering
    precision = "input" if precision == "fp16" and dtype != torch.bfloat16 else precision
    backend = NpuAttention(lowering, alibi, merge, statistics, key_gaps, precision, OracleOperator())
    compare(case, backend, EXACT if dtype == torch.float32 else HALF)


def kept_by(case: Case, ranks: list[IsolatedRank]) -> torch.Tensor:
    """Which weights were not dropped, bool [heads, queries, keys], from what every forward call kept."""
    keys = case.documents if case.kv_documents is None else case.kv_documents
    keep = torch.ones(case.heads, case.documents.tokens, keys.tokens, dtype=torch.bool)
    for rank in ranks:
        kept = {key: state for key, state in rank.state.saved.items() if key[0] != LARGEST_SCORE}
        for calls, k, _, rows, tokens in rank.slot_calls("forward"):
            token = torch.full((len(k),), -1)
            token[rows] = tokens
            for call in calls:
                q_token, k_token = rank.rows[numbers(call.q)], token[numbers(call.k)]
                n, m = np.diff([0, *call.actual_seq_qlen]).tolist(), np.diff([0, *call.actual_seq_kvlen]).tolist()
                for group in uniform_head_groups(case.attention, rank.heads):
                    heads = group.q.stop - group.q.start
                    used = kept.pop((call.content_key, group.q_range))
                    weights = kept_weights(heads, list(zip(n, m, strict=True)), used, 1 - case.dropout)
                    weights = [weight for weight in weights if weight.shape[1]]
                    for (a, c, seen), weight in zip(sequences(call), weights, strict=True):
                        i, j = (torch.from_numpy(x) for x in np.nonzero(seen))
                        keep[slice(*group.q_range), q_token[a + i], k_token[c + j]] = weight[:, i, j]
        assert not kept, "kept of calls that are not there"
    return keep


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(CELLS),
    st.sampled_from((1, 2, 3, 4)),
    st.sampled_from(("tnd", "masks")),
    st.sampled_from(("shared", "split")),
    st.randoms(use_true_random=False),
)
def test_the_backward_drops_what_the_forward_dropped(cell, ranks, lowering, alibi, rng):
    """The operator draws the dropped weights: what it kept of each call says which, and dense attention with them is the
    yardstick."""
    case = replace(problem(cell, ranks, rng), dropout=0.25)
    assume(not case.plan().parts)  # `kept_by` knows one numbering of tokens, and each part has its own
    backend = NpuAttention("tnd" if case.alibi else lowering, alibi, operator=OracleOperator())
    results, made = run(case, backend)
    keep = kept_by(case, made)
    if keep.numel() > 20_000:
        assert 0.5 < float(keep.float().mean()) < 1
    for name, got, want in zip(NAMES, results, reference(case, keep), strict=True):
        if want.numel():
            blind = torch.isinf(want)
            wrong = (got.double() - want).masked_fill(blind, 0).abs().max()
            assert float(wrong) <= 2e-5 * max(4 / 3, float(want.masked_fill(blind, 0).abs().max())), (name, case)


def test_a_backward_call_without_its_forward_is_refused():
    case = Case((40, 9), 2, dropout=0.25)
    backend = NpuAttention(operator=OracleOperator())
    rank = rank_of(case, 0, backend)
    rank.forward()
    kept = [key for key in rank.state.saved if key[0] != LARGEST_SCORE]
    assert len(kept) == 3  # its own block, and the full tiles against the other rank
    rank.state.saved.clear()
    with pytest.raises(ConfigError, match="has a call that the forward did not have, so"):
        rank.backward(*(torch.zeros(49, 4, 16) for _ in "kv"))


def test_nothing_is_dropped_where_the_state_says_so():
    case = Case((64,), 2, dropout=0.5)
    backend = NpuAttention(operator=OracleOperator())
    rank = rank_of(case, 0, backend)
    rank.state = replace(rank.state, dropout=None)
    oracle.calls.clear()
    rank.forward()
    assert {key[0] for key in rank.state.saved} == {LARGEST_SCORE}
    assert all(call.drop_bytes == 0 for call in oracle.calls)


def test_the_largest_score_of_a_row_is_that_over_all_its_calls() -> None:
    case = Case((129, 3, 50), 3)
    for number in range(3):
        rank = rank_of(case, number, NpuAttention(operator=OracleOperator()))
        rank.forward()
        q, k, *_ = (x.double() for x in case.inputs())
        document = torch.repeat_interleave(torch.arange(3), torch.tensor(case.lengths))
        token = torch.arange(len(q))
        sees = (document[rank.rows, None] == document) & (token[rank.rows, None] >= token)
        k = k.repeat_interleave(case.heads // case.kv_heads, 1)
        scores = torch.einsum("ihd,jhd->ihj", q[rank.rows], k) * case.attention.softmax_scale
        largest = scores.masked_fill(~sees[:, None], -torch.inf).amax(-1)
        assert torch.allclose(rank.state.saved[LARGEST_SCORE, (0, case.heads)].double(), largest, atol=1e-5)


@pytest.mark.parametrize(("lowering", "alibi"), [("tnd", False), ("masks", False), ("tnd", True)])
@pytest.mark.parametrize(
    ("mask", "window"),
    [
        ("causal", None),
        ("causal", (0, 0)),
        ("causal", (6, 0)),
        ("full", None),
        ("full", (70, 30)),
        ("full", (-1, 3)),
        ("full", (0, 0)),
    ],
)
def test_sequences_by_cumulative_lengths(mask, window, alibi, lowering):
    """Through the operator: bottom right with more keys than queries, other lengths, sequences without rows or keys."""
    queries, keys = Documents([5, 37, 0, 9, 60, 3]), Documents([5, 60, 4, 30, 160, 0])
    shape = (6, 2, 16, 24)
    q, k, v, dout = tensors(queries.tokens, keys.tokens, shape, torch.float32)
    how = dict(mask=mask, window=window, alibi=alibi, backend=NpuAttention(lowering, operator=OracleOperator()))
    out, lse = attention(q, k, v, queries.offsets, keys.offsets, **how)
    grads = attention_backward(dout, q, k, v, out, lse, queries.offsets, keys.offsets, **how)
    config = AttentionConfig(*shape, mask=mask, window=window, alibi=alibi)
    del how["backend"]
    expected = attention(q, k, v, queries.offsets, keys.offsets, **how, backend="cpu")
    expected += attention_backward(dout, q, k, v, *expected, queries.offsets, keys.offsets, **how, backend="cpu")
    for got, want in zip((out, lse, *grads), expected, strict=True):
        blind = torch.isinf(want)
        assert (torch.isinf(got) == blind).all()
        largest = float(want.masked_fill(blind, 0).abs().max())
        assert float((got - want).masked_fill(blind, 0).abs().max()) <= 2e-5 * max(1, largest), config


@pytest.mark.parametrize("alibi", [False, True])
def test_a_window_of_one_key_has_masks(alibi):
    """The gradient of a band with pre_tokens + next_tokens = 0 is refused in TND; an ALiBi of distance 0 is none."""
    case = Case((37, 0, 60, 1, 25), 4, heads=6, kv_heads=2, mask="full", window=(0, 0), alibi=alibi)
    oracle.calls.clear()
    compare(case, NpuAttention(operator=OracleOperator()), EXACT)
    assert {(call.layout, call.pse_type, call.pse_bytes) for call in oracle.calls} == {("BSND", 1, 0)}


def test_shared_and_split_alibi_are_the_same_in_fewer_calls():
    case = Case((700,), 4, heads=8, kv_heads=2, alibi=True)
    results, made = [], []
    for alibi in ("shared", "split"):
        oracle.calls.clear()
        results.append(run(case, NpuAttention(alibi=alibi, operator=OracleOperator()))[0])
        made.append(sum(call.operator == "fused_attention" for call in oracle.calls))
        assert all(call.pse_type == 2 and call.pse_bytes == 8 * 4 for call in oracle.calls)
        assert all(call.mask_bytes in (0, 2048 * 2048) for call in oracle.calls)
    assert made[0] == 3 * (2 + 3) + (1 + 3) and made[1] > 3 * (3 + 6)
    for shared, split in zip(*results, strict=True):
        assert float((shared - split).abs().max()) <= 5e-6 * max(1, float(split.abs().max()))


def test_masks_are_of_one_step_only():
    case = Case((100, 60, 40), 4)
    oracle.calls.clear()
    run(case, NpuAttention("masks", operator=OracleOperator()))
    assert {call.layout for call in oracle.calls} == {"BSND"}
    assert 0 < max(call.mask_bytes for call in oracle.calls) <= (200 // 4 + 3) ** 2


def test_the_vendors_merge_is_called_and_keeps_fp32():
    case = Case((300,), 3, dtype=torch.bfloat16)
    operator = OracleOperator()
    oracle.calls.clear()
    compare(case, NpuAttention(merge="ring_update", operator=operator), HALF)
    updates = [call for call in oracle.calls if call.operator == "ring_attention_update"]
    assert len(updates) == operator.updates == 3 * 2
    assert {call.prev[0].dtype for call in updates} == {"float32"}


def test_the_kernel_that_merges_is_used_and_must_be_there(monkeypatch):
    from mindspeed_cp.ops.attention.npu import backend as npu

    called = []
    merge = npu.merge_parts
    monkeypatch.setattr(npu, "merge_parts", lambda *given: called.append(given) or merge(*given))
    backend = NpuAttention(merge="triton", operator=OracleOperator())
    compare(Case((300, 41), 3), backend, EXACT)
    assert called and all(len(parts) == 1 and total[0].dtype == torch.float32 for total, parts, *_ in called)
    monkeypatch.setattr(npu, "has_triton", lambda: False)
    backend.check_device(torch.device("cpu"))
    with pytest.raises(ConfigError, match="npu_merge is 'triton', and the package triton-ascend is not installed"):
        backend.check_device(torch.device("meta"))


def test_rows_and_masks_are_made_once_for_all_layers():
    case = Case((90, 40), 2, window=(20, 0), alibi=True)
    backend = NpuAttention(operator=OracleOperator())
    rank = rank_of(case, 1, backend)
    for calls, k, v, _, _ in rank.slot_calls("forward"):
        backend.forward(calls, case.attention, rank.state, k, v)
        before = [dict(call.device_cache) for call in calls]
        backend.forward(calls, case.attention, rank.state, k, v)
        assert [call.device_cache for call in calls] == before and all(before)
        assert all(on_device(call, k.device) is on_device(call, torch.device("cpu")) for call in calls)


@pytest.mark.parametrize("lengths", [[5], [3, 3, 3], [4, 0, 1, 1], list(range(1, 30)), [7, 1] * 9])
@pytest.mark.parametrize("heads", [1, 3])
def test_statistics_come_and_go_in_the_order_of_sequences(lengths, heads):
    ends = np.cumsum(lengths)
    rows = torch.arange(int(ends[-1]) * heads, dtype=torch.float32).view(-1, heads)
    blocks = [rows[e - n : e].T.flatten() for n, e in zip(lengths, ends.tolist(), strict=True)]
    memory = torch.cat(blocks)[:, None].expand(-1, 8).reshape(int(ends[-1]), heads, 8).contiguous()
    order = StatisticsOrder(ends.tolist(), heads, torch.device("cpu"))
    assert torch.equal(order.to_rows(memory), rows)
    assert torch.equal(order.from_rows(rows), memory)


@pytest.mark.parametrize(
    ("options", "settings", "dtype", "message"),
    [
        ({}, {}, torch.float64, "dtype is torch.float64; the npu backend supports bfloat16, float16, float32"),
        ({}, dict(heads=512), torch.float32, "attention.heads is 512; valid for the npu backend: 256 on a"),
        ({}, dict(head_dim=1024), torch.float32, "attention.head_dim is 1024; valid for the npu backend: 1 to 768"),
        ({}, dict(head_dim_v=800), torch.float32, "attention.head_dim_v is 800; valid for the npu backend: 1 to 768"),
        (dict(lowering="masks"), dict(alibi=True), torch.float32, "attention.alibi is on and npu.lowering is 'masks'"),
        (
            dict(precision="fp16"),
            {},
            torch.float32,
            "npu_precision is 'fp16', .* is in float32; valid: 'input', 'fp32'",
        ),
        (
            {},
            dict(alibi=(0.5, -0.25, 0.0, 1.0)),
            torch.float32,
            "has the slope -0.25; valid for the npu backend: 0 and",
        ),
    ],
)
def test_what_the_operator_does_not_compute_is_refused(options, settings, dtype, message):
    attention = AttentionConfig(**({"heads": 4, "head_dim": 64} | settings))
    with pytest.raises(ConfigError, match=message):
        NpuAttention(**options).check(attention, dtype)


@pytest.mark.parametrize("option", ["lowering", "alibi", "merge", "statistics", "key_gaps", "precision"])
def test_options_have_their_values(option):
    with pytest.raises(ConfigError, match=rf"npu\.{option} is 'fast'; valid: "):
        NpuAttention(**{option: "fast"})
    others = {
        "lowering": "masks",
        "alibi": "shared",
        "merge": "triton",
        "statistics": "lse",
        "key_gaps": "skipped",
        "precision": "fp32",
    }
    assert NpuAttention(**{option: others[option]}).key != NpuAttention().key


def test_every_option_of_the_settings_is_one_of_the_backend():
    values = {"alibi": "shared", "statistics": "lse", "key_gaps": "skipped", "precision": "fp32"}
    suite = SuiteSettings(**{f"npu_{name}": value for name, value in values.items()}, backend="npu")
    chosen = backend_from_settings(suite, "npu", AttentionConfig(2), torch.float32)
    assert chosen == NpuAttention(**values)
    default = backend_from_settings(SuiteSettings(backend="npu"), "npu", AttentionConfig(2), torch.bfloat16)
    assert default == NpuAttention()


def test_backends_are_named_or_given():
    given = NpuAttention(lowering="masks", operator=OracleOperator())
    assert backend_for_device("npu") is backend_for_device("npu", "npu") is BACKENDS["npu"]
    assert backend_for_device("cpu", given) is given and backend_for_device(
        "npu", NpuAttention("masks")
    ) == NpuAttention("masks")
    with pytest.raises(ConfigError, match="backend 'npu' does not run on tensors of device 'cpu'"):
        backend_for_device("cpu", NpuAttention("masks"))
    with pytest.raises(ConfigError, match="backend 'npu' does not run on tensors of device 'cpu'"):
        backend_for_device("cpu", "npu")


def test_torch_npu_is_imported_when_it_computes_and_named_where_it_is_missing():
    code = """
import importlib.util, sys, mindspeed_cp.ops.attention as ops
assert "torch_npu" not in sys.modules
from mindspeed_cp.ops.attention.npu.fused_operator import TorchNpuOperator
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "torch_npu" else find(name, *more)
try:
    TorchNpuOperator().update((None, None, None), ())
except ops.backends.ConfigError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert (
        said.startswith("backend is 'npu': torch_npu is not installed; pip install torch-npu==")
        and "or backend" in said
    )


@pytest.mark.parametrize("statistics", ["max_sum", "lse"])
@pytest.mark.parametrize("case", [Case((129, 3, 50), 3), Case((129, 3, 50), 3, alibi=True)], ids=["plain", "ALiBi"])
def test_a_sink_far_above_all_scores_has_exact_gradients(case: Case, statistics: str) -> None:
    """exp(sink - largest score) is beyond fp32 in two heads; their gradients are 0 but for that of the values."""
    sink = torch.tensor([100.0, 4.0, 400.0, 60.0])
    q, k, v, dout = case.inputs()
    backend = NpuAttention(statistics=statistics, operator=OracleOperator())
    made = attend_in_process(case.plan(), q, k, v, dout, backend=backend, sink=sink)
    leaves = [x.double().requires_grad_() for x in (q, k, v, sink)]
    out, _ = dense_packed_attention(case.attention, *leaves[:3], case.documents, sink=leaves[3])
    exact = torch.autograd.grad(out, leaves, dout.double())
    for name, got, wanted in zip(
        ("dq", "dk", "dv", "dsink"), (made.dq, made.dk, made.dv, made.dsink), exact, strict=True
    ):
        assert got is not None and torch.allclose(got.double(), wanted, rtol=1e-4, atol=1e-5), name
