"""CANN's rules as a checker of its own: what a call may be, whoever makes it. Those of HcclBatchSendRecv stand here.

    check(call)             raises Refused for a call that CANN refuses, whose result it leaves undefined, or which the
                            stand-in does not model
    breaches(call)          every broken rule

The rules look at a description of the call (cann_calls.py) and know neither the package's lowering nor the oracle's
arithmetic. Every call of FlashAttentionScore, of its gradient, of RingAttentionUpdate and of HcclBatchSendRecv that reaches
the stand-in passes `check`; so do random lowered calls that are never computed (tests/ops/test_cann_rules_random.py).
"""

from __future__ import annotations

from collections import Counter

from tests.host_cann.cann_calls import AttentionCall, BatchCall, UpdateCall
from tests.host_cann.cann_rule import Breach, Refused, Rules, need
from tests.host_cann.cann_rules_attention import attention_rules, modelled, update_rules

#: HCCL's numbers of the types that Atlas A2 and A3 send: int8, int16, int32, fp16, fp32, int64, uint64, uint8, uint16,
#: uint32, fp64, bf16.
TYPES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)

DOCUMENT = "HcclBatchSendRecv, CANN 8.0 to 8.5: constraints"

batch_rules = Rules()
batch_rules.group()


@batch_rules.add("HcclBatchSendRecv.md: data types")
def batch_dtype(call: BatchCall) -> str | None:
    """The type is an integer of 8 to 64 bits, fp16, bf16, fp32 or fp64."""
    other = [x.dtype for x in call.items if x.dtype not in TYPES]
    return f"data type {other[0]} is not sent; valid: {TYPES}" if other else None


@batch_rules.add(DOCUMENT)
def batch_duplicate(call: BatchCall) -> str | None:
    """A list has one send to a rank, and one receive from it, at most."""
    twice = [x for x, n in Counter((x.direction, x.peer) for x in call.items).items() if n > 1]
    if not twice:
        return None
    direction, peer = twice[0]
    what = "sends to" if direction == "send" else "receives from"
    return (
        f"two {what} rank {peer} in one list, which the documentation of HcclBatchSendRecv forbids; make one message "
        "of them, or several calls"
    )


@batch_rules.add("ins_v2_batch_send_recv_executor.cc: GetPairWiseList, ProcessSelfSendRecvTasks")
def batch_self(call: BatchCall) -> str | None:
    """Sends of a rank to itself have receives of the same sizes and types in the list."""
    own = [x for x in call.items if x.peer == call.rank]
    sides = [sorted((x.count, x.dtype) for x in own if x.direction == side) for side in ("send", "recv")]
    return None if sides[0] == sides[1] else f"rank {call.rank} sends itself {sides[0]} and receives {sides[1]}"


@batch_rules.add(DOCUMENT)
def batch_virtual_pipeline(call: BatchCall) -> str | None:
    """The call is not made where pipeline stages are virtual (VPP)."""
    if call.virtual_stages <= 1:
        return None
    return f"HcclBatchSendRecv in a program with {call.virtual_stages} virtual pipeline stages"


RULES: dict[type, Rules] = {AttentionCall: attention_rules, UpdateCall: update_rules, BatchCall: batch_rules}


def breaches(call: AttentionCall | UpdateCall | BatchCall) -> list[Breach]:
    """The rules that the call breaks. Rules that take others for granted are not looked at where those are broken."""
    return RULES[type(call)].breaches(call)


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
