/* Fused attention and its gradient: the calls that torch_npu makes for npu_fusion_attention_v2.
 *
 * Arguments have torch_npu's own names for them (without its prefix "format_"), in its order. "Score" is for equal lengths,
 * "VarLenScore" and "UnpaddingScoreGrad" for TND. The versions without a number and V4 (of npu_fusion_attention), V3 and V5 (rope,
 * sink) are not here: torch_npu then says that this CANN does not have them.
 */
#include "opapi.h"

typedef const aclTensor* T;
typedef const aclIntArray* I;
typedef const char* S;

#define INPUTS T query, T key, T value, T pse, T drop_mask, T padding_mask, T atten_mask
#define F_INPUTS FIELD(query), FIELD(key), FIELD(value), FIELD(pse), FIELD(drop_mask), FIELD(padding_mask), FIELD(atten_mask)

#define GRAD_INPUTS                                                                                                             \
    T query, T key, T value, T dy, T pse, T drop_mask, T padding_mask, T atten_mask, T softmax_max, T softmax_sum, T softmax, \
        T attention
#define F_GRAD_INPUTS                                                                                                              \
    FIELD(query), FIELD(key), FIELD(value), FIELD(dy), FIELD(pse), FIELD(drop_mask), FIELD(padding_mask), FIELD(atten_mask),         \
        FIELD(softmax_max), FIELD(softmax_sum), FIELD(softmax), FIELD(attention)

#define LENGTHS I ac_seq_qlen, I ac_seq_kvlen
#define F_LENGTHS FIELD(ac_seq_qlen), FIELD(ac_seq_kvlen)
#define STARTS I q_start_idx_val, I kv_start_idx_val
#define F_STARTS FIELD(q_start_idx_val), FIELD(kv_start_idx_val)

#define NUMBERS                                                                                                         \
    double keep_prob, int64_t pre_tokens, int64_t next_tokens, int64_t head_num, S input_layout, int64_t inner_precise, \
        int64_t sparse_mode
#define F_NUMBERS                                                                                                     \
    FIELD(keep_prob), FIELD(pre_tokens), FIELD(next_tokens), FIELD(head_num), FIELD(input_layout), FIELD(inner_precise), \
        FIELD(sparse_mode)

#define OUTPUTS T softmax_max, T softmax_sum, T softmax_out, T attention_score
#define F_OUTPUTS FIELD(softmax_max), FIELD(softmax_sum), FIELD(softmax_out), FIELD(attention_score)
#define GRADS T dq, T dk, T dv, T dpse
#define F_GRADS FIELD(dq), FIELD(dk), FIELD(dv), FIELD(dpse)

#define CALL(name, ...) return opapi::prepare(#name, {__VA_ARGS__}, workspace, executor);

extern "C" {

int aclnnFlashAttentionScoreV2GetWorkspaceSize(INPUTS, I prefixN, STARTS, double scale, NUMBERS, int64_t pse_type, OUTPUTS,
                                               ANSWER) {
    CALL(aclnnFlashAttentionScoreV2, F_INPUTS, FIELD(prefixN), F_STARTS, FIELD(scale), F_NUMBERS, FIELD(pse_type), F_OUTPUTS)
}

int aclnnFlashAttentionVarLenScoreV2GetWorkspaceSize(INPUTS, I prefixN, LENGTHS, STARTS, double scale, NUMBERS, int64_t pse_type,
                                                     OUTPUTS, ANSWER) {
    CALL(aclnnFlashAttentionVarLenScoreV2, F_INPUTS, FIELD(prefixN), F_LENGTHS, F_STARTS, FIELD(scale), F_NUMBERS,
         FIELD(pse_type), F_OUTPUTS)
}

int aclnnFlashAttentionScoreGradV2GetWorkspaceSize(GRAD_INPUTS, I prefixN, STARTS, double scale_value, NUMBERS, int64_t pse_type,
                                                   GRADS, ANSWER) {
    CALL(aclnnFlashAttentionScoreGradV2, F_GRAD_INPUTS, FIELD(prefixN), F_STARTS, FIELD(scale_value), F_NUMBERS, FIELD(pse_type),
         F_GRADS)
}

int aclnnFlashAttentionUnpaddingScoreGradV2GetWorkspaceSize(GRAD_INPUTS, I prefixN, LENGTHS, STARTS, double scale_value, NUMBERS,
                                                            int64_t pse_type, GRADS, ANSWER) {
    CALL(aclnnFlashAttentionUnpaddingScoreGradV2, F_GRAD_INPUTS, FIELD(prefixN), F_LENGTHS, F_STARTS, FIELD(scale_value),
         F_NUMBERS, FIELD(pse_type), F_GRADS)
}

}  // extern "C"

PHASE_TWO(aclnnFlashAttentionScoreV2)
PHASE_TWO(aclnnFlashAttentionVarLenScoreV2)
PHASE_TWO(aclnnFlashAttentionScoreGradV2)
PHASE_TWO(aclnnFlashAttentionUnpaddingScoreGradV2)
