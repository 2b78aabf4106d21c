"""The flag that plans the rows of all data-parallel replicas as one pool, and the flags that it takes the place of."""

from __future__ import annotations

from mindspeed_cp.convert.rules.flag_rule import Added, Condition, FlagRule, Given, Outcome, is_number_above
from mindspeed_cp.convert.rules.model import EXPERTS

POOL_FLAG = "--cp-plan-pool"

#: Megatron's own schedulers of samples over the ranks of all replicas.
_SCHEDULERS = ("--hybrid-context-parallel", "--dynamic-context-parallel")


def _places_documents(given: Given) -> bool:
    return given.settings.get("algorithm") == "hierarchical"


def _predicts_more_tokens(given: Given) -> bool:
    return given.value("--mtp-num-layers", "0") not in ("0", "None")


def _has_losses_of_experts(given: Given) -> bool:
    kinds = given.value("--moe-router-load-balancing-type", "aux_loss").split()
    return EXPERTS.holds(given) and kinds != ["none"] and any(is_number_above(text, 0) for text in _loss_weights(given))


def _loss_weights(given: Given) -> list[str]:
    return given.value("--moe-aux-loss-coeff", "0").split()


def _schedules_samples(given: Given) -> bool:
    hinders = _predicts_more_tokens(given), _has_losses_of_experts(given)
    return any(map(given.has, _SCHEDULERS)) and _places_documents(given) and not any(hinders)


PLACES_DOCUMENTS = Condition("`--set algorithm=hierarchical`", _places_documents)
MORE_TOKENS = Condition("beside `--mtp-num-layers`", _predicts_more_tokens)
EXPERT_LOSSES = Condition("experts, `--moe-aux-loss-coeff` other than 0", _has_losses_of_experts)
SCHEDULES_SAMPLES = Condition(
    f"{' or '.join(f'`{flag}`' for flag in _SCHEDULERS)}, {PLACES_DOCUMENTS.text}, neither `--mtp-num-layers` nor "
    "losses of experts",
    _schedules_samples,
)

POOL_RULES = (
    FlagRule(
        POOL_FLAG,
        0,
        Outcome.REFUSED,
        "multi-token prediction counts tokens over the ranks of one replica",
        becomes="leave the flag out",
        when=MORE_TOKENS,
    ),
    FlagRule(
        POOL_FLAG,
        0,
        Outcome.REFUSED,
        "losses of experts are of whole micro-batches, which the pool changes",
        becomes="leave the flag out, or --moe-router-load-balancing-type none",
        when=EXPERT_LOSSES,
    ),
    FlagRule(
        POOL_FLAG,
        0,
        Outcome.STAYS,
        "replicas share their ranks in the micro-batches where that is modelled to be faster",
        when=PLACES_DOCUMENTS,
    ),
    FlagRule(
        POOL_FLAG,
        0,
        Outcome.REFUSED,
        "only the hierarchical algorithm places documents on groups of any ranks",
        becomes="--set algorithm=hierarchical with it, or leave the flag out",
    ),
)

POOL_ADDED = Added(
    (POOL_FLAG,),
    "samples of all replicas share the ranks of all, as in Megatron's hybrid context parallelism",
    SCHEDULES_SAMPLES,
)
