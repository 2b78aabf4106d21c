/* The other operators that torch_npu calls past PyTorch's dispatcher: dropout masks, the merge of two partial results, and
 * copies, casts and padding. */
#include "opapi.h"

typedef const aclTensor* T;
typedef const aclIntArray* I;
typedef const char* S;

#define CALL(name, ...) return opapi::prepare(#name, {__VA_ARGS__}, workspace, executor);

extern "C" {

/* One bit for each element, 1 with probability 1 - prob. The type is that of the tensor whose elements will be dropped. */
int aclnnDropoutGenMaskV2GetWorkspaceSize(I shapeArray, double prob, int64_t seed, int64_t offset, int type, T mask, ANSWER) {
    int64_t probDataType = type;
    CALL(aclnnDropoutGenMaskV2, FIELD(shapeArray), FIELD(prob), FIELD(seed), FIELD(offset), FIELD(probDataType), FIELD(mask))
}

int aclnnRingAttentionUpdateV2GetWorkspaceSize(T prev_attn_out, T prev_softmax_max, T prev_softmax_sum, T cur_attn_out,
                                               T cur_softmax_max, T cur_softmax_sum, T actual_seq_qlen, S input_layout,
                                               S input_softmax_layout, T attn_out, T softmax_max, T softmax_sum, ANSWER) {
    CALL(aclnnRingAttentionUpdateV2, FIELD(prev_attn_out), FIELD(prev_softmax_max), FIELD(prev_softmax_sum), FIELD(cur_attn_out),
         FIELD(cur_softmax_max), FIELD(cur_softmax_sum), FIELD(actual_seq_qlen), FIELD(input_layout), FIELD(input_softmax_layout),
         FIELD(attn_out), FIELD(softmax_max), FIELD(softmax_sum))
}

/* self in another type; the type is also that of out. */
int aclnnCastGetWorkspaceSize(T self, int type, T out, ANSWER) {
    int64_t dtype = type;
    CALL(aclnnCast, FIELD(self), FIELD(dtype), FIELD(out))
}

int aclnnInplaceCopyGetWorkspaceSize(T self, T src, ANSWER) { CALL(aclnnInplaceCopy, FIELD(self), FIELD(src)) }

/* pad: pairs of (before, after), of the last dimension first. */
int aclnnConstantPadNdGetWorkspaceSize(T self, I pad, const aclScalar* value, T out, ANSWER) {
    CALL(aclnnConstantPadNd, FIELD(self), FIELD(pad), FIELD(value), FIELD(out))
}

}  // extern "C"

PHASE_TWO(aclnnDropoutGenMaskV2)
PHASE_TWO(aclnnRingAttentionUpdateV2)
PHASE_TWO(aclnnCast)
PHASE_TWO(aclnnInplaceCopy)
PHASE_TWO(aclnnConstantPadNd)
