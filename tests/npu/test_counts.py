"""How often fused operators and HCCL are called for one layer's attention, against what the plan says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mindspeed_cp import Plan
from mindspeed_cp.comm.directional_groups import message_pairs
from mindspeed_cp.layout import redistribution as layout_redistribution
from mindspeed_cp.layout.redistribution import PACKED_BYTES
from mindspeed_cp.ops.attention.backends import BACKENDS
from tests.engine.cases import Case, attend, local
from tests.npu.ranks import Run, run

LENGTHS = (61, 5, 0, 44)
CASES = {
    "ring, packed": Case(LENGTHS, 4),
    "ring, packed, ALiBi": Case(LENGTHS, 4, alibi=True),
    "odd ring": Case((90,), 3),
    "direct": Case(LENGTHS, 4, algorithm="direct"),
    "ulysses": Case(LENGTHS, 4, algorithm="ulysses"),
    "hybrid": Case(LENGTHS, 4, algorithm="hybrid"),
}
SENT = ("HcclSend", "HcclRecv")
BATCHES = ("HcclGroupEnd", "HcclBatchSendRecv")


def attend_once(
    rank: int, size: int, case: Case, directional: bool, packed_bytes: int = PACKED_BYTES
) -> dict[str, int]:
    """Calls of the fused operators by one layer's forward and backward; q, k and v of at most so many bytes are one message."""
    layout_redistribution.PACKED_BYTES = packed_bytes
    from mindspeed_cp.comm.directional_groups import open_directional_groups, warm_up
    from tests.host_cann.oracle import calls

    plan, leaves, dout = local(rank, case)
    if directional:
        open_directional_groups(device="npu")
    warm_up(plan, device="npu")
    torch.distributed.barrier()
    on_npu = [x.detach().to("npu").requires_grad_() for x in leaves]
    calls.clear()
    attend(case, plan, on_npu, None).backward(dout.to("npu"))
    torch.npu.synchronize()
    torch.distributed.barrier()
    return {name: sum(call.operator == name for call in calls) for name in ("fused_attention", "fused_attention_grad")}


def lowered(plan: Plan, rank: int, case: Case, direction: str) -> int:
    """Calls that the npu backend makes of a rank's tiles."""
    program = getattr(plan, direction)
    rows = int(plan.q_layout_compute.token_counts[rank])
    calls = BACKENDS["npu"].lower(direction, program.tiles(rank), rows, plan.attention, case.dtype)
    return sum(map(len, calls.values()))


def between_barriers(done: Run, rank: int) -> list[dict[str, Any]]:
    """HCCL's calls of a rank between the two barriers of `attend_once`, which are its last collectives."""
    calls = done.calls(rank)
    barriers = [index for index, call in enumerate(calls) if call["name"] == "HcclAllReduce"]
    return calls[barriers[-2] + 1 : barriers[-1]]


def messages_of(plan: Plan, rank: int) -> list[tuple[str, int, int, bool]]:
    """(program, step, peer, is sent) of every message of a rank; each is two tensors."""
    launches = []
    for name in ("forward", "backward"):
        program = getattr(plan, name)
        for messages in (program.reduce, program.fetch):
            for item in messages.items[(messages.items["src"] == rank) | (messages.items["dst"] == rank)]:
                sends = bool(item["src"] == rank)
                launches.append((name, int(item["start"]), int(item["dst" if sends else "src"]), sends))
    return launches


#: Both kinds of transfers for the ring; by default one of them for the others.
DEFAULT = {
    ("ring, packed", False), ("ring, packed", True), ("odd ring", True), ("direct", False), ("ulysses", False),
    ("hybrid", True),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "directional"),
    [
        pytest.param(
            name, directional, id=f"{name}-{'directional' if directional else 'batched'}",
            marks=() if (name, directional) in DEFAULT else pytest.mark.thorough,
        )
        for name in CASES
        for directional in (False, True)
    ],
)  # fmt: skip
def test_calls_are_those_of_the_plan(name: str, directional: bool) -> None:
    case = CASES[name]
    plan = case.plan()
    done = run(case.ranks, attend_once, case, directional)
    for rank, counted in enumerate(done.values()):
        assert counted["fused_attention"] == lowered(plan, rank, case, "forward")
        assert counted["fused_attention_grad"] == lowered(plan, rank, case, "backward")
        calls, messages = between_barriers(done, rank), messages_of(plan, rank)
        assert calls.pop(0)["name"] == "HcclAllGather", "the digest of the call"
        if directional:  # K and V of a message are two; all-to-alls are launches of the group
            singles = [call for call in calls if call["name"] in SENT]
            assert len(singles) == 2 * len(messages)
            assert sum(call["name"] == "HcclSend" for call in singles) == 2 * sum(sends for *_, sends in messages)
            launches = 0
        else:  # in a launch every peer is once: as many launches as the busiest (peer, direction) of a step has tensors
            steps = {(program, step) for program, step, _, _ in messages}
            per_step = {
                step: max(
                    2 * sum(m[:2] == step and m[2:] == end for m in messages) for end in {m[2:] for m in messages}
                )
                for step in steps
            }
            launches = sum(per_step.values())
        launches += moves_of(plan, rank, 1)
        assert sum(call["name"] in BATCHES for call in calls) == launches
        assert len(calls) == launches + (2 * len(messages) if directional else 0)


def test_large_messages_of_q_k_and_v_are_launches_of_their_own() -> None:
    case = CASES["ulysses"]
    done = run(case.ranks, attend_once, case, False, 0)
    done.values()
    for rank in range(case.ranks):
        calls = [call for call in between_barriers(done, rank) if call["name"] in BATCHES]
        assert len(calls) == moves_of(case.plan(), rank, 3)


def moves_of(plan: Plan, rank: int, messages: int) -> int:
    """Launches of the all-to-alls of q, k and v, which are so many messages, of the output, of its gradient, and of those of
    q, k and v."""
    parts = (
        [] if plan.q_redistribution is None else [*plan.q_redistribution.rank_pairs, *plan.kv_redistribution.rank_pairs]
    )
    moves = any(rank in (part["src"], part["dst"]) and part["src"] != part["dst"] for part in parts)
    return messages + 1 + 1 + messages if moves else 0


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.thorough)])
def test_a_ring_over_lanes_has_a_stream_for_each_neighbour_and_direction(size: int) -> None:
    """Even for two ranks, which are each other's only neighbour; and odd rings close."""
    case = Case((80,), size)
    done = run(size, attend_once, case, True, environment={"HOST_HCCL_SYNC": "1", "HOST_CANN_JITTER_US": "300"})
    for rank in range(size):
        singles = [call for call in between_barriers(done, rank) if call["name"] in SENT]
        ways = {(call["name"], call["peer"]) for call in singles}
        assert len({call["stream"] for call in singles}) == len(ways) == 2
    assert message_pairs(case.plan()) == {(rank, (rank + 1) % size) for rank in range(size)}


def test_communicators_are_made_before_the_first_step() -> None:
    """Those of the directional groups' pairs in the warm-up: nothing is made between the barriers around the attention."""
    done = run(3, attend_once, Case((80,), 3), True)
    for rank in range(3):
        first = between_barriers(done, rank)[0]["time"]
        assert done.created(rank) and all(made["time"] < first for made in done.created(rank))
