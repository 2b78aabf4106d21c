"""Rules of FlashAttentionScore and its gradient: the lists of lengths of TND, and what pre_tokens and next_tokens may be."""

from __future__ import annotations

from tests.host_cann.cann_calls import AttentionCall
from tests.host_cann.cann_rule import IGNORED, UNDEFINED, Rules

MAX_SEQUENCES = 2048  # in TND
MOST_PREFIX = 2048  # entries of a batch with prefix; in TND half of it

ENDS = "`_keys_with_gaps` and `_call` make both lists of one set of blocks"
NO_PREFIX = "the backend has no such argument"
WINDOWS = "a row that sees no key of a tile is in no call"

length_rules = Rules()
length_rules.group()


@length_rules.add(
    "lengths", "TND has actual_seq_qlen and actual_seq_kvlen, equally long and not empty.",
    "flash_attention_score_tiling_general.cpp: Analyze3DimLayout", ENDS,
)  # fmt: skip
def lengths(call: AttentionCall) -> str | None:
    if not call.packed or (call.ends_q and call.ends_k and len(call.ends_q) == len(call.ends_k)):
        return None
    return "TND: actual_seq_qlen and actual_seq_kvlen must have the same length and not be empty"


length_rules.group()


@length_rules.add(
    "cumulative", "Both lists are cumulative ends without a leading 0 of their own; zeros at their end take no part.",
    "flash_attention_score_tiling_general.cpp: GetActualSeqLenData", ENDS, UNDEFINED,
)  # fmt: skip
def cumulative(call: AttentionCall) -> str | None:
    if not call.packed:
        return None
    used = len(call.sequences)
    for name, ends in (("qlen", call.ends_q), ("kvlen", call.ends_k)):
        counted = (ends or ())[:used]
        if any(a > b for a, b in zip((0, *counted), counted, strict=False)):
            return f"actual_seq_{name} must be cumulative ends, without a leading 0; got {list(ends or ())[:8]}"
    return None


@length_rules.add(
    "total", "No list ends behind the last row.",
    "flash_attention_score_tiling_general.cpp: Analyze3DimLayout", ENDS,
)  # fmt: skip
def total(call: AttentionCall) -> str | None:
    if not call.packed:
        return None
    for name, ends, x in (("qlen", call.ends_q, call.query), ("kvlen", call.ends_k, call.key)):
        if max(ends or (0,)) > x.shape[0]:
            return f"actual_seq_{name} ends at {max(ends or (0,))}, the tensor has {x.shape[0]} rows"
    return None


@length_rules.add(
    "sequences", "TND has at most 2K sequences, with prefix 1K. (Later texts allow 20,000.)",
    "aclnnFlashAttentionVarLenScoreV2.md: constraints", "`CallLimits.max_sequences`", UNDEFINED,
)  # fmt: skip
def sequences(call: AttentionCall) -> str | None:
    most = MAX_SEQUENCES // 2 if call.prefix else MAX_SEQUENCES
    if not call.packed or len(call.ends_q or ()) <= most:
        return None
    return f"TND: {len(call.ends_q or ())} sequences; at most {most}"


length_rules.group()


@length_rules.add(
    "queries-without-keys", "A sequence of TND that has queries has keys: no row may have every key masked.",
    "aclnnFlashAttentionVarLenScoreV2.md: constraints", "a tile has both", UNDEFINED,
)  # fmt: skip
def queries_without_keys(call: AttentionCall) -> str | None:
    for index, (sq, sk) in enumerate(call.sequences if call.packed else ()):
        if sq and not sk:
            return f"TND: sequence {index} has {sq} queries but no keys"
    return None


@length_rules.add(
    "prefix-count", "Sparse modes 5 and 6 take a prefix for each batch entry, of at most 2K.",
    "flash_attention_score_tiling_general.cpp: GetPrefixNList, VarLenGetPrefixNList", NO_PREFIX,
)  # fmt: skip
def prefix_count(call: AttentionCall) -> str | None:
    if call.sparse_mode not in (5, 6) or call.atten_mask is None:
        return None
    if len(call.prefix) == len(call.sequences) <= MOST_PREFIX:
        return None
    return f"prefix needs one number for each batch entry, at most {MOST_PREFIX}"


@length_rules.add(
    "prefix-range", "A prefix is max(0, Skv - Sq) to Skv.",
    "flash_attention_score_tiling_general.cpp: GetPrefixNList, VarLenGetPrefixNList", NO_PREFIX,
)  # fmt: skip
def prefix_range(call: AttentionCall) -> str | None:
    if call.sparse_mode not in (5, 6) or call.atten_mask is None or len(call.prefix) != len(call.sequences):
        return None
    for (sq, sk), n in zip(call.sequences, call.prefix, strict=True):
        if not max(0, sk - sq) <= n <= sk:
            return f"prefix is {n}; valid for Sq {sq}, Skv {sk}: {max(0, sk - sq)} to {sk}"
    return None


@length_rules.add(
    "prefix-unused", "A prefix counts in sparse modes 5 and 6 alone.",
    "flash_attention_score_tiling_general.cpp: SparseModeProcess", NO_PREFIX, IGNORED,
)  # fmt: skip
def prefix_unused(call: AttentionCall) -> str | None:
    if not call.prefix or call.sparse_mode in (5, 6):
        return None
    return f"prefix means nothing with sparse_mode {call.sparse_mode}"


@length_rules.add(
    "full-mask-tokens", "TND, mode 0 with a mask: next_tokens >= 0, pre_tokens + next_tokens >= 0, Skv + pre_tokens >= Sq.",
    "flash_attention_score_tiling_general.cpp: SparseNoMaskModeCheck", "mode 0 goes without a mask",
)  # fmt: skip
def full_mask_tokens(call: AttentionCall) -> str | None:
    pre, after = call.pre_tokens, call.next_tokens
    if not call.packed or call.sparse_mode != 0 or call.atten_mask is None or call.gradient:
        return None
    if pre >= call.sizes.s1 and (after == 0 or after >= call.sizes.s2):
        return None
    if after < 0 or pre + after < 0:
        return f"pre_tokens {pre} and next_tokens {after} must overlap, and next_tokens be 0 at least"
    for index, (sq, sk) in enumerate(call.sequences):
        if sq and sk and sk + pre < sq:
            return f"TND: a row of sequence {index} has every key masked: Sq {sq}, Skv {sk}, pre_tokens {pre}"
    return None


@length_rules.add(
    "full-mask-gradient", "TND, mode 0 with a mask, gradient: pre_tokens + next_tokens > 0, -pre_tokens <= Skv, -next_tokens <= Sq.",
    "flash_attention_score_grad_tiling_s1s2_bn2gs1s2.cpp: ProcessTokensInfo", "mode 0 goes without a mask",
)  # fmt: skip
def full_mask_gradient(call: AttentionCall) -> str | None:
    if not (call.gradient and call.packed and call.sparse_mode == 0 and call.atten_mask is not None):
        return None
    return _gradient_tokens(call, call.sequences, most_left=1)


@length_rules.add(
    "right-down", "TND, mode 3: every sequence has Sq <= Skv.",
    "flash_attention_score_tiling_general.cpp: CheckPretokenAndNexttoken", "a causal tile has as many keys as queries at least",
)  # fmt: skip
def right_down(call: AttentionCall) -> str | None:
    if not call.packed or call.sparse_mode != 3 or call.atten_mask is None:
        return None
    return _long_sequences(call, 3)


@length_rules.add(
    "band-tokens", "TND, mode 4: pre_tokens >= 0 and pre_tokens + next_tokens >= 0.",
    "flash_attention_score_tiling_general.cpp: CheckPretokenAndNexttoken", "`_diagonals`: the band of a window meets every row",
)  # fmt: skip
def band_tokens(call: AttentionCall) -> str | None:
    if not (call.packed and call.sparse_mode == 4 and call.atten_mask is not None) or call.gradient:
        return None
    if call.pre_tokens >= 0 and call.pre_tokens + call.next_tokens >= 0:
        return None
    return f"pre_tokens {call.pre_tokens} and next_tokens {call.next_tokens} must overlap, and pre_tokens be 0 at least"


@length_rules.add(
    "band-rows", "TND, mode 4: Sq - next_tokens <= Skv in every sequence that has both.",
    "flash_attention_score_tiling_general.cpp: CheckPretokenAndNexttoken", WINDOWS,
)  # fmt: skip
def band_rows(call: AttentionCall) -> str | None:
    if not (call.packed and call.sparse_mode == 4 and call.atten_mask is not None):
        return None
    for index, (sq, sk) in enumerate(call.sequences):
        if sq and sk and sq - call.next_tokens > sk:
            return f"TND: a row of sequence {index} has every key masked: Sq {sq}, Skv {sk}, next_tokens {call.next_tokens}"
    return None


@length_rules.add(
    "band-gradient", "TND, mode 4, gradient: pre_tokens + next_tokens > 0; -pre_tokens <= Sq and -next_tokens <= Skv, "
    "also where a sequence has no queries.",
    "flash_attention_score_grad_tiling_s1s2_bn2gs1s2.cpp: ProcessTokensInfo",
    "a window of one key is a batch of single rows in BSND (`single_keys.py`); no band has negative next_tokens (`plain_blocks`)",
)  # fmt: skip
def band_gradient(call: AttentionCall) -> str | None:
    if not (call.gradient and call.packed and call.sparse_mode == 4 and call.atten_mask is not None):
        return None
    return _gradient_tokens(call, call.sequences, most_left=0)


@length_rules.add(
    "outer-band", "Modes 7 and 8: pre_tokens is Skv of the band's sequence at least, where Sq - next_tokens <= Skv; in mode 7 "
    "next_tokens <= 0, and Sq <= Skv everywhere.",
    "flash_attention_score_tiling_general.cpp: CheckPretokenAndNexttoken", "the modes are not used",
)  # fmt: skip
def outer_band(call: AttentionCall) -> str | None:
    mode = call.sparse_mode
    if mode not in (7, 8) or call.atten_mask is None or call.gradient:
        return None
    sq, sk = call.sequences[call.band_index]
    if call.pre_tokens < sk:
        return f"sparse_mode {mode}: pre_tokens is {call.pre_tokens}; valid: from {sk}, Skv of the band's sequence"
    if mode == 7 and call.next_tokens > 0:
        return f"sparse_mode 7: next_tokens is {call.next_tokens}; valid: at most 0"
    if mode == 7 and (detail := _long_sequences(call, 7)) is not None:
        return detail
    if sq - call.next_tokens > sk:
        return f"TND: a row of sequence {call.band_index} has every key masked: Sq {sq}, Skv {sk}, next_tokens {call.next_tokens}"
    return None


@length_rules.add(
    "outer-band-gradient", "Modes 7 and 8, gradient: in the band's sequence pre_tokens + next_tokens > 0, -pre_tokens <= Sq, "
    "-next_tokens <= Skv.",
    "flash_attention_score_grad_tiling_s1s2_bn2gs1s2.cpp: ProcessTokensInfo", "the modes are not used",
)  # fmt: skip
def outer_band_gradient(call: AttentionCall) -> str | None:
    if not call.gradient or call.sparse_mode not in (7, 8) or call.atten_mask is None:
        return None
    return _gradient_tokens(call, (call.sequences[call.band_index],), most_left=0)


@length_rules.add(
    "padded-tokens", "Other layouts, modes 0 and 4 with a mask: the band meets the matrix.",
    "flash_attention_score_tiling_general.cpp: SparseBandModeCheck", "BSND has modes 0 without a mask, and 1",
)  # fmt: skip
def padded_tokens(call: AttentionCall) -> str | None:
    if call.packed or call.sparse_mode not in (0, 4) or call.atten_mask is None:
        return None
    s1, s2 = call.sizes.s1, call.sizes.s2
    corner = s2 - s1 if call.sparse_mode == 4 else 0
    pre, after = call.pre_tokens - corner, call.next_tokens + corner  # from the top left
    if pre + after >= 0 and -pre < s2 and -after < s1:
        return None
    return f"pre_tokens {call.pre_tokens} and next_tokens {call.next_tokens} must overlap, and leave something of Sq {s1}, Skv {s2}"


def _long_sequences(call: AttentionCall, mode: int) -> str | None:
    longer = [(i, sizes) for i, sizes in enumerate(call.sequences) if sizes[0] > sizes[1]]
    if not longer:
        return None
    return (
        f"sparse_mode {mode} needs Sq <= Skv; sequences {[i for i, _ in longer[:4]]} have {[x for _, x in longer[:4]]}"
    )


def _gradient_tokens(call: AttentionCall, sequences: tuple[tuple[int, int], ...], most_left: int) -> str | None:
    """What the gradient's tiling has against the tokens. most_left: 0 if -pre_tokens is compared with Sq, 1 with Skv."""
    pre, after = call.pre_tokens, call.next_tokens
    if pre + after <= 0:
        return f"the gradient needs pre_tokens + next_tokens above 0; got {pre} and {after}"
    for index, sizes in enumerate(sequences):
        if -pre > sizes[most_left] or -after > sizes[1 - most_left]:
            return f"the gradient refuses pre_tokens {pre}, next_tokens {after} for sequence {index} of Sq {sizes[0]}, Skv {sizes[1]}"
    return None
