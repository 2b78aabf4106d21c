"""Rules of HcclBatchSendRecv."""

from __future__ import annotations

from collections import Counter

from tests.host_cann.cann_calls import BatchCall
from tests.host_cann.cann_rule import UNDEFINED, Rules

#: HCCL's numbers of the types that Atlas A2 and A3 send: int8, int16, int32, fp16, fp32, int64, uint64, uint8, uint16,
#: uint32, fp64, bf16.
TYPES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)
MANY_RANKS, MOST_AT_ONCE = 500, 3

DOCUMENT = "HcclBatchSendRecv, CANN 8.0 to 8.5: constraints"

batch_rules = Rules()
batch_rules.group()


@batch_rules.add(
    "batch-dtype", "The type is an integer of 8 to 64 bits, fp16, bf16, fp32 or fp64.",
    "HcclBatchSendRecv.md: data types", "messages have the type of q, k, v, fp32, or uint8",
)  # fmt: skip
def batch_dtype(call: BatchCall) -> str | None:
    other = [x.dtype for x in call.items if x.dtype not in TYPES]
    return f"data type {other[0]} is not sent; valid: {TYPES}" if other else None


@batch_rules.add(
    "batch-duplicate", "A list has one send to a rank, and one receive from it, at most.",
    DOCUMENT, "`split_launches`: K and V to one rank are two launches", UNDEFINED,
)  # fmt: skip
def batch_duplicate(call: BatchCall) -> str | None:
    twice = [x for x, n in Counter((x.direction, x.peer) for x in call.items).items() if n > 1]
    if not twice:
        return None
    direction, peer = twice[0]
    what = "sends to" if direction == "send" else "receives from"
    return (
        f"two {what} rank {peer} in one list, which the documentation of HcclBatchSendRecv forbids; make one message "
        "of them, or several calls"
    )


@batch_rules.add(
    "batch-self", "Sends of a rank to itself have receives of the same sizes and types in the list.",
    "ins_v2_batch_send_recv_executor.cc: GetPairWiseList, ProcessSelfSendRecvTasks", "a plan has no message to its own rank",
)  # fmt: skip
def batch_self(call: BatchCall) -> str | None:
    own = [x for x in call.items if x.peer == call.rank]
    sides = [sorted((x.count, x.dtype) for x in own if x.direction == side) for side in ("send", "recv")]
    return None if sides[0] == sides[1] else f"rank {call.rank} sends itself {sides[0]} and receives {sides[1]}"


@batch_rules.add(
    "batch-virtual-pipeline", "The call is not made where pipeline stages are virtual (VPP).",
    DOCUMENT, "`train` has no pipeline stages; Megatron's own scripts are not asked", UNDEFINED,
)  # fmt: skip
def batch_virtual_pipeline(call: BatchCall) -> str | None:
    if call.virtual_stages <= 1:
        return None
    return f"HcclBatchSendRecv in a program with {call.virtual_stages} virtual pipeline stages"


@batch_rules.add(
    "batch-at-once", "Atlas A2, communicators of more than 500 ranks: at most 3 calls at once.",
    "HcclBatchSendRecv.md: constraints", "a group's calls go to one stream, one after the other", UNDEFINED,
)  # fmt: skip
def batch_at_once(call: BatchCall) -> str | None:
    a2 = call.chip.startswith("Ascend910B")
    if not a2 or call.ranks <= MANY_RANKS or call.in_flight <= MOST_AT_ONCE:
        return None
    return f"{call.in_flight} calls at once on a communicator of {call.ranks} ranks; valid above {MANY_RANKS} ranks: {MOST_AT_ONCE}"
