"""Rules of RingAttentionUpdate."""

from __future__ import annotations

from tests.host_cann.cann_calls import UpdateCall
from tests.host_cann.cann_rule import UNDEFINED, Rules

TYPES = ("float16", "bfloat16", "float32")
MAX_HEADS = 256
MOST_DIM = 768

SBH = "`_ring_update` calls in SBH with batch size 1"

update_rules = Rules()
update_rules.group()


@update_rules.add(
    "update-layout", "The layout is SBH or TND; that of the statistics '', SBH or TND.",
    "RingAttentionUpdateKernelNpuOpApi.cpp: check_attention_inputs", SBH,
)  # fmt: skip
def update_layout(call: UpdateCall) -> str | None:
    if call.layout not in ("SBH", "TND"):
        return f"input_layout is {call.layout!r}; valid: SBH, TND"
    if call.softmax_layout not in ("", "SBH", "TND"):
        return f"input_softmax_layout is {call.softmax_layout!r}; valid: '', SBH, TND"
    return None


@update_rules.add(
    "update-dtype", "Both outputs share one type of fp16, bf16 and fp32.",
    "aclnn_ring_attention_update.cpp: data types", "both are made fp32",
)  # fmt: skip
def update_dtype(call: UpdateCall) -> str | None:
    if call.prev[0].dtype in TYPES and call.cur[0].dtype == call.prev[0].dtype:
        return None
    return "both outputs must share one type of float16, bfloat16, float32"


@update_rules.add(
    "update-statistics-dtype", "Statistics are fp32.",
    "aclnn_ring_attention_update.cpp: data types", "lse is fp32",
)  # fmt: skip
def update_statistics_dtype(call: UpdateCall) -> str | None:
    if all(x.dtype == "float32" for x in (*call.prev[1:], *call.cur[1:])):
        return None
    return "softmax statistics must be float32"


@update_rules.add(
    "update-shape", "Both outputs have one shape of three dimensions, none of them 0.",
    "ring_attention_update_tiling.cpp: RingAttentionUpdateCheckShape", "a call has rows",
)  # fmt: skip
def update_shape(call: UpdateCall) -> str | None:
    shapes = [x.shape for x in (call.prev[0], call.cur[0])]
    if len(shapes[0]) == 3 and shapes[0] == shapes[1] and 0 not in shapes[0]:
        return None
    return f"outputs of shapes {list(shapes[0])} and {list(shapes[1])}; valid: one shape of 3 dimensions without a 0"


update_rules.group()


@update_rules.add(
    "update-statistics-shape", "Statistics are [B, N, S, 8], in TND [T, N, 8].",
    "ring_attention_update_tiling.cpp: CheckAttnAndSoftmaxShapeSBH, RingAttentionUpdateCheckShape", "`_ring_update`",
)  # fmt: skip
def update_statistics_shape(call: UpdateCall) -> str | None:
    shapes = [x.shape for x in (*call.prev[1:], *call.cur[1:])]
    if len(set(shapes)) > 1:
        return f"statistics of shapes {[list(x) for x in shapes]}"
    a, b, c = call.prev[0].shape
    shape = shapes[0]
    if call.layout == "TND":
        return None if shape == (a, b, 8) else f"TND: statistics {list(shape)}; valid: {[a, b, 8]}"
    if len(shape) == 4 and (shape[0], *shape[2:]) == (b, a, 8) and shape[1] and c % shape[1] == 0:
        return None
    return f"SBH {[a, b, c]}: statistics {list(shape)}; valid: [B, N, S, 8]"


@update_rules.add(
    "update-width", "TND: D is a multiple of 64, at most 768.",
    "ring_attention_update_tiling.cpp: RingAttentionUpdateTNDUbSizeCheck", SBH,
)  # fmt: skip
def update_width(call: UpdateCall) -> str | None:
    d = call.prev[0].shape[2]
    if call.layout != "TND" or (d % 64 == 0 and 0 < d <= MOST_DIM):
        return None
    return f"TND: head size is {d}; valid: multiples of 64 up to {MOST_DIM}"


@update_rules.add(
    "update-heads", "TND: at most 256 heads.",
    "ring_attention_update_tiling.cpp: RingAttentionUpdateTNDUbSizeCheck", SBH,
)  # fmt: skip
def update_heads(call: UpdateCall) -> str | None:
    n = call.prev[0].shape[1]
    return None if call.layout != "TND" or n <= MAX_HEADS else f"TND: {n} heads; at most {MAX_HEADS}"


@update_rules.add(
    "update-lengths", "TND: actual_seq_qlen is given, int64 of one dimension.",
    "ring_attention_update_tiling.cpp: RingAttentionUpdateTNDQLenCheck", SBH,
)  # fmt: skip
def update_lengths(call: UpdateCall) -> str | None:
    if call.layout != "TND":
        return None
    if call.lengths is None:
        return "TND needs actual_seq_qlen"
    if call.lengths.dtype == "int64" and len(call.lengths.shape) == 1:
        return None
    return "actual_seq_qlen must be int64 of one dimension"


@update_rules.add(
    "update-leading-0", "TND: actual_seq_qlen begins with 0: it has a number more than there are sequences.",
    "ring_attention_update_tiling.cpp: Tiling4RingAttentionUpdateTND", SBH, UNDEFINED,
)  # fmt: skip
def update_leading_0(call: UpdateCall) -> str | None:
    if call.layout != "TND" or call.lengths is None:
        return None
    if call.ends is None:
        return None if call.lengths.shape[:1] > (1,) else "actual_seq_qlen has no sequence: it begins with 0"
    if len(call.ends) > 1 and call.ends[0] == 0:
        return None
    return f"actual_seq_qlen {list(call.ends)[:8]} does not begin with 0; valid: 0 and the end of each sequence"


@update_rules.add(
    "update-total", "TND: actual_seq_qlen rises to the number of rows.",
    "ring_attention_update_tnd.h: the loop over sequences", SBH, UNDEFINED,
)  # fmt: skip
def update_total(call: UpdateCall) -> str | None:
    if call.layout != "TND" or not call.ends:
        return None
    t = call.prev[0].shape[0]
    rising = all(a <= b for a, b in zip(call.ends, call.ends[1:], strict=False))
    return None if rising and call.ends[-1] == t else f"actual_seq_qlen {list(call.ends)[:8]} does not cover {t} rows"
