"""CANN's rules as a checker of its own: what a call may be, whoever makes it.

    check(call)             raises Refused for a call that CANN refuses, whose result it leaves undefined, or which the
                            stand-in does not model
    breaches(call)          every broken rule

The rules look at a description of the call (cann_calls.py) and know neither the package's lowering nor the oracle's
arithmetic. Every call of FlashAttentionScore, of its gradient, of RingAttentionUpdate and of HcclBatchSendRecv that reaches
the stand-in passes `check`; so do random lowered calls that are never computed (tests/ops/test_cann_rules_random.py). The
table in tests/host_cann/rules.md is made of them (tools/cann_table.py).
"""

from __future__ import annotations

from tests.host_cann.cann_calls import AttentionCall, BatchCall, UpdateCall
from tests.host_cann.cann_rule import Breach, Refused, Rules, need
from tests.host_cann.cann_rules_attention import attention_rules, modelled, update_rules
from tests.host_cann.cann_rules_hccl import batch_rules

#: Operators -> their rules.
OPERATORS: dict[str, Rules] = {
    "FlashAttentionScore, FlashAttentionScoreGrad": attention_rules,
    "RingAttentionUpdate": update_rules,
    "HcclBatchSendRecv": batch_rules,
}

_RULES = dict(zip((AttentionCall, UpdateCall, BatchCall), OPERATORS.values(), strict=True))


def breaches(call: AttentionCall | UpdateCall | BatchCall) -> list[Breach]:
    """The rules that the call breaks. Rules that take others for granted are not looked at where those are broken."""
    return _RULES[type(call)].breaches(call)


def check(call: AttentionCall | UpdateCall | BatchCall) -> None:
    """Let a call pass that CANN takes.

    Raises:
        Refused: CANN refuses the call, what comes out is not defined, or the stand-in does not model it; the text names
            the rule and its source.
    """
    lack = modelled(call) if isinstance(call, AttentionCall) else None
    need(lack is None, f"not modelled: {lack}")
    for breach in breaches(call):
        raise Refused(str(breach))
