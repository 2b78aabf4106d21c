"""Rules of FlashAttentionScore, its gradient and RingAttentionUpdate, for calls that the stand-in models.

`modelled` says which: packed rows (TND) without a mask or with a compressed one, equal lengths (BSND) without a mask or
with a full one, ALiBi by slopes and one start index of each side, dropout. That is what the package's lowering uses;
what else CANN offers (other layouts, sparse modes with prefixes or an outer band, external biases) is refused.
"""

from __future__ import annotations

from tests.host_cann.cann_calls import AttentionCall, Shaped, UpdateCall
from tests.host_cann.cann_rule import Rules

#: Layout -> sparse modes without a mask, and with one.
MODES = {"TND": ((0,), (3, 4)), "BSND": ((0,), (1,))}
TYPES = ("float16", "bfloat16", "float32")
MOST_ROWS = 1_000_000  # of a sequence and, in TND, of all of them
MOST_BATCH = 2_000_000
MAX_SEQUENCES = 2048  # in TND
MAX_HEADS = 256
MOST_DIM = 768  # 512 in older releases of CANN


def modelled(call: AttentionCall) -> str | None:
    """Return what the stand-in does not model in a call, None if it models all of it."""
    if call.layout not in MODES:
        return f"input_layout is {call.layout!r}; modelled: {', '.join(MODES)}"
    modes = MODES[call.layout][call.atten_mask is not None]
    if call.sparse_mode not in modes:
        mask = "without a mask" if call.atten_mask is None else "with a mask"
        return f"{call.layout} {mask}: sparse_mode is {call.sparse_mode}; modelled: {', '.join(map(str, modes))}"
    starts = (len(call.q_start), len(call.kv_start))
    if call.pse is None and (call.pse_type != 1 or any(starts)):
        return "pse_type, q_start_idx and kv_start_idx without slopes"
    if call.pse is not None and (call.pse_type != 2 or call.pse.dtype != "float32"):
        return f"pse of {call.pse.dtype} with pse_type {call.pse_type}; modelled: fp32 slopes with pse_type 2"
    if starts not in ((0, 0), (1, 1)) or min((*call.q_start, *call.kv_start), default=0) < 0:
        return (
            "q_start_idx and kv_start_idx other than one number each, 0 or more: CANN reads the first of both, or none"
        )
    if call.drop_mask is not None and (call.keep_prob == 1 or len(call.drop_mask.shape) != 1):
        return "a dropout mask with keep_prob 1, or of several dimensions"
    if not call.packed and (call.ends_q or call.ends_k):
        return f"actual_seq_qlen or actual_seq_kvlen with {call.layout}"
    return None


# layouts, types, heads, widths and counts

attention_rules = Rules()
attention_rules.group()


@attention_rules.add("aclnn_flash_attention_score.cpp: InputDtypeCheck")
def dtype(call: AttentionCall) -> str | None:
    """query, key and value share one type of fp16, bf16 and fp32."""
    types = [x.dtype for x in (call.query, call.key, call.value)]
    if types[0] in TYPES and len(set(types)) == 1:
        return None
    return f"query, key and value must share one type of float16, bfloat16, float32; got {', '.join(types)}"


@attention_rules.add("aclnnFlashAttentionScoreV2.md: constraints")
def heads(call: AttentionCall) -> str | None:
    """There are at most 256 query heads."""
    return None if call.head_num <= MAX_HEADS else f"head_num is {call.head_num}; valid: 1 to {MAX_HEADS}"


attention_rules.group()


@attention_rules.add("flash_attention_score_tiling_general.cpp: AnalyzeLayout")
def dimensions(call: AttentionCall) -> str | None:
    """query, key and value have as many dimensions as the layout has letters."""
    if all(len(x.shape) == len(call.layout) for x in (call.query, call.key, call.value)):
        return None
    return f"{call.layout} takes tensors of {len(call.layout)} dimensions"


attention_rules.group()


@attention_rules.add("flash_attention_score_tiling_general.cpp: Analyze3DimLayout, Analyze4DimLayout")
def head_count(call: AttentionCall) -> str | None:
    """head_num is the number of query's heads."""
    heads = call.query.shape[-2]
    return None if heads == call.head_num else f"head_num is {call.head_num}, query has {heads} heads"


@attention_rules.add("aclnnFlashAttentionScoreV2.md: constraints")
def rows(call: AttentionCall) -> str | None:
    """S, and T in TND, are 1 to 1M; a batch has at most 2M entries."""
    counts = [x.shape[0 if call.packed else 1] for x in (call.query, call.key)]
    if not call.packed and not 1 <= call.query.shape[0] <= MOST_BATCH:
        return f"batch size {call.query.shape[0]}; valid: 1 to {MOST_BATCH}"
    if all(1 <= n <= MOST_ROWS for n in counts):
        return None
    return f"{call.layout}: {counts[0]} rows of queries, {counts[1]} of keys; valid: 1 to {MOST_ROWS}"


attention_rules.group()


@attention_rules.add("flash_attention_score_tiling_general.cpp: AnalyzeLayout")
def group(call: AttentionCall) -> str | None:
    """The number of query heads is a multiple of that of key heads."""
    n, kv = call.sizes.heads, call.sizes.kv_heads
    return None if kv > 0 and n % kv == 0 else f"query heads {n} are no multiple of key heads {kv}"


@attention_rules.add("flash_attention_score_grad_tiling_common.cpp: IsSameShapeButValueDLeEqD")
def key_value(call: AttentionCall) -> str | None:
    """key and value have the same shape but for D."""
    if call.key.shape[:-1] == call.value.shape[:-1]:
        return None
    return f"key has shape {list(call.key.shape)}, value {list(call.value.shape)}"


@attention_rules.add("flash_attention_score_tiling.cpp: CheckParams")
def batch(call: AttentionCall) -> str | None:
    """query and key have the same batch size."""
    if call.packed or call.query.shape[0] == call.key.shape[0]:
        return None
    return "query, key and value have different batch sizes"


@attention_rules.add("aclnn_flash_attention_score.cpp: AnalysisAxis")
def width(call: AttentionCall) -> str | None:
    """Head sizes are Dq == Dk >= Dv >= 1."""
    d, dk, dv = call.sizes.d, call.sizes.dk, call.sizes.dv
    return None if d == dk >= dv >= 1 else f"head sizes must be Dq == Dk >= Dv; got {d}, {dk}, {dv}"


@attention_rules.add("aclnn_flash_attention_score.cpp: AnalysisInput")
def widest(call: AttentionCall) -> str | None:
    """D is at most 768 (512 in older releases)."""
    d = call.sizes.d
    return None if d <= MOST_DIM else f"head size {d}; valid: 1 to {MOST_DIM}"


attention_rules.group()


@attention_rules.add("flash_attention_score_grad_tiling_s1s2_bn2.cpp: GetShapeAttrsInfo")
def tokens_32_bits(call: AttentionCall) -> str | None:
    """pre_tokens and next_tokens fit in 32 bits: the gradient's tiling reads so many."""
    for name, tokens in (("pre_tokens", call.pre_tokens), ("next_tokens", call.next_tokens)):
        if not -(2**31) <= tokens < 2**31:
            return f"{name} is {tokens}; valid: a number of 32 bits"
    return None


# the lists of lengths of TND, and what pre_tokens and next_tokens may be

attention_rules.group()


@attention_rules.add("flash_attention_score_tiling_general.cpp: Analyze3DimLayout")
def lengths(call: AttentionCall) -> str | None:
    """TND has actual_seq_qlen and actual_seq_kvlen, equally long and not empty."""
    if not call.packed or (call.ends_q and call.ends_k and len(call.ends_q) == len(call.ends_k)):
        return None
    return "TND: actual_seq_qlen and actual_seq_kvlen must have the same length and not be empty"


attention_rules.group()


@attention_rules.add("flash_attention_score_tiling_general.cpp: GetActualSeqLenData")
def cumulative(call: AttentionCall) -> str | None:
    """Both lists are cumulative ends without a leading 0. (Zeros at their end, which take no part, are not modelled.)"""
    if not call.packed:
        return None
    for name, ends in (("qlen", call.ends_q or ()), ("kvlen", call.ends_k or ())):
        if any(a > b for a, b in zip((0, *ends), ends, strict=False)):
            return f"actual_seq_{name} must be cumulative ends, without a leading 0; got {list(ends)[:8]}"
    return None


@attention_rules.add("flash_attention_score_tiling_general.cpp: Analyze3DimLayout")
def total(call: AttentionCall) -> str | None:
    """No list ends behind the last row."""
    if not call.packed:
        return None
    for name, ends, x in (("qlen", call.ends_q, call.query), ("kvlen", call.ends_k, call.key)):
        if max(ends or (0,)) > x.shape[0]:
            return f"actual_seq_{name} ends at {max(ends or (0,))}, the tensor has {x.shape[0]} rows"
    return None


@attention_rules.add("aclnnFlashAttentionVarLenScoreV2.md: constraints")
def sequences(call: AttentionCall) -> str | None:
    """TND has at most 2K sequences. (Later texts allow 20,000.)"""
    if not call.packed or len(call.ends_q or ()) <= MAX_SEQUENCES:
        return None
    return f"TND: {len(call.ends_q or ())} sequences; at most {MAX_SEQUENCES}"


attention_rules.group()


@attention_rules.add("aclnnFlashAttentionVarLenScoreV2.md: constraints")
def queries_without_keys(call: AttentionCall) -> str | None:
    """A sequence of TND that has queries has keys: no row may have every key masked."""
    for index, (sq, sk) in enumerate(call.sequences if call.packed else ()):
        if sq and not sk:
            return f"TND: sequence {index} has {sq} queries but no keys"
    return None


@attention_rules.add("flash_attention_score_tiling_general.cpp: CheckPretokenAndNexttoken")
def right_down(call: AttentionCall) -> str | None:
    """TND, mode 3: every sequence has Sq <= Skv."""
    longer = [(i, sizes) for i, sizes in enumerate(call.sequences) if sizes[0] > sizes[1]]
    if call.sparse_mode != 3 or not longer:
        return None
    return f"sparse_mode 3 needs Sq <= Skv; sequences {[i for i, _ in longer[:4]]} have {[x for _, x in longer[:4]]}"


@attention_rules.add("flash_attention_score_tiling_general.cpp: CheckPretokenAndNexttoken")
def band_tokens(call: AttentionCall) -> str | None:
    """TND, mode 4: pre_tokens >= 0 and pre_tokens + next_tokens >= 0."""
    if call.sparse_mode != 4 or call.gradient:
        return None
    if call.pre_tokens >= 0 and call.pre_tokens + call.next_tokens >= 0:
        return None
    return f"pre_tokens {call.pre_tokens} and next_tokens {call.next_tokens} must overlap, and pre_tokens be 0 at least"


@attention_rules.add("flash_attention_score_tiling_general.cpp: CheckPretokenAndNexttoken")
def band_rows(call: AttentionCall) -> str | None:
    """TND, mode 4: Sq - next_tokens <= Skv in every sequence that has both."""
    for index, (sq, sk) in enumerate(call.sequences):
        if call.sparse_mode == 4 and sq and sk and sq - call.next_tokens > sk:
            return f"TND: a row of sequence {index} has every key masked: Sq {sq}, Skv {sk}, next_tokens {call.next_tokens}"
    return None


@attention_rules.add("flash_attention_score_grad_tiling_s1s2_bn2gs1s2.cpp: ProcessTokensInfo")
def band_gradient(call: AttentionCall) -> str | None:
    """TND, mode 4, gradient: pre_tokens + next_tokens > 0; -pre_tokens <= Sq and -next_tokens <= Skv, also where a
    sequence has no queries."""
    if not call.gradient or call.sparse_mode != 4:
        return None
    pre, after = call.pre_tokens, call.next_tokens
    if pre + after <= 0:
        return f"the gradient needs pre_tokens + next_tokens above 0; got {pre} and {after}"
    for index, (sq, sk) in enumerate(call.sequences):
        if -pre > sq or -after > sk:
            return (
                f"the gradient refuses pre_tokens {pre}, next_tokens {after} for sequence {index} of Sq {sq}, Skv {sk}"
            )
    return None


# dropout, and what the gradient is given of the forward

attention_rules.group()


@attention_rules.add("flash_attention_score_grad_tiling_s1s2_bn2gs1s2.cpp: ProcessDropInfo")
def drop_mask(call: AttentionCall) -> str | None:
    """With keep_prob below 1 the gradient needs the dropout mask; without it the forward drops nothing."""
    if call.keep_prob == 1 or call.drop_mask is not None:
        return None
    return f"keep_prob {call.keep_prob} needs the dropout mask (drop_mask)"


@attention_rules.add("flash_attention_score_tiling_general.cpp: AnalyzeOptionalInput")
def drop_mask_bits(call: AttentionCall) -> str | None:
    """The dropout mask is uint8 with a bit for each weight: N times the sum of Sq x Skv."""
    if call.drop_mask is None:
        return None
    bits = call.sizes.heads * sum(sq * sk for sq, sk in call.sequences)
    wanted = -(-bits // 8)
    if call.drop_mask.dtype == "uint8" and call.drop_mask.shape[0] >= wanted:
        return None
    return (
        f"the dropout mask must be uint8 [{wanted}], one bit for each weight; is {call.drop_mask.dtype} "
        f"{list(call.drop_mask.shape)}"
    )


@attention_rules.add("flash_attention_score_grad_tiling_common.cpp: CheckSoftmaxDtype, CheckAttentionInDtype")
def statistics(call: AttentionCall) -> str | None:
    """The gradient gets softmax_max, softmax_sum and attention_in."""
    for name in ("softmax_max", "softmax_sum", "attention_in"):
        if call.gradient and getattr(call, name) is None:
            return f"the gradient needs {name}"
    return None


@attention_rules.add("flash_attention_score_grad_tiling_common.cpp: CheckShapeValid, CheckTndShapeValid")
def statistics_shape(call: AttentionCall) -> str | None:
    """The gradient's statistics are fp32 of shape [B, N, S, 8], in TND [T, N, 8]."""
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


@attention_rules.add("flash_attention_score_grad_tiling_common.cpp: CheckAttentionInShape, IsSameShapeButValueDLeEqD")
def output_gradient(call: AttentionCall) -> str | None:
    """The gradient's dy and attention_in have query's type, and its shape but for D."""
    if not call.gradient:
        return None
    wanted = (*call.query.shape[:-1], call.sizes.dv)
    for name in ("dy", "attention_in"):
        x: Shaped | None = getattr(call, name)
        if x is not None and x.dtype != call.query.dtype:
            return f"{name} must have the type of query, {call.query.dtype}; is {x.dtype}"
        if x is not None and x.shape != wanted:
            return f"{name} has shape {list(x.shape)}; valid: {list(wanted)}"
    return None


# sparse modes, the mask, slopes and start indices

attention_rules.group()


@attention_rules.add("flash_attention_score_tiling_general.cpp: AnalyzeOptionalInput")
def mask_dtype(call: AttentionCall) -> str | None:
    """The mask is bool or uint8."""
    if call.atten_mask is None or call.atten_mask.dtype in ("bool", "uint8"):
        return None
    return f"atten_mask must be bool or uint8, is {call.atten_mask.dtype}"


@attention_rules.add("flash_attention_score_tiling_general.cpp: AnalyzeOptionalInput")
def mask_shape(call: AttentionCall) -> str | None:
    """A compressed mask is 2048 x 2048, a full one [Sq, Skv]."""
    if call.atten_mask is None:
        return None
    valid = (2048, 2048) if call.packed else (call.sizes.s1, call.sizes.s2)
    if call.atten_mask.shape == valid:
        return None
    return f"sparse_mode {call.sparse_mode}: atten_mask has shape {list(call.atten_mask.shape)}; valid: {list(valid)}"


attention_rules.group()


@attention_rules.add("flash_attention_score_grad_tiling_s1s2_bn2gs1s2.cpp: ProcessPseInfo")
def slopes_shape(call: AttentionCall) -> str | None:
    """Slopes are [N] (or [B, N], which is not modelled)."""
    if call.pse is None or call.pse.shape == (call.sizes.heads,):
        return None
    return f"slopes have shape {list(call.pse.shape)}; valid: {[call.sizes.heads]}"


@attention_rules.add("aclnnFlashAttentionVarLenScoreV2.md: constraints")
def pse_empty(call: AttentionCall) -> str | None:
    """TND takes no pse where a sequence has no queries."""
    if call.pse is None or not call.packed or all(sq for sq, _ in call.sequences):
        return None
    return "TND: no pse where a sequence has length 0"


@attention_rules.add("flash_attention_score_tiling_general.cpp: SetPseAlibiParams")
def slopes_square(call: AttentionCall) -> str | None:
    """pse_type 2 needs Sq == Skv (in TND the document alone says so)."""
    uneven = [(i, sizes) for i, sizes in enumerate(call.sequences) if sizes[0] != sizes[1]]
    if call.pse is None or not uneven:
        return None
    return f"pse_type 2 needs Sq == Skv; sequences {[i for i, _ in uneven[:4]]} have sizes {[x for _, x in uneven[:4]]}"


# RingAttentionUpdate

update_rules = Rules()
update_rules.group()


@update_rules.add("aclnn_ring_attention_update.cpp: data types")
def update_dtype(call: UpdateCall) -> str | None:
    """Both outputs share one type of fp16, bf16 and fp32."""
    if call.prev[0].dtype in TYPES and call.cur[0].dtype == call.prev[0].dtype:
        return None
    return "both outputs must share one type of float16, bfloat16, float32"


@update_rules.add("aclnn_ring_attention_update.cpp: data types")
def update_statistics_dtype(call: UpdateCall) -> str | None:
    """Statistics are fp32."""
    if all(x.dtype == "float32" for x in (*call.prev[1:], *call.cur[1:])):
        return None
    return "softmax statistics must be float32"


@update_rules.add("ring_attention_update_tiling.cpp: RingAttentionUpdateCheckShape")
def update_shape(call: UpdateCall) -> str | None:
    """Both outputs have one shape of three dimensions, none of them 0."""
    shapes = [x.shape for x in (call.prev[0], call.cur[0])]
    if len(shapes[0]) == 3 and shapes[0] == shapes[1] and 0 not in shapes[0]:
        return None
    return f"outputs of shapes {list(shapes[0])} and {list(shapes[1])}; valid: one shape of 3 dimensions without a 0"


update_rules.group()


@update_rules.add("ring_attention_update_tiling.cpp: CheckAttnAndSoftmaxShapeSBH, RingAttentionUpdateCheckShape")
def update_statistics_shape(call: UpdateCall) -> str | None:
    """Statistics are [B, N, S, 8]."""
    shapes = [x.shape for x in (*call.prev[1:], *call.cur[1:])]
    if len(set(shapes)) > 1:
        return f"statistics of shapes {[list(x) for x in shapes]}"
    a, b, c = call.prev[0].shape
    shape = shapes[0]
    if len(shape) == 4 and (shape[0], *shape[2:]) == (b, a, 8) and shape[1] and c % shape[1] == 0:
        return None
    return f"SBH {[a, b, c]}: statistics {list(shape)}; valid: [B, N, S, 8]"
