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

from typing import Any

import torch
from torch import Tensor

from tests.host_cann import cann_rules
from tests.host_cann import oracle_faults as faults
from tests.host_cann import oracle_math as math
from tests.host_cann.cann_calls import AttentionCall, Shaped, UpdateCall, shaped
from tests.host_cann.cann_rule import Refused, need
from tests.host_cann.oracle_dropout import dropout_bits, dropout_numels
from tests.host_cann.oracle_faults import FAULTS, set_fault
from tests.host_cann.oracle_problem import Problem, check_contents, from_rows, rows_of_sequences, to_rows

#: Every call that was computed, in order.
calls: list[AttentionCall | UpdateCall] = []

TENSORS = ("pse", "atten_mask", "drop_mask", "dy", "softmax_max", "softmax_sum", "attention_in")
LISTS = {
    "ends_q": "actual_seq_qlen",
    "ends_k": "actual_seq_kvlen",
    "q_start": "q_start_idx",
    "kv_start": "kv_start_idx",
}

__all__ = [
    "FAULTS", "Refused", "calls", "dropout_bits", "dropout_numels", "fused_attention", "fused_attention_grad",
    "problem_of", "ring_attention_update", "set_fault",
]  # fmt: skip


def call_of(
    query: Tensor | Shaped,
    key: Tensor | Shaped,
    value: Tensor | Shaped,
    head_num: int,
    input_layout: str,
    **options: Any,
) -> AttentionCall:
    """The call as the rules see it; of tensors only shapes and types.

    Args:
        options: gradient; and as torch_npu's schemas name them keep_prob, pre_tokens, next_tokens, sparse_mode, pse_type,
            actual_seq_qlen, actual_seq_kvlen, q_start_idx, kv_start_idx, pse, atten_mask; drop_mask; of the gradient dy,
            softmax_max, softmax_sum, attention_in.
    """
    given = {name: options.pop(name, None) for name in TENSORS}
    lists = {ours: options.pop(theirs, None) for ours, theirs in LISTS.items()}
    ends = {name: None if lists[name] is None else tuple(lists[name]) for name in ("ends_q", "ends_k")}
    starts = {name: tuple(lists[name] or ()) for name in ("q_start", "kv_start")}
    three = [shaped(x) for x in (query, key, value)]
    tensors = {name: shaped(x) for name, x in given.items()}
    return AttentionCall(*three, head_num, input_layout.upper(), **tensors, **ends, **starts, **options)  # type: ignore[arg-type]


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
    rows = [to_rows(x, call.layout) for x in (query, key, value)]
    mask, drop_mask = options.get("atten_mask"), options.get("drop_mask")
    return Problem(call, rows[0], rows[1], rows[2], rows_of_sequences(call), scale, options.get("pse"), mask, drop_mask)


@torch.no_grad()
def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention and its softmax statistics.

    Args:
        query, key, value: in that layout; TND: [T, N, D].
        head_num: query heads.
        input_layout: TND or BSND.
        options: scale, and those of call_of.

    Returns:
        attention_out in query's layout and type; softmax_max and softmax_sum, fp32, each value 8 times: [B, N, S, 8], or
        for TND [T, N, 8], whose memory holds [N, S_i, 8] sequence after sequence.

    Raises:
        Refused: see the head of this file.
    """
    p = problem_of(query, key, value, head_num, input_layout, **options)
    shape = (len(p.query), p.call.head_num, 8) if p.call.packed else (len(query), p.call.head_num, query.shape[1], 8)
    if query.is_meta:
        out = torch.empty(p.query.shape[0], p.call.head_num, p.value.shape[2], dtype=query.dtype, device="meta")
        largest = total = torch.empty(shape, device="meta")
    else:
        check_contents(p)
        need(p.slopes is None or bool(p.slopes.isfinite().all()), "not modelled: slopes that are not finite")
        out, largest, total = math.forward(p)
    calls.append(p.call)
    return from_rows(out, p.call.layout, len(p.sequences)), largest.view(shape), total.view(shape)


def check_gradient_call(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, *,
    scale_value: float = 1.0, **options: Any,
) -> Problem:  # fmt: skip
    """The gradient's call, checked as far as it can be without looking into tensors."""
    return problem_of(query, key, value, head_num, input_layout, scale=scale_value, gradient=True, dy=dy, **options)


@torch.no_grad()
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
    p = check_gradient_call(query, key, value, dy, head_num, input_layout, **options)
    parts = {name: options[name] for name in ("softmax_max", "softmax_sum", "attention_in")}
    if query.is_meta:
        grads = [torch.empty_like(x) for x in (p.query, p.key, p.value)]
    else:
        statistics = parts["softmax_max"], parts["softmax_sum"]
        check_contents(p)
        check_statistics(*statistics)
        rows = (to_rows(x, p.call.layout) for x in (dy, parts["attention_in"]))
        grads = math.backward(p, *rows, *(x.reshape(-1) for x in statistics))
    calls.append(p.call)
    dq, dk, dv = (from_rows(x, p.call.layout, len(p.sequences)) for x in grads)
    return dq, dk, dv


def check_statistics(largest: Tensor, total: Tensor) -> None:
    """Raise Refused for statistics that no forward gives."""
    for name, x in (("softmax_max", largest), ("softmax_sum", total)):
        need(bool(x.isfinite().all()), f"not modelled: {name} that is not finite")
        need(bool((x == x[..., :1]).all()), f"{name} must hold each value 8 times")
    need(bool((total > 0).all()), "softmax_sum must be positive")


@torch.no_grad()
def ring_attention_update(
    prev_attn_out: Tensor,
    prev_softmax_max: Tensor,
    prev_softmax_sum: Tensor,
    cur_attn_out: Tensor,
    cur_softmax_max: Tensor,
    cur_softmax_sum: Tensor,
    *,
    input_layout: str = "SBH",
) -> tuple[Tensor, Tensor, Tensor]:
    """Two partial results over different keys merged into one:

        m = max(m1, m2), l = l1 * exp(m1 - m) + l2 * exp(m2 - m),
        out = out1 * l1 * exp(m1 - m) / l + out2 * l2 * exp(m2 - m) / l

    in fp32, the output rounded to its type at every call. Source: the documentation of aclnnRingAttentionUpdateV2.

    Args:
        prev_attn_out, cur_attn_out: [S, B, H].
        prev_softmax_max and the other statistics: fp32, [B, N, S, 8].
        input_layout: "SBH"; TND is not modelled.

    Raises:
        Refused: the operator forbids it.
    """
    need(input_layout == "SBH", f"not modelled: ring update in {input_layout}")
    prev = (prev_attn_out, prev_softmax_max, prev_softmax_sum)
    cur = (cur_attn_out, cur_softmax_max, cur_softmax_sum)
    call = update_call_of(prev, cur)
    cann_rules.check(call)
    calls.append(call)
    (out1, m1, l1), (out2, m2, l2) = prev, cur
    m = torch.maximum(m1, m2)
    a, b = l1 * (m1 - m).exp(), l2 * (m2 - m).exp()
    if faults.on(faults.UPDATE):
        a, b = l1, l2
    total = a + b
    if faults.on(faults.UPDATE_OUT):
        return out1, m, total

    def of_elements(x: Tensor) -> Tensor:
        return x[..., 0].permute(2, 0, 1).repeat_interleave(out1.shape[2] // m1.shape[1], -1)

    out = out1.float() * of_elements(a / total) + out2.float() * of_elements(b / total)
    return out.to(out1.dtype), m, total


def update_call_of(prev: tuple[Tensor, Tensor, Tensor], cur: tuple[Tensor, Tensor, Tensor]) -> UpdateCall:
    """The merge as the rules see it."""
    return UpdateCall(*(tuple(map(shaped, part)) for part in (prev, cur)))  # type: ignore[arg-type]  # three each
