"""Flags of MindSpeed beside context parallelism whose patches planned attention refuses, or uses as they are."""

from __future__ import annotations

from mindspeed_cp.convert.rules.attention import WINDOW_FLAG
from mindspeed_cp.convert.rules.flag_rule import Condition, FlagRule, Given, Outcome

_WITHOUT = "leave the flag out"
_MOE = "its losses take every rank to hold as many tokens"
_SCHEDULE = "its schedule has not been tried with rows that differ between micro-batches"

#: Flag -> its number of values, and why it is refused; the same as MINDSPEED_RULES of mindspeed_cp.megatron.
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
    "--fix-router": (0, "tokens would go to experts by their row, which differs between ranks"),
    "--layerzero": (0, "gradients of sharded weights have not been compared with those of one rank"),
    "--dist-train": (0, "its groups of ranks are not Megatron's"),
    "--auto-settings": (0, "it runs launches of its own"),
    "--async-log-allreduce": (0, "its log takes losses that are already averaged"),
    "--use-batch-invariant-ops": (0, "which tiles a token is in depends on the other documents of its row"),
    "--rope-scaling-type": (1, "its frequencies are not those of Megatron's rotary embedding"),
}

_LLM_KERNELS = "MindSpeed-LLM hands it to its own attention, and a plan would not see it"
_LLM_ROTATION = "MindSpeed-LLM's own rotation reads it, and Megatron's, which takes its place, does not"

#: Flag of models of MindSpeed-LLM -> its number of values, why it is refused, and the alternative.
_LLM_MODELS = {
    "--attn-logit-softcapping": (1, _LLM_KERNELS, "a model whose scores are not capped; --qk-layernorm bounds them"),
    "--interleave-sliding-window": (
        1,
        _LLM_KERNELS,
        f"{WINDOW_FLAG} in its place, and --window-attn-skip-freq for layers without a window",
    ),
    "--enable-mla-absorb": (0, "attention takes keys and values of each head, not latents", _WITHOUT),
    "--partial-rotary-factor": (1, _LLM_ROTATION, "--rotary-percent with the same value"),
    "--use-glm-rope": (0, _LLM_ROTATION, "a model whose rotation --rotary-percent and --rotary-interleaved describe"),
}


def _scales_otherwise(given: Given) -> bool:
    return given.value("--query-pre-attn-scalar") != given.value("--kv-channels", "none")


MINDSPEED_FLAG_RULES = (
    *(
        FlagRule(flag, arity, Outcome.REFUSED, reason, becomes=instead)
        for flag, (arity, reason, instead) in _LLM_MODELS.items()
    ),
    FlagRule(
        "--query-pre-attn-scalar",
        1,
        Outcome.REFUSED,
        _LLM_KERNELS,
        becomes="a model whose scores are scaled by the width of a head",
        when=Condition("other than `--kv-channels`", _scales_otherwise),
        is_read=True,
    ),
    FlagRule("--query-pre-attn-scalar", 1, Outcome.REMOVED, "plans scale by the width of a head, which is the same"),
    *(FlagRule(flag, arity, Outcome.REFUSED, reason, becomes=_WITHOUT) for flag, (arity, reason) in _REFUSED.items()),
    FlagRule("--use-fused-rmsnorm", 0, Outcome.STAYS, "MindSpeed's norms work row by row"),
    FlagRule("--use-fused-swiglu", 0, Outcome.STAYS, "MindSpeed's activations work row by row"),
)
