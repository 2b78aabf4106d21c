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

import torch
from torch import Tensor

from tests.host_cann import oracle_masks as masks
from tests.host_cann import oracle_math as math
from tests.host_cann import oracle_ring as ring
from tests.host_cann.oracle_calls import Call, calls, record, record_update
from tests.host_cann.oracle_dropout import dropout_bits, dropout_numels
from tests.host_cann.oracle_faults import FAULTS, set_fault
from tests.host_cann.oracle_given import check_dropout, check_gradient, check_slopes, check_statistics, statistics_shape
from tests.host_cann.oracle_rules import (
    LAYOUTS,
    UNLIMITED,
    Problem,
    Refused,
    checked_heads,
    checked_lengths,
    checked_pse,
    checked_starts,
    from_rows,
    need,
    to_rows,
)

__all__ = [
    "FAULTS", "Call", "Refused", "calls", "dropout_bits", "dropout_numels", "fused_attention", "fused_attention_grad",
    "problem_of", "ring_attention_update", "set_fault",
]  # fmt: skip


def problem_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    pse_type: int = 1,
    q_start_idx: Sequence[int] | None = None,
    kv_start_idx: Sequence[int] | None = None,
    softmax_layout: str = "",
    drop_mask: Tensor | None = None,
) -> Problem:
    """The call, checked as far as it can be without looking into tensors.

    Raises:
        Refused: the operator forbids it, or the stand-in does not model it.
    """
    layout = input_layout.upper()
    need(layout in LAYOUTS, f"input_layout is {input_layout!r}; valid: {', '.join(LAYOUTS)}")
    need(padding_mask is None, "padding_mask is not supported")
    need(inner_precise in (0, 1, 2), f"inner_precise is {inner_precise}; valid: 0, 1, 2")
    need(
        softmax_layout in ("", "TND", "same_as_input") and (layout == "TND" or not softmax_layout),
        f"softmax_layout is {softmax_layout!r}; valid: '', and 'TND' with TND",
    )
    kv_heads, _, _ = checked_heads(query, key, value, head_num, layout)
    sequences = checked_lengths(query, key, value, layout, actual_seq_qlen, actual_seq_kvlen)
    problem = Problem(
        layout=layout,
        query=to_rows(query, layout, head_num),
        key=to_rows(key, layout, kv_heads),
        value=to_rows(value, layout, kv_heads),
        sequences=sequences,
        heads=head_num,
        kv_heads=kv_heads,
        scale=scale,
        pse=pse,
        pse_type=pse_type,
        starts=checked_starts(q_start_idx, kv_start_idx),
        mask=atten_mask,
        sparse_mode=sparse_mode,
        pre_tokens=pre_tokens,
        next_tokens=next_tokens,
        prefix=tuple(prefix or ()),
        inner_precise=inner_precise,
        keep_prob=keep_prob,
        drop_mask=drop_mask,
        same_as_input=softmax_layout != "",
    )
    masks.check_arguments(problem)
    checked_pse(problem, bool(q_start_idx))
    check_dropout(problem)
    return problem


@torch.no_grad()
def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, **options: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention and its softmax statistics.

    Args:
        query, key, value: in that layout; TND: [T, N, D].
        head_num: query heads.
        input_layout: BSH, SBH, BSND, BNSD or TND.
        options: those of problem_of.

    Returns:
        attention_out in query's layout and type; softmax_max and softmax_sum, fp32, each value 8 times: [B, N, S, 8], or
        for TND [T, N, 8], whose memory holds [N, S_i, 8] sequence after sequence unless softmax_layout is "TND".
        (npu_fusion_attention_v2 accepts softmax_layout and drops it on Atlas A2 and A3; v1 passes it on.)

    Raises:
        Refused: see the head of this file.
    """
    p = problem_of(query, key, value, head_num, input_layout, **options)  # type: ignore[arg-type]
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
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    attention_in: Tensor | None = None,
    scale_value: float = 1.0,
    **options: object,
) -> tuple[Problem, dict[str, Tensor]]:
    """The gradient's call, checked as far as it can be without looking into tensors, and what the forward gave."""
    p = problem_of(query, key, value, head_num, input_layout, scale=scale_value, **options)  # type: ignore[arg-type]
    parts = {"softmax_max": softmax_max, "softmax_sum": softmax_sum, "attention_in": attention_in}
    check_gradient(p, query, dy, parts)
    return p, {name: x for name, x in parts.items() if x is not None}


@torch.no_grad()
def gradients(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, **options: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """fused_attention_grad, and the gradient of an external pse (empty where there is none)."""
    p, parts = check_gradient_call(query, key, value, dy, head_num, input_layout, **options)  # type: ignore[arg-type]
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
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, **options: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of fused_attention with the statistics and the output that are given.

    Feed the statistics and the output over ALL keys, and the gradients of calls over parts of the keys add up to the
    gradients of the whole. (max = lse, sum = 1) is the same information as (max, sum).

    Args:
        query, key, value, head_num, input_layout: as in the forward.
        dy: gradient of attention_out.
        options: softmax_max, softmax_sum, attention_in; scale_value (the forward's scale); else those of problem_of.

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
        actual_seq_qlen: TND: cumulative ends, int64.
        input_layout: "SBH" or "TND".
        input_softmax_layout: TND: order of the statistics in memory; "TND", or per sequence otherwise.

    Raises:
        Refused: the operator forbids it.
    """
    prev = (prev_attn_out, prev_softmax_max, prev_softmax_sum)
    cur = (cur_attn_out, cur_softmax_max, cur_softmax_sum)
    ring.check_arguments(prev, cur, actual_seq_qlen, input_layout, input_softmax_layout)
    merged = ring.merge(prev, cur, actual_seq_qlen, input_layout, input_softmax_layout)
    record_update(input_layout, prev)
    return merged
