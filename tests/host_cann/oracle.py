"""The fused operators of an Ascend NPU as pure PyTorch on CPU tensors: a test double, with the operators' own rules.

    fused_attention        npu_fusion_attention(_v2)         -> attention_out, softmax_max, softmax_sum
    fused_attention_grad   npu_fusion_attention_grad(_v2)    -> dq, dk, dv
    ring_attention_update  npu_ring_attention_update         -> attention_out, softmax_max, softmax_sum

Arguments have the names of torch_npu's schemas. What the documentation of an operator forbids is refused (Refused), and
so is what this double does not model; nothing else of a device is in here: no block order, no bf16 inside a kernel.
torch_npu is not needed. Tensors on the "meta" device are checked and recorded, and get empty meta results: so bytes can
be counted at lengths at which nobody could compute.

`calls` records every call, in order; clear it with calls.clear(). `set_fault` puts a fault in on purpose.

Dropout: a device makes a bit mask of (seed, offset, numels) and hands it to the operator. So here:
    n = dropout_numels(heads, sizes); bits = dropout_bits(seed, offset, n, 1 - keep_prob); pass it as drop_mask,
the same bits to the forward and to the gradient.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.host_cann import cann_rules
from tests.host_cann import oracle_masks as masks
from tests.host_cann import oracle_math as math
from tests.host_cann import oracle_ring as ring
from tests.host_cann.cann_calls import UNLIMITED, AttentionCall, Shaped, shaped
from tests.host_cann.cann_rule import Refused
from tests.host_cann.oracle_calls import Call, calls, record, record_update
from tests.host_cann.oracle_dropout import dropout_bits, dropout_numels
from tests.host_cann.oracle_faults import FAULTS, set_fault
from tests.host_cann.oracle_given import check_slopes, check_statistics, statistics_shape
from tests.host_cann.oracle_problem import Problem, check_model, from_rows, rows_of_sequences, start_numbers, to_rows

__all__ = [
    "FAULTS", "Call", "Refused", "calls", "dropout_bits", "dropout_numels", "fused_attention", "fused_attention_grad",
    "problem_of", "ring_attention_update", "set_fault",
]  # fmt: skip


def call_of(
    query: Tensor | Shaped,
    key: Tensor | Shaped,
    value: Tensor | Shaped,
    head_num: int,
    input_layout: str,
    *,
    dy: Tensor | Shaped | None = None,
    softmax_max: Tensor | Shaped | None = None,
    softmax_sum: Tensor | Shaped | None = None,
    attention_in: Tensor | Shaped | None = None,
    pse: Tensor | Shaped | None = None,
    padding_mask: Tensor | Shaped | None = None,
    atten_mask: Tensor | Shaped | None = None,
    drop_mask: Tensor | Shaped | None = None,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    q_start_idx: Sequence[int] | None = None,
    kv_start_idx: Sequence[int] | None = None,
    gradient: bool = False,
    keep_prob: float = 1.0,
    pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED,
    inner_precise: int = 0,
    sparse_mode: int = 0,
    pse_type: int = 1,
    softmax_layout: str = "",
) -> AttentionCall:
    """The call as the rules see it; of tensors only shapes and types."""
    three = [shaped(x) for x in (query, key, value)]
    assert all(x is not None for x in three)
    return AttentionCall(
        *three,  # type: ignore[arg-type]  # None of them is None
        head_num=head_num,
        layout=input_layout.upper(),
        gradient=gradient,
        pse=shaped(pse),
        padding_mask=shaped(padding_mask),
        atten_mask=shaped(atten_mask),
        drop_mask=shaped(drop_mask),
        keep_prob=keep_prob,
        pre_tokens=pre_tokens,
        next_tokens=next_tokens,
        inner_precise=inner_precise,
        prefix=tuple(prefix or ()),
        ends_q=None if actual_seq_qlen is None else tuple(actual_seq_qlen),
        ends_k=None if actual_seq_kvlen is None else tuple(actual_seq_kvlen),
        sparse_mode=sparse_mode,
        pse_type=pse_type,
        q_start=tuple(q_start_idx or ()),
        kv_start=tuple(kv_start_idx or ()),
        softmax_layout=softmax_layout,
        dy=shaped(dy),
        softmax_max=shaped(softmax_max),
        softmax_sum=shaped(softmax_sum),
        attention_in=shaped(attention_in),
    )


def problem_of(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, *, scale: float = 1.0, **options: Any
) -> Problem:
    """The call, checked as far as it can be without looking into tensors.

    Args:
        options: those of call_of.

    Raises:
        Refused: a rule of CANN is broken, or the stand-in does not model the call.
    """
    call = call_of(query, key, value, head_num, input_layout, **options)
    cann_rules.check(call)
    check_model(call)
    s = call.sizes
    problem = Problem(
        layout=call.layout,
        query=to_rows(query, call.layout, s.heads),
        key=to_rows(key, call.layout, s.kv_heads),
        value=to_rows(value, call.layout, s.kv_heads),
        sequences=rows_of_sequences(call),
        heads=s.heads,
        kv_heads=s.kv_heads,
        scale=scale,
        pse=options.get("pse"),
        pse_type=call.pse_type,
        starts=start_numbers(call),
        mask=options.get("atten_mask"),
        sparse_mode=call.sparse_mode,
        pre_tokens=call.pre_tokens,
        next_tokens=call.next_tokens,
        prefix=call.prefix,
        inner_precise=call.inner_precise,
        keep_prob=call.keep_prob,
        drop_mask=options.get("drop_mask"),
        same_as_input=call.softmax_layout != "",
    )
    masks.check_arguments(problem)
    return problem


@torch.no_grad()
def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention and its softmax statistics.

    Args:
        query, key, value: in that layout; TND: [T, N, D].
        head_num: query heads.
        input_layout: BSH, SBH, BSND, BNSD or TND.
        options: scale, and those of call_of.

    Returns:
        attention_out in query's layout and type; softmax_max and softmax_sum, fp32, each value 8 times: [B, N, S, 8], or
        for TND [T, N, 8], whose memory holds [N, S_i, 8] sequence after sequence unless softmax_layout is "TND".
        (npu_fusion_attention_v2 accepts softmax_layout and drops it on Atlas A2 and A3; v1 passes it on.)

    Raises:
        Refused: see the head of this file.
    """
    p = problem_of(query, key, value, head_num, input_layout, **options)
    shape = statistics_shape(p)
    if query.is_meta:
        out = torch.empty(p.query.shape[0], p.heads, p.value.shape[2], dtype=query.dtype, device="meta")
        largest = total = torch.empty(shape, device="meta")
    else:
        masks.check_contents(p)
        check_slopes(p)
        out, largest, total = math.forward(p)
    record("fused_attention", p, query=query, key=key, value=value)
    return from_rows(out, p.layout, len(p.sequences)), largest.view(shape), total.view(shape)


def connect(opapi: ctypes.CDLL) -> None:
    """Let the stand-in's libopapi compute with this oracle; see oracle_abi."""
    from tests.host_cann import oracle_abi

    oracle_abi.connect(opapi)


def check_gradient_call(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, *,
    scale_value: float = 1.0, **options: Any,
) -> tuple[Problem, dict[str, Tensor]]:  # fmt: skip
    """The gradient's call, checked as far as it can be without looking into tensors, and what the forward gave."""
    p = problem_of(query, key, value, head_num, input_layout, scale=scale_value, gradient=True, dy=dy, **options)
    return p, {name: options[name] for name in ("softmax_max", "softmax_sum", "attention_in")}


@torch.no_grad()
def gradients(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """fused_attention_grad, and the gradient of an external pse (empty where there is none)."""
    p, parts = check_gradient_call(query, key, value, dy, head_num, input_layout, **options)
    if query.is_meta:
        grads = [torch.empty_like(x) for x in (p.query, p.key, p.value, query.new_empty(0))]
    else:
        statistics = parts["softmax_max"], parts["softmax_sum"]
        masks.check_contents(p)
        check_slopes(p)
        check_statistics(p, *statistics)
        rows = (to_rows(x, p.layout, head_num) for x in (dy, parts["attention_in"]))
        grads = math.backward(p, *rows, *(x.reshape(-1) for x in statistics))
    record("fused_attention_grad", p, query=query, key=key, value=value, dy=dy, **parts)
    dq, dk, dv, dpse = grads
    dq, dk, dv = (from_rows(x, p.layout, len(p.sequences)) for x in (dq, dk, dv))
    return dq, dk, dv, dpse


def fused_attention_grad(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of fused_attention with the statistics and the output that are given.

    Feed the statistics and the output over ALL keys, and the gradients of calls over parts of the keys add up to the
    gradients of the whole. (max = lse, sum = 1) is the same information as (max, sum).

    Args:
        query, key, value, head_num, input_layout: as in the forward.
        dy: gradient of attention_out.
        options: softmax_max, softmax_sum, attention_in; scale_value (the forward's scale); else those of call_of.

    Returns:
        dq, dk, dv in the layouts and the type of query, key, value.

    Raises:
        Refused: see the head of this file; statistics that are not finite or not positive.
    """
    return gradients(query, key, value, dy, head_num, input_layout, **options)[:3]  # type: ignore[arg-type]


@torch.no_grad()
def ring_attention_update(
    prev_attn_out: Tensor,
    prev_softmax_max: Tensor,
    prev_softmax_sum: Tensor,
    cur_attn_out: Tensor,
    cur_softmax_max: Tensor,
    cur_softmax_sum: Tensor,
    *,
    actual_seq_qlen: Tensor | None = None,
    input_layout: str = "SBH",
    input_softmax_layout: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """Two partial results merged, see oracle_ring.

    Args:
        prev_attn_out, cur_attn_out: SBH [S, B, H] or TND [T, N, D], D a multiple of 64.
        prev_softmax_max and the other statistics: fp32, [B, N, S, 8], for TND [T, N, 8].
        actual_seq_qlen: TND: 0 and the cumulative ends, int64.
        input_layout: "SBH" or "TND".
        input_softmax_layout: TND: order of the statistics in memory; "TND", or per sequence otherwise.

    Raises:
        Refused: the operator forbids it.
    """
    prev = (prev_attn_out, prev_softmax_max, prev_softmax_sum)
    cur = (cur_attn_out, cur_softmax_max, cur_softmax_sum)
    merged = ring.merge(prev, cur, actual_seq_qlen, input_layout, input_softmax_layout)
    record_update(input_layout, prev)
    return merged
