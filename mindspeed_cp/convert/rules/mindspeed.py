"""Flags of MindSpeed and MindSpeed-LLM beside context parallelism: what planned attention refuses, or uses as they are.

A flag that changes what the model computes is refused where nothing else computes it: left out, it would give another
model without a word. The alternative then names a flag of Megatron that computes the same, if there is one.
"""

from __future__ import annotations

from mindspeed_cp.convert.command_line import ANY, MANY
from mindspeed_cp.convert.rules.attention import WINDOW_FLAG
from mindspeed_cp.convert.rules.flag_rule import ANOTHER_MODEL, Condition, FlagRule, Given, Outcome, is_number_above

_WITHOUT = "leave the flag out"
_MOE = "its losses take every rank to hold as many tokens"
_SCHEDULE = "its schedule has not been tried with rows that differ between micro-batches"

#: Flag -> its number of values, and why it is refused; the same as MINDSPEED_RULES of mindspeed_cp.megatron. Without
#: it the model computes the same.
_REFUSED = {
    "--unaligned-linear": (0, "it gives ranks other heads than plans are built for"),
    "--use-multiparameter-pipeline-model-parallel": (0, "stages exchange rows of any number"),
    "--schedules-method": (1, _SCHEDULE),
    "--optimize-send-recv-comm": (0, _SCHEDULE),
    "--recompute-in-bubble": (0, _SCHEDULE),
    "--recompute-in-advance": (0, _SCHEDULE),
    "--moe-fb-overlap": (0, "its schedule of half layers carries no plan"),
    "--moe-tp-extend-ep": (0, _MOE),
    "--moe-alltoall-overlap-comm": (0, _MOE),
    "--moe-allgather-overlap-comm": (0, _MOE),
    "--moe-alltoall-mc2": (0, _MOE),
    "--balanced-moe-experts": (0, _MOE),
    "--enable-expert-placement": (0, _MOE),
    "--layerzero": (0, "gradients of sharded weights have not been compared with those of one rank"),
    "--enable-zero3": (0, "gradients of sharded weights have not been compared with those of one rank"),
    "--fsdp2-config-path": (1, "gradients of sharded weights have not been compared with those of one rank"),
    "--dist-train": (0, "its groups of ranks are not Megatron's"),
    "--auto-settings": (0, "it runs launches of its own"),
    "--async-log-allreduce": (0, "its log takes losses that are already averaged"),
    "--use-batch-invariant-ops": (0, "which tiles a token is in depends on the other documents of its row"),
    "--enable-mla-absorb": (0, "attention takes keys and values of each head, not latents"),
}

_LLM_KERNELS = "MindSpeed-LLM hands it to its own attention, and a plan would not see it"
_LLM_ROTATION = "MindSpeed-LLM's own rotation reads it, and Megatron's, which takes its place, does not"
_LLM_ROUTER = "MindSpeed-LLM's own router computes it, which has not been compared beside planned attention"
_LLM_LAYERS = (
    "MindSpeed-LLM computes it in modules of its own, which the layers of --spec lack or which have not been compared "
    "beside them"
)
_OWN_EXPERTS = "MindSpeed's own experts of megatron.legacy read it, and planned layers have Megatron-core's"
_ADAPTERS = "its adapters and teachers have not been compared beside planned attention"

_WINDOWS = f"{WINDOW_FLAG} in its place, and --window-attn-skip-freq for layers without a window"

#: Flags that change the model -> number of values (ANY where it is not read), why they are refused, and Megatron's
#: flag of the same meaning.
_OTHER_MODELS = {
    "--attn-logit-softcapping": (1, _LLM_KERNELS, ANOTHER_MODEL),
    "--interleave-sliding-window": (1, _LLM_KERNELS, _WINDOWS),
    "--sliding-window": (MANY, _LLM_KERNELS, _WINDOWS),
    "--partial-rotary-factor": (1, _LLM_ROTATION, "--rotary-percent with the same value"),
    "--use-glm-rope": (0, _LLM_ROTATION, "--rotary-percent and --rotary-interleaved, if they describe the rotation"),
    "--fix-router": (0, "tokens would go to experts by their row, which differs between ranks", ANOTHER_MODEL),
    "--n-shared-experts": (
        1,
        _LLM_ROUTER,
        "--moe-shared-expert-intermediate-size with the width of all shared experts",
    ),
    "--shared-expert-gate": (0, _LLM_ROUTER, "--moe-shared-expert-gate (of Megatron 0.16 and later)"),
    "--router-gating-in-fp32": (0, _LLM_ROUTER, "--moe-router-dtype fp32"),
    "--norm-topk-prob": (
        0,
        _LLM_ROUTER,
        "leave it out where Megatron's router does the same: with --moe-router-score-function sigmoid, and with "
        "softmax and no --moe-router-pre-softmax",
    ),
    "--seq-aux": (0, _LLM_ROUTER, "--moe-router-load-balancing-type seq_aux_loss"),
    "--use-global-aux-loss": (0, _LLM_ROUTER, "--moe-router-load-balancing-type global_aux_loss"),
    "--noop-layers": (
        MANY,
        "Megatron's layers have none that do nothing, and would compute in all of them",
        "--pipeline-model-parallel-layout (of Megatron 0.14 and later), with that many layers less",
    ),
    **dict.fromkeys(
        (
            *("--moe-revert-type-after-topk", "--topk-softmax-in-fp32", "--num-zero-experts"),
            *("--n-hash-layers", "--shared-expert-gate-output-dimension"),
        ),
        (ANY, _LLM_ROUTER, ANOTHER_MODEL),
    ),
    **dict.fromkeys(
        (
            *("--embedding-multiplier-scale", "--input-jitter", "--post-norm", "--output-multiplier-scale"),
            *("--scale-emb", "--dim-model-base", "--scale-depth", "--gelu-tanh", "--geglu", "--add-rmsnorm-offset"),
            *("--output-logit-softcapping", "--input-embeds-norm", "--cla-share-factor", "--share-kvstates"),
            *("--input-layernorm-in-fp32", "--no-post-layer-norm", "--rmsnorm-weight-in-fp32", "--fc-type"),
            *("--no-enable-linear-qkv", "--add-dense-bias", "--add-output-layer-bias", "--swiglu-limit"),
            *("--use-triton-swiglu-limit", "--enable-mhc", "--hc-mult", "--hc-sinkhorn-iters", "--hc-eps"),
            *("--use-triton-mhc", "--use-fused-mhc", "--enable-mla-scale-q-lora", "--enable-mla-scale-kv-lora"),
            *("--mtp-spec", "--apply-rope-in-complex", "--rope-theta", "--compress-rope-theta", "--rope-factor"),
        ),
        (ANY, _LLM_LAYERS, ANOTHER_MODEL),
    ),
    **dict.fromkeys(
        (
            *("--moe-model-type", "--expert-interval", "--moe-train-capacity-factor", "--noisy-gate-policy"),
            *("--no-use-rts", "--moe-no-drop", "--moe-use-sinkhorn", "--use-pipe-experts"),
        ),
        (ANY, _OWN_EXPERTS, ANOTHER_MODEL),
    ),
    **dict.fromkeys(
        (
            *("--lora-r", "--lora-target-modules", "--lora-load", "--lu-lora-final-layer-index", "--qat-scheme"),
            *("--qlora", "--qad-enable", "--layerwise-disaggregated-training"),
        ),
        (ANY, _ADAPTERS, ANOTHER_MODEL),
    ),
}

#: Older names, which MindSpeed-LLM's parser gives to Megatron's.
_RENAMED = {
    "--moe-intermediate-size": "--moe-ffn-hidden-size",
    "--n-group": "--moe-router-num-groups",
    "--topk-group": "--moe-router-group-topk",
    "--routed-scaling-factor": "--moe-router-topk-scaling-factor",
    "--qk-rope-head-dim": "--qk-pos-emb-head-dim",
    "--qk-nope-head-dim": "--qk-head-dim",
}

_ROUTERS = ("group_limited_greedy", "softmax_topk", "pai_megatron_aux_loss", "sparsemixer_topk")

#: Flags that MindSpeed-LLM's scaled rotations read beside --rope-scaling-type.
_SCALING = (
    *("--rope-scaling-factor", "--low-freq-factor", "--high-freq-factor", "--original-max-position-embeddings"),
    *("--beta-fast", "--beta-slow", "--rope-scaling-beta-fast", "--rope-scaling-beta-slow", "--rope-scaling-mscale"),
    *("--rope-scaling-mscale-all-dim", "--rope-scaling-original-max-position-embeddings", "--longrope-freqs-type"),
    *("--long-factor", "--short-factor", "--long-mscale", "--short-mscale", "--yarn-scaling-factor"),
)
_SCALED = Condition("beside `--rope-scaling-type`", lambda given: given.has("--rope-scaling-type"))


def _scales_otherwise(given: Given) -> bool:
    return given.value("--query-pre-attn-scalar") != given.value("--kv-channels", "none")


def _is_llama3_of_megatron(given: Given) -> bool:
    """True if Megatron's --use-rope-scaling has the same frequencies, whose other numbers are fixed there."""
    fixed = {"--low-freq-factor": 1, "--high-freq-factor": 4, "--original-max-position-embeddings": 8192}
    values = {flag: given.value(flag) for flag in fixed}
    try:
        equal = all(float(values[flag]) == value for flag, value in fixed.items())
    except ValueError:
        return False
    return equal and given.value("--rope-scaling-type") == "llama3"


MINDSPEED_FLAG_RULES = (
    *(
        FlagRule(flag, arity, Outcome.REFUSED, reason, becomes=instead)
        for flag, (arity, reason, instead) in _OTHER_MODELS.items()
    ),
    FlagRule(
        "--first-k-dense-replace",
        1,
        Outcome.REFUSED,
        _LLM_LAYERS,
        becomes='--moe-layer-freq "([0]*K+[1]*(LAYERS-K))"',
        when=Condition("above 0", lambda given: is_number_above(given.value("--first-k-dense-replace", "0"), 0)),
    ),
    FlagRule("--first-k-dense-replace", 1, Outcome.STAYS, "no layer is dense by it"),
    FlagRule(
        "--query-pre-attn-scalar",
        1,
        Outcome.REFUSED,
        _LLM_KERNELS,
        becomes="a model whose scores are scaled by the width of a head",
        when=Condition("other than `--kv-channels`", _scales_otherwise),
    ),
    FlagRule("--query-pre-attn-scalar", 1, Outcome.REMOVED, "plans scale by the width of a head, which is the same"),
    FlagRule(
        "--rope-scaling-type",
        1,
        Outcome.REFUSED,
        "its frequencies are MindSpeed-LLM's, which planned rotary positions do not have",
        becomes="--use-rope-scaling of Megatron, with the same --rope-scaling-factor: its frequencies are the same for "
        "these numbers; leave out --rope-scaling-type, --low-freq-factor, --high-freq-factor and "
        "--original-max-position-embeddings",
        when=Condition("`llama3` with factors 1 and 4 and 8192 positions", _is_llama3_of_megatron),
    ),
    FlagRule("--rope-scaling-type", 1, Outcome.REFUSED, _LLM_ROTATION, becomes=ANOTHER_MODEL),
    *(
        FlagRule(flag, 1, Outcome.REFUSED, "a number of --rope-scaling-type", becomes="as said there", when=_SCALED)
        for flag in _SCALING
    ),
    *(
        FlagRule(flag, 1, Outcome.STAYS, "nothing reads it without --rope-scaling-type, --use-rope-scaling or YaRN")
        for flag in _SCALING
    ),
    FlagRule(
        "--dynamic-factor",
        1,
        Outcome.REFUSED,
        _LLM_ROTATION,
        becomes="--rotary-base with the base that it gives: base * (factor * length / positions - factor + 1) ** "
        "(width / (width - 2))",
        when=Condition("above 1", lambda given: is_number_above(given.value("--dynamic-factor", "1"), 1)),
    ),
    FlagRule("--dynamic-factor", 1, Outcome.STAYS, "it scales nothing"),
    *(
        FlagRule("--moe-router-load-balancing-type", MANY, Outcome.REFUSED, _LLM_ROUTER, name, becomes=ANOTHER_MODEL)
        for name in _ROUTERS
    ),
    *(
        FlagRule(
            flag,
            1,
            Outcome.REFUSED,
            _LLM_ROUTER,
            becomes=ANOTHER_MODEL,
            when=Condition("other than 0", lambda given, flag=flag: is_number_above(given.value(flag, "0"), 0)),  # type: ignore[misc]
        )
        for flag in ("--moe-device-level-aux-loss-coeff", "--moe-comm-aux-loss-coeff")
    ),
    *(
        FlagRule(flag, 1, Outcome.STAYS, "a loss of weight 0")
        for flag in ("--moe-device-level-aux-loss-coeff", "--moe-comm-aux-loss-coeff")
    ),
    *(
        FlagRule(flag, 1, Outcome.STAYS, f"MindSpeed-LLM's parser gives it to {name}, by which Megatron computes")
        for flag, name in _RENAMED.items()
    ),
    *(FlagRule(flag, arity, Outcome.REFUSED, reason, becomes=_WITHOUT) for flag, (arity, reason) in _REFUSED.items()),
    FlagRule(
        "--additional-config",
        1,
        Outcome.BY_HAND,
        "MindSpeed reads more flags from this file, which is not converted",
        becomes="convert them by giving them behind --",
    ),
    FlagRule("--use-fused-rmsnorm", 0, Outcome.STAYS, "MindSpeed's norms work row by row"),
    FlagRule("--use-fused-swiglu", 0, Outcome.STAYS, "MindSpeed's activations work row by row"),
)
