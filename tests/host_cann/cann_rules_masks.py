"""Rules of FlashAttentionScore and its gradient: sparse modes, the mask, the bias, slopes and start indices."""

from __future__ import annotations

from tests.host_cann.cann_calls import AttentionCall
from tests.host_cann.cann_rule import IGNORED, UNDEFINED, Rules

COMPRESSED = (2, 3, 4, 6, 7, 8)
PSE_ROWS = 1024  # of a compressed bias

MODES = "`_sparse_mode` gives 0, 3 and 4"
MASKS = "`compressed_mask`, 2048 x 2048, and `DeviceCall.mask` of a call's own rows and keys"
SLOPES = "ALiBi goes as pse_type 2 with fp32 slopes [N]"

mask_rules = Rules()
mask_rules.group()


@mask_rules.add(
    "sparse-mode", "Sparse modes are 0 to 6; in TND 0 to 4 and 6 to 8.",
    "flash_attention_score_tiling_general.cpp: SparseModeProcess, VarLenSparseModeProcess", MODES,
)  # fmt: skip
def sparse_mode(call: AttentionCall) -> str | None:
    valid = (0, 1, 2, 3, 4, 6, 7, 8) if call.packed else tuple(range(7))
    if call.sparse_mode in valid:
        return None
    return f"sparse_mode is {call.sparse_mode}; valid for {call.layout}: {valid}"


@mask_rules.add(
    "mask-missing", "Without a mask the operator lets every query see every key, whatever the sparse mode.",
    "flash_attention_score_tiling_general.cpp: GetSparseInfo", MODES, IGNORED,
)  # fmt: skip
def mask_missing(call: AttentionCall) -> str | None:
    if call.atten_mask is not None or call.sparse_mode == 0:
        return None
    return f"sparse_mode {call.sparse_mode} needs atten_mask: without it the operator lets every query see every key"


@mask_rules.add(
    "mask-dtype", "The mask is bool or uint8.",
    "flash_attention_score_tiling_general.cpp: AnalyzeOptionalInput", MASKS,
)  # fmt: skip
def mask_dtype(call: AttentionCall) -> str | None:
    if call.atten_mask is None or call.atten_mask.dtype in ("bool", "uint8"):
        return None
    return f"atten_mask must be bool or uint8, is {call.atten_mask.dtype}"


@mask_rules.add(
    "mask-shape", "A compressed mask is 2048 x 2048, in mode 6 3072 x 2048; another one [Sq, Skv] (in TND of the longest), "
    "[1, 1, Sq, Skv], [B, 1, Sq, Skv] or [B, N, Sq, Skv].",
    "flash_attention_score_tiling_general.cpp: AnalyzeOptionalInput", MASKS,
)  # fmt: skip
def mask_shape(call: AttentionCall) -> str | None:
    if call.atten_mask is None:
        return None
    mode, shape, s = call.sparse_mode, list(call.atten_mask.shape), call.sizes
    whole = [s.s1, s.s2]
    heads = [[1, 1], [s.batch, 1], [s.batch, s.heads]]
    valid = [[*outer, *whole] for outer in heads]
    if mode in COMPRESSED:
        small = [3072 if mode == 6 else 2048, 2048]
        valid = [small, *([*outer, *small] for outer in heads if whole == small)]
    elif mode == 5:  # the prefix of each entry needs a mask of each
        valid = [*valid[1:], *([whole] if s.batch == 1 else [])]
    else:
        valid = [whole, *valid]
        if call.packed and not call.gradient:
            valid.append([call.query.shape[0], call.key.shape[0]])
    return None if shape in valid else f"sparse_mode {mode}: atten_mask has shape {shape}; valid: {valid}"


mask_rules.group()


@mask_rules.add(
    "pse-type", "pse_type is 0 to 3.",
    "flash_attention_score_tiling_general.cpp: AnalyzeAttrs", SLOPES,
)  # fmt: skip
def pse_type(call: AttentionCall) -> str | None:
    return None if call.pse_type in (0, 1, 2, 3) else f"pse_type is {call.pse_type}; valid: 0 to 3"


@mask_rules.add(
    "pse-missing", "Without pse, pse_type is 1.",
    "flash_attention_score_tiling_general.cpp: AnalyzeOptionalInput", "`operator_keywords` gives both or none",
)  # fmt: skip
def pse_missing(call: AttentionCall) -> str | None:
    return None if call.pse is not None or call.pse_type == 1 else f"pse_type {call.pse_type} needs pse"


@mask_rules.add(
    "pse-dtype", "pse has query's type with pse_type 0 and 1, and is fp32 with 2 and 3.",
    "aclnn_flash_attention_score.cpp: InputDtypeCheck", SLOPES,
)  # fmt: skip
def pse_dtype(call: AttentionCall) -> str | None:
    if call.pse is None:
        return None
    if call.pse_type in (2, 3):
        return None if call.pse.dtype == "float32" else "slopes (pse with pse_type 2 or 3) must be float32"
    return None if call.pse.dtype == call.query.dtype else "pse must have the type of query"


@mask_rules.add(
    "pse-shape", "A bias is [B, N, Sq, Skv], [1, N, Sq, Skv] or [B, N, 1, Skv], or has 1024 rows where Sq == Skv is as long; in TND it "
    "is [1 or B, N, 1024, Skv] or one-dimensional.",
    "flash_attention_score_grad_tiling_s1s2_bn2gs1s2.cpp: ProcessPseInfo, ProcessPseNormal", SLOPES,
)  # fmt: skip
def pse_shape(call: AttentionCall) -> str | None:
    if call.pse is None or call.pse_type in (2, 3):
        return None
    s, shape = call.sizes, list(call.pse.shape)
    small = [[b, s.heads, PSE_ROWS, s.s2] for b in {1, s.batch}]
    if call.packed:
        pairs = sum(sq * sk for sq, sk in call.sequences)
        valid = [*small, [s.heads * call.key.shape[0]], [s.heads * pairs]]
    else:
        valid = [[s.batch, s.heads, s.s1, s.s2], [1, s.heads, s.s1, s.s2], [s.batch, s.heads, 1, s.s2]]
        valid += small if s.s1 == s.s2 >= PSE_ROWS else []
    return None if shape in valid else f"pse has shape {shape}; valid: {valid}"


@mask_rules.add(
    "slopes-shape", "Slopes are [N] or [B, N].",
    "flash_attention_score_grad_tiling_s1s2_bn2gs1s2.cpp: ProcessPseInfo", SLOPES,
)  # fmt: skip
def slopes_shape(call: AttentionCall) -> str | None:
    if call.pse is None or call.pse_type not in (2, 3):
        return None
    valid = [[call.sizes.heads], [call.sizes.batch, call.sizes.heads]]
    if list(call.pse.shape) in valid:
        return None
    return f"pse_type {call.pse_type}: slopes have shape {list(call.pse.shape)}; valid: {valid}"


@mask_rules.add(
    "pse-empty", "TND takes no pse where a sequence has no queries.",
    "aclnnFlashAttentionVarLenScoreV2.md: constraints", "under ALiBi keys are copied, not skipped (`_call`)", UNDEFINED,
)  # fmt: skip
def pse_empty(call: AttentionCall) -> str | None:
    if call.pse is None or not call.packed or all(sq for sq, _ in call.sequences):
        return None
    return "TND: no pse where a sequence has length 0"


@mask_rules.add(
    "slopes-square", "pse_type 2 and 3 need Sq == Skv (in TND the document alone says so).",
    "flash_attention_score_tiling_general.cpp: SetPseAlibiParams", "`alibi_blocks` cuts tiles into squares",
)  # fmt: skip
def slopes_square(call: AttentionCall) -> str | None:
    if call.pse is None or call.pse_type not in (2, 3) or call.sparse_mode == 8:
        return None
    uneven = [(i, sizes) for i, sizes in enumerate(call.sequences) if sizes[0] != sizes[1]]
    if not uneven:
        return None
    return (
        f"pse_type {call.pse_type} needs Sq == Skv; sequences {[i for i, _ in uneven[:4]]} have sizes "
        f"{[x for _, x in uneven[:4]]}"
    )


@mask_rules.add(
    "pse-mode-7", "Sparse mode 7 takes no pse.",
    "flash_attention_score_tiling_general.cpp: SetPseAlibiParams of FlashAttentionVarLenScoreTiling", MODES,
)  # fmt: skip
def pse_mode_7(call: AttentionCall) -> str | None:
    return "sparse_mode 7 takes no pse" if call.pse is not None and call.sparse_mode == 7 else None


@mask_rules.add(
    "slopes-mode-8", "Sparse mode 8 with slopes: Sq + q_start == Skv + kv_start in the first sequence, Sq == Skv in the others.",
    "flash_attention_score_tiling_general.cpp: SetPseAlibiParams of FlashAttentionVarLenScoreTiling", MODES,
)  # fmt: skip
def slopes_mode_8(call: AttentionCall) -> str | None:
    if call.pse is None or call.pse_type not in (2, 3) or call.sparse_mode != 8:
        return None
    given = call.q_start and call.kv_start
    q_start, kv_start = (call.q_start[0], call.kv_start[0]) if given else (0, 0)
    sq, sk = call.sequences[0]
    if sq + q_start != sk + kv_start:
        return f"sparse_mode 8 with slopes: Sq {sq} + q_start {q_start} is not Skv {sk} + kv_start {kv_start}"
    uneven = [i for i, sizes in enumerate(call.sequences) if i and sizes[0] != sizes[1]]
    return f"sparse_mode 8 with slopes: sequences {uneven[:4]} have Sq other than Skv" if uneven else None


@mask_rules.add(
    "starts-both", "q_start_idx without kv_start_idx, and the other way round, is ignored.",
    "flash_attention_score_tiling_general.cpp: SetQKVStartIdx", "`operator_keywords` gives both or none", IGNORED,
)  # fmt: skip
def starts_both(call: AttentionCall) -> str | None:
    if bool(call.q_start) == bool(call.kv_start):
        return None
    return "q_start_idx and kv_start_idx must be given together: one without the other is ignored by the operator"


@mask_rules.add(
    "starts-first", "Of each start list the first number counts.",
    "flash_attention_score_tiling_general.cpp: SetQKVStartIdx", "`operator_keywords` gives one number", IGNORED,
)  # fmt: skip
def starts_first(call: AttentionCall) -> str | None:
    if max(len(call.q_start), len(call.kv_start)) <= 1:
        return None
    return f"q_start_idx {list(call.q_start)[:4]}, kv_start_idx {list(call.kv_start)[:4]}: only the first number is read; give one"


@mask_rules.add(
    "starts-unused", "Start lists count with pse_type 2 and 3 alone; a call may have them without, in mode 8 too.",
    "flash_attention_score_tiling_general.cpp: SetQKVStartIdx", "`operator_keywords` gives them with slopes", IGNORED,
)  # fmt: skip
def starts_unused(call: AttentionCall) -> str | None:
    if not call.q_start or not call.kv_start or call.pse_type in (2, 3):
        return None
    return f"q_start_idx and kv_start_idx mean nothing with pse_type {call.pse_type}"
