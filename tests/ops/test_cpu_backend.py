"""The cpu backend on the tiles of a rank: some heads, keys in several steps and slots, every way of cutting."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.isolated_rank import NanOutput
from mindspeed_cp import AttentionConfig, Documents
from mindspeed_cp.engine.rank_context import stores_all_rows
from mindspeed_cp.layout import TOKEN_SPAN
from mindspeed_cp.ops.attention.accumulators import GradientAccumulator
from mindspeed_cp.ops.attention.backends import get_backend
from mindspeed_cp.ops.attention.contract import (
    AttentionBackend,
    BackwardState,
    ForwardState,
    Heads,
    uniform_head_groups,
)
from mindspeed_cp.ops.attention.cpu.kernels import CACHED_REACH
from mindspeed_cp.ops.attention.cpu.lowering import lower_to_kernel_calls
from mindspeed_cp.ops.attention.reference import dense_attention
from mindspeed_cp.plan import FULL, TILE
from mindspeed_cp.plan.tiles import tiles_between
from tests.ops.test_cpu_lowering import strips_of
from tests.ops.yardstick import LIMITS, compare, reference, tensors

CPU = get_backend("cpu")
KEY = (5, 2)


def run(attention, tiles, heads, q, k, v, dout, slots, strip_rows=64, key=KEY):
    """out, lse and gradients of a rank that holds all queries and these heads, from the slots of each step.

    Args:
        slots: (step, slot) -> rows of k and v there.
        strip_rows: of small tiles that are cut.
    """

    with strips_of(strip_rows):
        lowered = lower_to_kernel_calls(tiles, attention)
    key = key if attention.dropout else None
    q_heads, theirs = (slice(*x) for x in (heads.q, heads.kv))
    q, dout, k, v = q[:, q_heads], dout[:, q_heads], k[:, theirs], v[:, theirs]
    output = NanOutput(q, v.shape[2], stores_all_rows(tiles, len(q)))  # what is stored first needs no zeros
    state = ForwardState(q, output, heads, key)
    for place, calls in lowered.items():
        CPU.forward(calls, attention, state, k[slots[place]], v[slots[place]])
    dq, dk, dv = (GradientAccumulator(x) for x in (q, k, v))
    back = BackwardState(q, *output.result(q.dtype), dout, dq, heads, key)
    for place, calls in lowered.items():
        parts = [GradientAccumulator(x[slots[place]]) for x in (k, v)]
        CPU.backward(calls, attention, back, k[slots[place]], v[slots[place]], *parts)
        for total, part in zip((dk, dv), parts, strict=True):
            total.add(slots[place], part.fp32())
    return [*output.result(torch.float32), *(total.fp32() for total in (dq, dk, dv))]


def whole_documents(documents):
    out = np.zeros(len(documents), TOKEN_SPAN)
    out["doc"], out["start"], out["stop"] = np.arange(len(documents)), documents.offsets[:-1], documents.offsets[1:]
    return out[documents.lengths > 0]


def in_steps(attention, queries, keys, borders):
    """All queries against keys cut at `borders`, one slot after the other, two slots a step."""
    tiles, slots = [], {}
    for i, (a, b) in enumerate(zip([0, *borders], [*borders, keys.tokens], strict=True)):
        spans = whole_documents(keys)
        spans["start"], spans["stop"] = (np.clip(spans[name], a, b) for name in ("start", "stop"))
        part = tiles_between(whole_documents(queries), spans[spans["stop"] > spans["start"]], queries, attention, keys)
        part["step"], part["slot"] = i // 2, i % 2
        slots[i // 2, i % 2] = slice(a, b)
        tiles.append(part)
    return np.concatenate(tiles), slots


ATTENTIONS = [
    dict(), dict(mask="full"), dict(alibi=True), dict(mask="full", alibi=True), dict(window=(20, 0)), dict(mask="full", window=(11, 30)), dict(window=(50, 0), alibi=True),
    dict(mask="full", window=(11, 30), alibi=True), dict(dropout=0.3), dict(mask="full", window=(30, 7), alibi=True, dropout=0.3),
]  # fmt: skip
SPLITS = {1: [Heads((0, 12), (0, 3))], 2: [Heads((0, 7), (0, 2)), Heads((7, 12), (1, 3))], 3: [Heads((0, 3), (0, 1)), Heads((3, 9), (0, 3)), Heads((9, 12), (2, 3))],
          5: [Heads((0, 0), (0, 1)), Heads((0, 2), (0, 1)), Heads((2, 6), (0, 2)), Heads((6, 7), (1, 2)), Heads((7, 12), (1, 3))]}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", SPLITS)
@pytest.mark.parametrize("settings", ATTENTIONS, ids=str)
def test_heads_that_do_not_divide(settings, ranks, dtype):
    """12 query heads over 3 kv heads; a rank may have none, and a kv head may be on several ranks, which share its
    gradient."""
    attention = AttentionConfig(12, 3, 16, 24, **settings)
    documents = Documents([70, 0, 9, 41])
    q, k, v, dout = tensors(120, 120, (12, 3, 16, 24), dtype)
    tiles, slots = in_steps(attention, documents, documents, [])
    want = reference(attention, q, k, v, dout, documents, dropout_key=KEY if attention.dropout else None)
    dk, dv = torch.zeros(k.shape), torch.zeros(v.shape)
    parts = []
    for heads in SPLITS[ranks]:
        out, lse, dq, some_dk, some_dv = run(attention, tiles, heads, q, k, v, dout, slots)
        parts.append((out.to(dtype), lse, dq))
        dk[:, slice(*heads.kv)] += some_dk
        dv[:, slice(*heads.kv)] += some_dv
    compare([*(torch.cat(x, 1) for x in zip(*parts, strict=True)), dk, dv], want, dtype)


@st.composite
def cases(draw):
    mask = draw(st.sampled_from(["causal", "full"]))
    window = draw(st.one_of(st.none(), st.tuples(st.integers(-1, 60), st.integers(-1, 60 if mask == "full" else 0))))
    alibi = draw(st.sampled_from([False, True, (0.9, 0.03, 0.4, 0.0)]))
    attention = AttentionConfig(
        4,
        2,
        8,
        12,
        mask=mask,
        window=window,
        alibi=alibi,
        dropout=draw(st.sampled_from([0.0, 0.0, 0.4])),
        first_head=0 if alibi is True else draw(st.integers(0, 3)),
    )
    queries = Documents(draw(st.lists(st.integers(0, 90), min_size=1, max_size=3)))
    keys = (
        queries
        if mask == "causal"
        else Documents(draw(st.lists(st.integers(0, 90), min_size=len(queries), max_size=len(queries))))
    )
    borders = sorted(draw(st.lists(st.integers(0, keys.tokens), max_size=4)))
    return attention, queries, keys, borders


@settings(max_examples=300, deadline=None)
@given(cases(), st.integers(1, 64), st.integers(0, 99))
def test_any_geometry_in_any_steps_and_strips_agrees_with_fp64(case, strip_rows, seed):
    attention, queries, keys, borders = case
    q, k, v, dout = tensors(queries.tokens, keys.tokens, (4, 2, 8, 12), torch.float32, seed)
    tiles, slots = in_steps(attention, queries, keys, borders)
    got = run(attention, tiles, Heads.all(attention), q, k, v, dout, slots, strip_rows)
    more = dict(kv_documents=keys, dropout_key=KEY if attention.dropout else None)
    compare(got, reference(attention, q, k, v, dout, queries, **more), torch.float32)


FLAT = (1e-5, 3e-6, 0.0, 1e-6)  # steep slopes would leave nothing of keys that are far away


@pytest.mark.parametrize("far", [0, 100, CACHED_REACH - 100, CACHED_REACH - 40, CACHED_REACH, 10**6])
@pytest.mark.parametrize(
    "settings", [dict(alibi=FLAT), dict(mask="full", alibi=FLAT), dict(window=(10**6 + 70, 0))], ids=str
)
def test_keys_far_away_lose_no_digit(settings, far):
    """In fp32, whatever the distance: also of keys that come after, and across the end of the table that is kept."""
    attention = AttentionConfig(4, 2, 8, 8, **settings)
    q, k, v, dout = tensors(60, 80, (4, 2, 8, 8), torch.float32)
    position_q, position_k = torch.arange(60) + 80 + far, torch.arange(80)
    if attention.mask == "full":
        position_q, position_k = position_k[:60], torch.arange(80) + 60 + far
    queries, keys = (np.array([(0, 0, int(x[0]), int(x[-1]) + 1)], TOKEN_SPAN) for x in (position_q, position_k))
    tiles = tiles_between(queries, keys, Documents([3 * 10**6]), attention)
    assert len(tiles)
    got = run(attention, tiles, Heads.all(attention), q, k, v, dout, {(0, 0): slice(0, 80)})
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    zeros = torch.zeros(60), torch.zeros(80)
    out, lse = dense_attention(
        *leaves, *zeros, position_q, position_k, mask=attention.mask, window=attention.window, slopes=attention.slopes
    )
    grads = torch.autograd.grad(out, leaves, dout.double())
    compare(got, [out.detach(), lse.detach(), *grads], torch.float32)


def test_rows_that_some_tiles_have_touched_and_others_not():
    """Tiles that overlap in part, on memory that was not cleared."""
    attention = AttentionConfig(2, 2, 8, mask="full")
    tiles = np.array([(0, 0, 5, 10, 0, 6, FULL, 0, 0, 0, 0), (0, 0, 0, 20, 6, 9, FULL, 0, 0, 0, 0)], TILE)
    q, k, v, dout = tensors(20, 15, (2, 2, 8, 8), torch.float32)
    out, lse, *_ = run(attention, tiles, Heads.all(attention), q, k, v, dout, {(0, 0): slice(0, 15)})
    scores = torch.einsum("qhd,khd->qhk", q.double(), k.double()) * 8**-0.5
    hidden = torch.zeros(20, 1, 15, dtype=torch.bool)
    hidden[:5, :, :6] = hidden[15:, :, :6] = True
    scores = scores.masked_fill(hidden, float("-inf"))
    assert torch.allclose(out.double(), torch.einsum("qhk,khd->qhd", scores.softmax(-1), v.double()), atol=1e-6)
    assert torch.allclose(lse.double(), scores.logsumexp(-1), atol=1e-6)


def test_without_a_key_nothing_is_dropped():
    """As while a model is evaluated: the same lowered calls, other kernels."""
    attention = AttentionConfig(4, 2, 8, 12, window=(30, 0), alibi=True, dropout=0.4)
    documents = Documents([130, 31])
    q, k, v, dout = tensors(161, 161, (4, 2, 8, 12), torch.float32)
    tiles, slots = in_steps(attention, documents, documents, [50])
    got = run(attention, tiles, Heads.all(attention), q, k, v, dout, slots, key=None)
    compare(got, reference(attention, q, k, v, dout, documents), torch.float32)


def test_what_is_dropped_depends_on_seed_layer_and_first_head_alone():
    attention = AttentionConfig(4, 2, 8, dropout=0.4)
    documents = Documents([300])
    q, k, v, dout = tensors(300, 300, (4, 2, 8, 8), torch.float32)
    tiles, slots = in_steps(attention, documents, documents, [])
    cut_tiles, cut_slots = in_steps(attention, documents, documents, [33, 150, 299])

    def out(config=attention, key=KEY, tiles=tiles, slots=slots):
        return run(config, tiles, Heads.all(config), q, k, v, dout, slots, key=key)[0]

    assert torch.allclose(out(), out(tiles=cut_tiles, slots=cut_slots), atol=1e-6)
    for other in (out(key=(5, 3)), out(key=(6, 2)), out(replace(attention, first_head=4))):
        assert (out() - other).abs().max() > 0.1


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        pytest.param(settings, dtype, marks=() if (i + j) % 2 == 0 else pytest.mark.thorough)
        for i, settings in enumerate(ATTENTIONS)
        for j, dtype in enumerate((torch.float32, torch.bfloat16))
    ],
    ids=str,
)
def test_the_same_bits_every_time_whatever_the_threads(settings, dtype):
    attention = AttentionConfig(8, 2, 16, 24, **settings)
    documents = Documents([400, 1, 230])
    q, k, v, dout = tensors(631, 631, (8, 2, 16, 24), dtype)
    tiles, slots = in_steps(attention, documents, documents, [200])
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 3, 3, 2):
            torch.set_num_threads(count)
            results.append(run(attention, tiles, Heads.all(attention), q, k, v, dout, slots))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
    assert CPU.deterministic


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 6), st.integers(1, 8), st.data())
def test_heads_are_cut_into_three_even_parts_at_most(kv_heads, each, data):
    attention = AttentionConfig(kv_heads * each, kv_heads, 8)
    first, stop = sorted(data.draw(st.tuples(*[st.integers(0, attention.heads)] * 2)))
    kv = (first // each, max(first // each + 1, -(-stop // each)))
    parts = uniform_head_groups(attention, Heads((first, stop), kv))
    pairs = []
    for part in parts:
        served, keys = range(*part.q_range), range(kv[0] + part.kv.start, kv[0] + part.kv.stop)
        assert part.q.start == part.q_range[0] - first and len(served) % len(keys) == 0
        pairs += [(h, keys[i // (len(served) // len(keys))]) for i, h in enumerate(served)]
    assert pairs == [(h, h // each) for h in range(first, stop)] and len(parts) <= 3


def test_every_attention_is_accepted():
    backend: AttentionBackend = CPU
    for attention in ATTENTIONS:
        for dtype in LIMITS:
            backend.check(AttentionConfig(12, 3, 192, 128, **attention), dtype)
