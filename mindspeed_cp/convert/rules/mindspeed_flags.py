"""Flags by which a launch is known as one of MindSpeed, or of MindSpeed-LLM: Megatron has none of them."""

from __future__ import annotations

from mindspeed_cp.convert.rules.flag_rule import Condition

#: Flags that MindSpeed adds to Megatron's (26.1.0 for Megatron 0.12, and its branches for 0.16 and 0.18).
MINDSPEED_FLAGS = frozenset(
    {
        # Context parallelism, attention, masks and positions
        *("--context-parallel-algo", "--ulysses-degree-in-cp", "--cp-window-size", "--attention-mask-type"),
        *("--cp-attention-mask-type", "--use-cp-send-recv-overlap", "--use-fused-ring-attention-update"),
        *("--megatron-cp-in-bnsd", "--attention-mask-on-cpu", "--context-parallel-kv-cache-policy"),
        *("--context-parallel-cache-interval", "--use-ulysses-allgather-kv", "--kv-head-repeat-before-uly-alltoall"),
        *("--adaptive-cp-without-coarse", "--adaptive-cp-dynamic-attn-mask", "--adaptive-cp-only-reschedule"),
        *("--adaptive-cp-manually-set-mask-list", "--variable-seq-lengths", "--fix-sub-seq-length", "--sparse-mode"),
        *("--pre-tockens", "--next-tockens", "--shape-order", "--use-fusion-attn-v2", "--mla-fa-without-pad"),
        *("--alibi-fusion-attn-type", "--alibi-diagonal-opposite", "--square-alibi-mask", "--fill-neg-inf"),
        *("--use-fused-rotary-pos-emb", "--apply-rope-in-complex", "--rope-scaling-type", "--yarn-scaling-factor"),
        *("--multi-head-latent-attention", "--qk-nope-head-dim", "--qk-rope-head-dim", "--sliding-window-size"),
        *("--use-fused-lightning-indexer", "--use-fused-lightning-indexer-kl-loss", "--use-dsa-absorb"),
        *("--use-fused-sparse-flash-attention", "--enable-dsa-indexer", "--use-sparse-flash-attn"),
        # Operators and precision
        *("--use-fused-rmsnorm", "--use-fused-swiglu", "--use-fused-moe-token-permute-and-unpermute"),
        *("--use-naive-l2norm", "--skip-bias-add", "--add-dense-bias", "--gemm-gradient-accumulation-fusion"),
        *("--reuse-fp32-param", "--npu-deterministic", "--jit-compile", "--no-use-gmm-fp8", "--quant-grads"),
        *("--quant-states", "--te-comparison-with-bf16", "--te-comparison-with-cpu"),
        # Tensor and pipeline parallelism
        *("--use-ascend-mc2", "--use-ascend-coc", "--coc-mode", "--coc-parallel-num", "--coc-fused-kernel"),
        *("--tp-2d", "--tp-x", "--tp-y", "--nd1-dim1-size", "--nd2-dim1-size", "--use-nd-matmul"),
        *("--enable-overlap-ag-with-matmul", "--enable-overlap-matmul-with-rs"),
        *("--enable-backward-overlap-ag-with-matmul", "--optimize-send-recv-comm", "--optimize-vpp-send-recv-comm"),
        *("--use-multiparameter-pipeline-model-parallel", "--schedules-method", "--dualpipev-dw-detach"),
        *("--use-nanopipe", "--use-nanopipe-swap", "--automated-pipeline", "--num-layer-list", "--noop-layers"),
        *("--pipeline-num-transformer-layers", "--disable-gloo-group", "--hccl-group-buffer", "--hccl-op-mode"),
        *("--hccl-group-buffer-adaptive", "--ampipe-degree", "--dist-train", "--layerzero-config"),
        *("--fsdp2-config-path", "--enable-zero3"),
        # Memory and optimizer
        *("--swap-attention", "--swap-modules", "--swap-optimizer", "--smart-swap", "--adaptive-memory-optimization"),
        *("--adaptive-recompute-device-swap", "--adaptive-recompute-device-size", "--recompute-in-bubble"),
        *("--recompute-in-advance", "--recompute-norm", "--recompute-norm-num-layers", "--recompute-type"),
        *("--recompute-activation-function", "--recompute-activation-function-num-layers", "--recompute-module-list"),
        *("--enable-recompute-layers-per-pp-rank", "--compress-activation", "--compress-dense"),
        *("--compress-optimizer", "--param-and-grad-buffer-pad", "--reset-bucket-group-order", "--use-ema"),
        *("--optimizer-selection", "--optimization-level"),
        # Experts
        *("--moe-alltoall-overlap-comm", "--moe-allgather-overlap-comm", "--moe-fb-overlap", "--moe-tp-extend-ep"),
        *("--moe-permutation-async-comm", "--moe-zero-memory", "--moe-zero-memory-num-layers", "--moe-bmm-mc2"),
        *("--moe-alltoall-mc2", "--moe-adaptive-recompute-activation", "--moe-dynamic-padding", "--moe-no-drop"),
        *("--moe-unperm2-mem-optim-swap", "--moe-train-capacity-factor", "--balanced-moe-experts"),
        *("--enable-expert-placement", "--use-pipe-experts", "--expert-interval", "--noisy-gate-policy"),
        *("--enable-token-rearrange-opt", "--fix-router", "--n-shared-experts", "--print-expert-load"),
        # Tools
        *("--auto-settings", "--profile-level", "--profile-with-cpu", "--profile-with-stack", "--profile-with-memory"),
        *("--profile-record-shapes", "--profile-save-path", "--op-cal-tflops", "--npu-datadump", "--ai-framework"),
    }
)

#: Flags of MindSpeed-LLM's trainers and data.
LLM_FLAGS = frozenset(
    {
        *("--stage", "--is-instruction-dataset", "--is-pairwise-dataset", "--prompt-type", "--pack", "--neat-pack"),
        *("--tokenizer-name-or-path", "--tokenizer-not-use-fast", "--no-shared-storage", "--padded-samples"),
        *("--enable-hf2mg-convert", "--handler-name"),
    }
)

MINDSPEED = Condition(
    "beside MindSpeed", lambda given: any(map(given.has, MINDSPEED_FLAGS)) or any(map(given.has, LLM_FLAGS))
)
