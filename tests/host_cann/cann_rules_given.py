"""Rules of FlashAttentionScore and its gradient: dropout, and what the gradient is given of the forward."""

from __future__ import annotations

from tests.host_cann.cann_calls import AttentionCall, Shaped
from tests.host_cann.cann_rule import Rules

given_rules = Rules()
given_rules.group()


@given_rules.add(
    "keep-prob", "keep_prob is above 0 and at most 1.",
    "flash_attention_score_tiling_general.cpp: AnalyzeAttrs", "`AttentionConfig` refuses other dropout",
)  # fmt: skip
def keep_prob(call: AttentionCall) -> str | None:
    return None if 0 < call.keep_prob <= 1 else f"keep_prob is {call.keep_prob}; valid: above 0, at most 1"


@given_rules.add(
    "drop-mask", "With keep_prob below 1 the gradient needs the dropout mask; without it the forward drops nothing.",
    "flash_attention_score_grad_tiling_s1s2_bn2gs1s2.cpp: ProcessDropInfo", "torch-npu makes it of seed, offset and numels",
)  # fmt: skip
def drop_mask(call: AttentionCall) -> str | None:
    if call.keep_prob == 1 or call.drop_mask is not None:
        return None
    return f"keep_prob {call.keep_prob} needs the dropout mask (drop_mask)"


@given_rules.add(
    "drop-mask-bits", "The dropout mask is uint8 with a bit for each weight: N times the sum of Sq x Skv.",
    "flash_attention_score_tiling_general.cpp: AnalyzeOptionalInput", "torch-npu makes it of seed, offset and numels",
)  # fmt: skip
def drop_mask_bits(call: AttentionCall) -> str | None:
    if call.drop_mask is None:
        return None
    bits = call.sizes.heads * sum(sq * sk for sq, sk in call.sequences)
    wanted, given = -(-bits // 8), _count(call.drop_mask)
    if call.drop_mask.dtype == "uint8" and given >= wanted:
        return None
    return (
        f"the dropout mask must be uint8 [{wanted}], one bit for each weight; is {call.drop_mask.dtype} "
        f"{list(call.drop_mask.shape)}"
    )


@given_rules.add(
    "statistics", "The gradient gets softmax_max, softmax_sum and attention_in.",
    "flash_attention_score_grad_tiling_common.cpp: CheckSoftmaxDtype, CheckAttentionInDtype", "`_backward_call`",
)  # fmt: skip
def statistics(call: AttentionCall) -> str | None:
    for name in ("softmax_max", "softmax_sum", "attention_in"):
        if call.gradient and getattr(call, name) is None:
            return f"the gradient needs {name}"
    return None


@given_rules.add(
    "statistics-shape", "The gradient's statistics are fp32 of shape [B, N, S, 8], in TND [T, N, 8].",
    "flash_attention_score_grad_tiling_common.cpp: CheckShapeValid, CheckTndShapeValid", "`StatisticsOrder.from_rows`",
)  # fmt: skip
def statistics_shape(call: AttentionCall) -> str | None:
    if not call.gradient:
        return None
    s = call.sizes
    shape = (call.query.shape[0], s.heads, 8) if call.packed else (s.batch, s.heads, s.s1, 8)
    for name in ("softmax_max", "softmax_sum"):
        x: Shaped | None = getattr(call, name)
        if x is not None and x.dtype != "float32":
            return f"{name} must be float32, is {x.dtype}"
        if x is not None and x.shape != shape:
            return f"{name} has shape {list(x.shape)}; valid: {list(shape)}"
    return None


@given_rules.add(
    "output-gradient", "The gradient's dy and attention_in have query's type, and its shape but for D.",
    "flash_attention_score_grad_tiling_common.cpp: CheckAttentionInShape, IsSameShapeButValueDLeEqD", "`_operator_rows`",
)  # fmt: skip
def output_gradient(call: AttentionCall) -> str | None:
    if not call.gradient:
        return None
    *outer, last = call.query.shape
    wanted = (*outer, last // call.sizes.d * call.sizes.dv)
    for name in ("dy", "attention_in"):
        x: Shaped | None = getattr(call, name)
        if x is not None and x.dtype != call.query.dtype:
            return f"{name} must have the type of query, {call.query.dtype}; is {x.dtype}"
        if x is not None and x.shape != wanted:
            return f"{name} has shape {list(x.shape)}; valid: {list(wanted)}"
    return None


def _count(x: Shaped) -> int:
    count = 1
    for n in x.shape:
        count *= n
    return count
