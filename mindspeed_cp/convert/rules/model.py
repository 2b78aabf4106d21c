"""Flags of the model and of memory that stay, with what they mean beside plans."""

from __future__ import annotations

from mindspeed_cp.convert.command_line import MANY
from mindspeed_cp.convert.rules.flag_rule import Condition, FlagRule, Given, Outcome

STAYS, REPLACED = Outcome.STAYS, Outcome.REPLACED

_LATENT = "latents, or keys and values of all heads, travel between ranks, as the plan decides"
_EXPERTS = "experts are laid over context- and data-parallel ranks, as before"
_RECOMPUTED = "a recomputed layer runs its plan again"
#: Why a dispatcher that takes any number of rows is needed.
ROWS = "experts, and stages of a pipeline, get unequal numbers of tokens"


def _has_experts(given: Given) -> bool:
    return given.value("--num-experts", "0") not in ("0", "None")


def _exchanges_rows(given: Given) -> bool:
    return given.is_above("--expert-model-parallel-size", 1) or given.is_above("--pipeline-model-parallel-size", 1)


EXPERTS = Condition("experts", _has_experts)
EXPERTS_OR_STAGES = Condition("expert or pipeline parallelism", _exchanges_rows)

MODEL_RULES = (
    FlagRule("--multi-latent-attention", 0, STAYS, _LATENT),
    FlagRule("--multi-head-latent-attention", 0, STAYS, _LATENT),
    FlagRule("--kv-lora-rank", 1, STAYS, _LATENT),
    FlagRule("--q-lora-rank", 1, STAYS, _LATENT),
    FlagRule("--num-experts", 1, STAYS, _EXPERTS),
    FlagRule("--expert-model-parallel-size", 1, STAYS, _EXPERTS),
    *(
        FlagRule(
            "--moe-token-dispatcher-type",
            1,
            REPLACED,
            f"{ROWS}, which {value} cannot take",
            value=value,
            becomes="alltoall",
            when=EXPERTS_OR_STAGES,
        )
        for value in ("allgather", "alltoall_seq")
    ),
    FlagRule("--moe-token-dispatcher-type", 1, STAYS, "it takes unequal numbers of tokens"),
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
