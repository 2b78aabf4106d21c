"""Flags of the model and of memory that stay, with what they mean beside plans."""

from __future__ import annotations

from mindspeed_cp.convert.command_line import MANY
from mindspeed_cp.convert.rules.flag_rule import Condition, FlagRule, Outcome

STAYS, REFUSED = Outcome.STAYS, Outcome.REFUSED

_LATENT = "latents are projected to keys and values before attention, which the plan splits"
_EXPERTS = "experts are laid over context- and data-parallel ranks, as before"
_RECOMPUTED = "a recomputed layer runs its plan again"
_OWN_COUNT = "ranks hold unequal numbers of tokens, and each would count by its own: results would depend on the ranks"

EXPERT_PARALLEL = Condition("expert parallelism", lambda given: given.is_above("--expert-model-parallel-size", 1))

MODEL_RULES = (
    FlagRule("--multi-latent-attention", 0, STAYS, _LATENT),
    FlagRule("--multi-head-latent-attention", 0, STAYS, _LATENT),
    FlagRule("--kv-lora-rank", 1, STAYS, _LATENT),
    FlagRule("--q-lora-rank", 1, STAYS, _LATENT),
    FlagRule("--num-experts", 1, STAYS, _EXPERTS),
    FlagRule("--expert-model-parallel-size", 1, STAYS, _EXPERTS, is_read=True),
    FlagRule(
        "--moe-token-dispatcher-type",
        1,
        Outcome.REPLACED,
        "ranks hold unequal numbers of tokens, which allgather cannot gather",
        value="allgather",
        becomes="alltoall",
        when=EXPERT_PARALLEL,
    ),
    FlagRule("--moe-token-dispatcher-type", 1, STAYS, "it takes unequal numbers of tokens"),
    FlagRule("--moe-expert-capacity-factor", 1, REFUSED, _OWN_COUNT, becomes="leave the flag out: no token is dropped"),
    *(
        FlagRule(
            "--moe-router-load-balancing-type", MANY, REFUSED, _OWN_COUNT, value, becomes="aux_loss or seq_aux_loss"
        )
        for value in ("sinkhorn", "quantile_balancing")
    ),
    FlagRule("--moe-router-load-balancing-type", MANY, STAYS, "losses are summed over all ranks"),
    FlagRule("--recompute-granularity", 1, STAYS, _RECOMPUTED),
    FlagRule("--recompute-activations", 0, STAYS, _RECOMPUTED),
    FlagRule("--recompute-method", 1, STAYS, _RECOMPUTED),
    FlagRule("--recompute-num-layers", 1, STAYS, _RECOMPUTED),
    FlagRule(
        "--swap-attention",
        0,
        STAYS,
        "it moves what layers keep for the backward to the host; it was not tried with plans",
    ),
)
