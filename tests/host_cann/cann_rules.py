"""CANN's rules as a checker of its own: what a call may be, whoever makes it.

    check(call)             raises Refused for a call that CANN refuses, or whose result it leaves undefined
    breaches(call)          every broken rule, those too whose arguments CANN takes and ignores
    ignored                 what `check` has let pass, because CANN does

The rules look at a description of the call (cann_calls.py) and know neither the package's lowering nor the oracle's
arithmetic. Every call of FlashAttentionScore, of its gradient, of RingAttentionUpdate and of HcclBatchSendRecv that reaches
the stand-in passes `check`; so do random lowered calls that are never computed (tests/ops/test_cann_rules_random.py). The
table in tests/host_cann/rules.md is made of them (tools/cann_table.py).
"""

from __future__ import annotations

from tests.host_cann.cann_calls import AttentionCall, BatchCall, UpdateCall
from tests.host_cann.cann_rule import IGNORED, SOURCES, Breach, Refused, Rule, Rules
from tests.host_cann.cann_rules_given import given_rules
from tests.host_cann.cann_rules_hccl import batch_rules
from tests.host_cann.cann_rules_lengths import length_rules
from tests.host_cann.cann_rules_masks import mask_rules
from tests.host_cann.cann_rules_shapes import shape_rules
from tests.host_cann.cann_rules_update import update_rules

__all__ = [
    "OPERATORS",
    "SOURCES",
    "AttentionCall",
    "BatchCall",
    "Breach",
    "Refused",
    "Rule",
    "UpdateCall",
    "breaches",
    "check",
]

#: Operators -> their rules.
OPERATORS: dict[str, tuple[Rules, ...]] = {
    "FlashAttentionScore, FlashAttentionScoreGrad": (shape_rules, length_rules, given_rules, mask_rules),
    "RingAttentionUpdate": (update_rules,),
    "HcclBatchSendRecv": (batch_rules,),
}

_RULES = dict(zip((AttentionCall, UpdateCall, BatchCall), OPERATORS.values(), strict=True))

#: Breaches that `check` has let pass, in order.
ignored: list[Breach] = []


def breaches(call: AttentionCall | UpdateCall | BatchCall) -> list[Breach]:
    """The rules that the call breaks. Rules that take others for granted are not looked at where those are broken."""
    out: list[Breach] = []
    for rules in _RULES[type(call)]:
        out += rules.breaches(call)
        if any(breach.rule.effect != IGNORED for breach in out):
            break
    return out


def check(call: AttentionCall | UpdateCall | BatchCall) -> None:
    """Let a call pass that CANN takes.

    Raises:
        Refused: CANN refuses the call, or what comes out is not defined; the text names the rule and its source.
    """
    broken = breaches(call)
    for breach in broken:
        if breach.rule.effect != IGNORED:
            raise Refused(str(breach))
    ignored.extend(broken)
