"""Rules of FlashAttentionScore and its gradient: layouts, types, heads, widths and counts."""

from __future__ import annotations

import os

from tests.host_cann.cann_calls import AttentionCall
from tests.host_cann.cann_rule import UNDEFINED, Rules

LAYOUTS = ("BSH", "SBH", "BSND", "BNSD", "TND")
TYPES = ("float16", "bfloat16", "float32")
MOST_ROWS = 1_000_000  # of a sequence and, in TND, of all of them
MOST_BATCH = 2_000_000
MAX_HEADS = 256
MOST_DIM = int(os.environ.get("HOST_CANN_WIDEST", "768"))  # 512 in older releases of CANN

FORM = "the calls have layout TND or BSND, whose tensors have heads as a dimension of their own"
LIMITS = "`check_npu_limits`, when settings are read, and the backend's `check`"

shape_rules = Rules()
shape_rules.group()


@shape_rules.add(
    "layout", "The layout is BSH, SBH, BSND, BNSD or TND.",
    "flash_attention_score_tiling.cpp: CheckParams", FORM,
)  # fmt: skip
def layout(call: AttentionCall) -> str | None:
    if call.layout in LAYOUTS:
        return None
    return f"input_layout is {call.layout!r}; valid: {', '.join(LAYOUTS)}"


@shape_rules.add(
    "dtype", "query, key and value share one type of fp16, bf16 and fp32.",
    "aclnn_flash_attention_score.cpp: InputDtypeCheck", "the backend's `check` of the type",
)  # fmt: skip
def dtype(call: AttentionCall) -> str | None:
    types = [x.dtype for x in (call.query, call.key, call.value)]
    if types[0] in TYPES and len(set(types)) == 1:
        return None
    return f"query, key and value must share one type of float16, bfloat16, float32; got {', '.join(types)}"


@shape_rules.add(
    "head-num", "head_num is above 0.",
    "aclnn_flash_attention_score.cpp: AnalysisInput", "`_operator_arguments` has one head at least",
)  # fmt: skip
def head_num(call: AttentionCall) -> str | None:
    return None if call.head_num > 0 else f"head_num is {call.head_num}; valid: 1 to {MAX_HEADS}"


@shape_rules.add(
    "heads", "There are at most 256 query heads.",
    "aclnnFlashAttentionScoreV2.md: constraints", LIMITS, UNDEFINED,
)  # fmt: skip
def heads(call: AttentionCall) -> str | None:
    return None if call.head_num <= MAX_HEADS else f"head_num is {call.head_num}; valid: 1 to {MAX_HEADS}"


@shape_rules.add(
    "padding-mask", "padding_mask is not given.",
    "aclnnFlashAttentionScoreV2.md: parameters", "the backend has no such argument", UNDEFINED,
)  # fmt: skip
def padding_mask(call: AttentionCall) -> str | None:
    return None if call.padding_mask is None else "padding_mask is not supported"


shape_rules.group()


@shape_rules.add(
    "dimensions", "query, key and value have as many dimensions as the layout has letters.",
    "flash_attention_score_tiling_general.cpp: AnalyzeLayout", FORM,
)  # fmt: skip
def dimensions(call: AttentionCall) -> str | None:
    if all(len(x.shape) == len(call.layout) for x in (call.query, call.key, call.value)):
        return None
    return f"{call.layout} takes tensors of {len(call.layout)} dimensions"


shape_rules.group()


@shape_rules.add(
    "head-split", "In BSH and SBH, H of query is a multiple of head_num, that of key of D, that of value of key's heads.",
    "flash_attention_score_tiling_general.cpp: Analyze3DimLayout", FORM,
)  # fmt: skip
def head_split(call: AttentionCall) -> str | None:
    if call.layout not in ("BSH", "SBH"):
        return None
    q, k, v = (x.shape[2] for x in (call.query, call.key, call.value))
    d = q // call.head_num
    if q % call.head_num or d == 0:
        return f"query's H {q} is no multiple of head_num {call.head_num}"
    if k == 0 or k % d:
        return f"key's H {k} is no multiple of D {d}"
    return f"value's H {v} is no multiple of key's heads {k // d}" if v % (k // d) else None


@shape_rules.add(
    "head-count", "head_num is the number of query's heads.",
    "flash_attention_score_tiling_general.cpp: Analyze3DimLayout, Analyze4DimLayout", "`_operator_arguments`",
)  # fmt: skip
def head_count(call: AttentionCall) -> str | None:
    if call.layout in ("BSH", "SBH"):
        return None
    heads = call.query.shape[2 if call.layout == "BSND" else 1]
    return None if heads == call.head_num else f"head_num is {call.head_num}, query has {heads} heads"


@shape_rules.add(
    "rows", "S, and T in TND, are 1 to 1M; a batch has at most 2M entries.",
    "aclnnFlashAttentionScoreV2.md: constraints", "`CallLimits.max_rows`; a tile that cannot be split is a ConfigError", UNDEFINED,
)  # fmt: skip
def rows(call: AttentionCall) -> str | None:
    if call.packed:
        counts = [x.shape[0] for x in (call.query, call.key)]
    else:
        axis = {"SBH": 0, "BSH": 1, "BSND": 1, "BNSD": 2}[call.layout]
        counts = [x.shape[axis] for x in (call.query, call.key)]
        batch = call.query.shape[1 if call.layout == "SBH" else 0]
        if not 1 <= batch <= MOST_BATCH:
            return f"batch size {batch}; valid: 1 to {MOST_BATCH}"
    if all(1 <= n <= MOST_ROWS for n in counts):
        return None
    return f"{call.layout}: {counts[0]} rows of queries, {counts[1]} of keys; valid: 1 to {MOST_ROWS}"


shape_rules.group()


@shape_rules.add(
    "group", "The number of query heads is a multiple of that of key heads.",
    "flash_attention_score_tiling_general.cpp: AnalyzeLayout", "`uniform_head_groups`",
)  # fmt: skip
def group(call: AttentionCall) -> str | None:
    n, kv = call.sizes.heads, call.sizes.kv_heads
    return None if kv > 0 and n % kv == 0 else f"query heads {n} are no multiple of key heads {kv}"


@shape_rules.add(
    "key-value", "key and value have the same shape but for D.",
    "flash_attention_score_grad_tiling_common.cpp: IsSameShapeButValueDLeEqD", "both are rows of one slot",
)  # fmt: skip
def key_value(call: AttentionCall) -> str | None:
    if call.key.shape[:-1] == call.value.shape[:-1]:
        return None
    if call.packed and call.key.shape[0] == call.value.shape[0]:
        return f"key has {call.key.shape[1]} heads, value {call.value.shape[1]}"
    if call.packed:
        return f"key has {call.key.shape[0]} rows, value {call.value.shape[0]}"
    return f"key has shape {list(call.key.shape)}, value {list(call.value.shape)}"


@shape_rules.add(
    "batch", "query and key have the same batch size.",
    "flash_attention_score_tiling.cpp: CheckParams", "both have it from one call",
)  # fmt: skip
def batch(call: AttentionCall) -> str | None:
    if call.packed:
        return None
    axis = 1 if call.layout == "SBH" else 0
    sizes = [x.shape[axis] for x in (call.query, call.key)]
    return None if sizes[0] == sizes[1] else "query, key and value have different batch sizes"


@shape_rules.add(
    "width", "Head sizes are Dq == Dk >= Dv >= 1.",
    "aclnn_flash_attention_score.cpp: AnalysisAxis", "`_pad_head_dims` pads queries and keys to the width of values",
)  # fmt: skip
def width(call: AttentionCall) -> str | None:
    d, dk, dv = call.sizes.d, call.sizes.dk, call.sizes.dv
    return None if d == dk >= dv >= 1 else f"head sizes must be Dq == Dk >= Dv; got {d}, {dk}, {dv}"


@shape_rules.add(
    "widest", "D is at most 768 (512 in older releases).",
    "aclnn_flash_attention_score.cpp: AnalysisInput", LIMITS,
)  # fmt: skip
def widest(call: AttentionCall) -> str | None:
    d = call.sizes.d
    return None if d <= MOST_DIM else f"head size {d}; valid: 1 to {MOST_DIM}"


shape_rules.group()


@shape_rules.add(
    "inner-precise", "inner_precise is 0, 1 or 2.",
    "aclnnFlashAttentionScoreV2.md: constraints", "left at its default", UNDEFINED,
)  # fmt: skip
def inner_precise(call: AttentionCall) -> str | None:
    return None if call.inner_precise in (0, 1, 2) else f"inner_precise is {call.inner_precise}; valid: 0, 1, 2"


@shape_rules.add(
    "softmax-layout", "softmax_layout is '', or 'TND' (of aclnn 'same_as_input') with TND.",
    "FlashAttentionV2KernelNpuOpApi.cpp: npu_fusion_attention_v2", "left at its default",
)  # fmt: skip
def softmax_layout(call: AttentionCall) -> str | None:
    valid = ("", "TND", "same_as_input") if call.packed else ("",)
    if call.softmax_layout in valid:
        return None
    return f"softmax_layout is {call.softmax_layout!r}; valid: '', and 'TND' with TND"


@shape_rules.add(
    "tokens-32-bits", "pre_tokens and next_tokens fit in 32 bits: the gradient's tiling reads so many.",
    "flash_attention_score_grad_tiling_s1s2_bn2.cpp: GetShapeAttrsInfo", "no limit is 2^31 - 1, the default", UNDEFINED,
)  # fmt: skip
def tokens_32_bits(call: AttentionCall) -> str | None:
    for name, tokens in (("pre_tokens", call.pre_tokens), ("next_tokens", call.next_tokens)):
        if not -(2**31) <= tokens < 2**31:
            return f"{name} is {tokens}; valid: a number of 32 bits"
    return None
