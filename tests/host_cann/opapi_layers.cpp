/* The fused operators of a layer and of the optimizer: the calls that torch_npu makes for npu_rms_norm, npu_rotary_mul, npu_swiglu,
 * their gradients, and torch's _fused_adamw_.
 *
 * Arguments have torch_npu's own names for them, as in opapi_attention.cpp. aclnnRotaryPositionEmbeddingV2 (a matrix for the
 * rotation) and aclnnApplyAdamW (npu_apply_adam_w) are not here: torch_npu then says that this CANN does not have them.
 */
#include "opapi.h"

typedef const aclTensor* T;

#define CALL(name, ...) return opapi::prepare(#name, {__VA_ARGS__}, workspace, executor);

extern "C" {

int aclnnRmsNormGetWorkspaceSize(T self, T gamma, double epsilon, T y, T rstd, ANSWER) {
    CALL(aclnnRmsNorm, FIELD(self), FIELD(gamma), FIELD(epsilon), FIELD(y), FIELD(rstd))
}

int aclnnRmsNormGradGetWorkspaceSize(T dy, T self, T rstd, T gamma, T dx, T dgamma, ANSWER) {
    CALL(aclnnRmsNormGrad, FIELD(dy), FIELD(self), FIELD(rstd), FIELD(gamma), FIELD(dx), FIELD(dgamma))
}

int aclnnRotaryPositionEmbeddingGetWorkspaceSize(T self, T r1, T r2, int64_t mode, T result, ANSWER) {
    CALL(aclnnRotaryPositionEmbedding, FIELD(self), FIELD(r1), FIELD(r2), FIELD(mode), FIELD(result))
}

int aclnnRotaryPositionEmbeddingGradGetWorkspaceSize(T grad, T r1, T r2, T x, int64_t mode, T dx, T dcos, T dsin, ANSWER) {
    CALL(aclnnRotaryPositionEmbeddingGrad, FIELD(grad), FIELD(r1), FIELD(r2), FIELD(x), FIELD(mode), FIELD(dx), FIELD(dcos),
         FIELD(dsin))
}

int aclnnSwiGluGetWorkspaceSize(T self, int64_t dim, T out, ANSWER) {
    CALL(aclnnSwiGlu, FIELD(self), FIELD(dim), FIELD(out))
}

int aclnnSwiGluGradGetWorkspaceSize(T grad_output, T self, int64_t dim, T out, ANSWER) {
    CALL(aclnnSwiGluGrad, FIELD(grad_output), FIELD(self), FIELD(dim), FIELD(out))
}

/* The first four are changed in place; step is the number of steps before this one. */
int aclnnApplyAdamWV2GetWorkspaceSize(T self, T exp_avgs, T exp_avg_sqs, T max_exp_avg_sqs, T grads, T step, float lr, float beta1,
                                      float beta2, float weight_decay, float eps, bool is_amsgrad, bool is_maximized, ANSWER) {
    int64_t amsgrad = is_amsgrad, maximize = is_maximized;
    CALL(aclnnApplyAdamWV2, FIELD(self), FIELD(exp_avgs), FIELD(exp_avg_sqs), FIELD(max_exp_avg_sqs), FIELD(grads), FIELD(step),
         FIELD(lr), FIELD(beta1), FIELD(beta2), FIELD(weight_decay), FIELD(eps), FIELD(amsgrad), FIELD(maximize))
}

}  // extern "C"

PHASE_TWO(aclnnRmsNorm)
PHASE_TWO(aclnnRmsNormGrad)
PHASE_TWO(aclnnRotaryPositionEmbedding)
PHASE_TWO(aclnnRotaryPositionEmbeddingGrad)
PHASE_TWO(aclnnSwiGlu)
PHASE_TWO(aclnnSwiGluGrad)
PHASE_TWO(aclnnApplyAdamWV2)
