"""What synchronous sends and time limits show: orders that hang, and ranks that others wait for in vain."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.limits import HANG
from tests.npu import ranks
from tests.npu.groups import prepared
from tests.processes import RankError

SYNCHRONOUS = {"HOST_HCCL_SYNC": "1"}


def give_up_soon() -> None:
    """From now on this rank waits 3 s for a peer, in runs that are meant to hang; all ranks are here."""
    dist.barrier()
    torch.npu.synchronize()
    os.environ["HOST_HCCL_TIMEOUT"] = "3"


def assert_waits(errors: dict[str, str | None]) -> None:
    """Errors are those of the patterns. Once one rank has given up, those who wait for it may say that it has ended."""
    for pattern, error in errors.items():
        assert error is not None and re.search(
            pattern + r"|rank \d \(RANK \d, pid \d+\) has ended or was killed", error
        ), error
    assert any(re.search(pattern, str(error)) for pattern, error in errors.items()), errors


# ---- two groups -------------------------------------------------------------------------------------------------------


def crosswise(rank: int, size: int) -> None:
    """Rank 0 starts on the default group, all others on the second one, which they finish before they join the first."""
    other = dist.new_group(backend="hccl")
    for group in (None, other):  # makes the communicators
        dist.barrier(group)
    x, y = torch.ones(3, device="npu"), torch.ones(5, device="npu")
    if rank == 0:
        first, second = dist.all_reduce(x, async_op=True), dist.all_reduce(y, group=other, async_op=True)
    else:
        second = dist.all_reduce(y, group=other, async_op=True)
        second.wait()
        torch.npu.current_stream().synchronize()
        assert y.cpu().tolist() == [size] * 5
        first = dist.all_reduce(x, async_op=True)
    first.wait()
    second.wait()
    assert x.cpu().tolist() == [size] * 3 and y.cpu().tolist() == [size] * 5


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.thorough), 3])
def test_two_groups_of_the_same_ranks_run_side_by_side(size: int) -> None:
    """One after the other they would wait for each other: that this run ends is what is tested."""
    done = ranks.run(size, crosswise)
    first, second = (
        next(call for call in done.calls(0, "HcclAllReduce") if call["bytes"] == bytes_) for bytes_ in (12, 20)
    )
    assert first["stream"] != second["stream"]


# ---- orders that hang -------------------------------------------------------------------------------------------------


def alternating(rank: int, size: int, hangs: bool = False) -> None:
    """Even ranks send on the default group and receive on the other, odd ones the other way around."""
    other = prepared(size)
    if hangs:
        give_up_soon()
    x, y = torch.full((16,), float(rank), device="npu"), torch.full((16,), -1.0, device="npu")
    sends, receives = (None, other) if rank % 2 == 0 else (other, None)
    works = [dist.isend(x, (rank + 1) % size, group=sends), dist.irecv(y, (rank - 1) % size, group=receives)]
    for work in works:
        work.wait()
    assert y.cpu().tolist() == [(rank - 1) % size] * 16


def by_direction(rank: int, size: int) -> None:
    """Every rank sends on the group that its receiver receives on: the number of the sending rank chooses it."""
    other = prepared(size)
    x, y = torch.full((16,), float(rank), device="npu"), torch.full((16,), -1.0, device="npu")
    before = (rank - 1) % size
    works = [
        dist.isend(x, (rank + 1) % size, group=other if rank % 2 else None),
        dist.irecv(y, before, group=other if before % 2 else None),
    ]
    for work in works:
        work.wait()
    assert y.cpu().tolist() == [before] * 16


def test_a_ring_of_4_may_alternate_between_two_groups() -> None:
    ranks.run(4, alternating, environment=SYNCHRONOUS)


def test_a_ring_of_3_that_alternates_between_two_groups_hangs_and_says_where() -> None:
    errors = ranks.start(3, alternating, True, environment=SYNCHRONOUS).errors
    send = r"HcclSend on communicator '\w+', rank 1 of 2: waited 3 s until rank 0 \(RANK 0, pid \d+\) takes 64 bytes"
    receive = r"HcclRecv on communicator '\w+', rank 0 of 2: waited 3 s for 64 bytes from rank 1 \(RANK 2, pid \d+\)"
    assert_waits(
        {send: errors[2], receive: errors[0]}
    )  # the edge that closes the ring: its ends are on different groups


@pytest.mark.parametrize(
    "size", [pytest.param(2, marks=pytest.mark.thorough), 3, pytest.param(4, marks=pytest.mark.thorough)]
)
def test_a_ring_of_any_size_that_pairs_by_the_sender_passes(size: int) -> None:
    ranks.run(size, by_direction, environment=SYNCHRONOUS)


def both_send_first(rank: int, size: int, hangs: bool = False) -> None:
    prepared(size)
    if hangs:
        give_up_soon()
    x, y = torch.full((4,), float(rank), device="npu"), torch.empty(4, device="npu")
    works = [dist.isend(x, 1 - rank), dist.irecv(y, 1 - rank)]
    for work in works:
        work.wait()
    assert y.cpu().tolist() == [1 - rank] * 4


def both_in_a_batch(rank: int, size: int) -> None:
    x, y = torch.full((4,), float(rank), device="npu"), torch.empty(4, device="npu")
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, y, 1 - rank)]):
        work.wait()
    assert y.cpu().tolist() == [1 - rank] * 4


def test_a_pair_that_both_sends_first_on_one_communicator_hangs_only_if_sends_are_synchronous() -> None:
    ranks.run(2, both_send_first)
    errors = ranks.start(2, both_send_first, True, environment=SYNCHRONOUS).errors
    told = [rf"HcclSend on .* rank {rank} of 2: waited 3 s until rank {1 - rank} .* takes 16 bytes" for rank in (0, 1)]
    assert_waits(dict(zip(told, errors, strict=True)))
    ranks.run(2, both_in_a_batch, environment=SYNCHRONOUS)


def too_few(rank: int, size: int) -> None:
    x = torch.ones(6, device="npu")
    dist.all_reduce(x)
    if rank != 1:
        dist.all_reduce(x)
    else:
        for other in (0, 2):
            ranks.wait_for_end(other)


def test_a_rank_that_does_not_come_is_named_by_those_who_wait() -> None:
    errors = ranks.start(3, too_few, environment={"HOST_HCCL_TIMEOUT": "", "HCCL_EXEC_TIMEOUT": "3"}).errors
    assert errors[1] is None
    told = r"HcclAllReduce on communicator 'group_name_0' .* rank {} of 3: waited 3 s for 24 bytes from rank 1 \(RANK 1, pid \d+\), in vain"
    assert_waits({told.format(rank): errors[rank] for rank in (0, 2)})


def never_joins(rank: int, size: int) -> None:
    if rank == 1:
        ranks.wait_for_end(0)
    else:
        dist.all_reduce(torch.ones(1, device="npu"))


def test_a_rank_that_does_not_join_a_communicator_is_named() -> None:
    limits = {"HOST_HCCL_TIMEOUT": "", "HCCL_CONNECT_TIMEOUT": "3"}
    error = ranks.start(2, never_joins, environment=limits).errors[0]
    assert error is not None and re.search(
        r"HcclCommInitRootInfoConfig: communicator \w+, rank 0 of 2: rank 1 did not join within 3 s", error
    ), error


def test_a_time_limit_that_is_no_number_is_an_error() -> None:
    for error in ranks.start(2, too_few, environment={"HOST_HCCL_TIMEOUT": "soon"}).errors:
        assert error is not None and "HOST_HCCL_TIMEOUT is soon; valid: seconds, 0 or more" in error, error


# ---- peers that are gone ----------------------------------------------------------------------------------------------


def killed(rank: int, size: int, how: str) -> None:
    x = torch.ones(4, device="npu")
    dist.all_reduce(x)
    torch.npu.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "all_reduce":
        dist.all_reduce(x)
    elif rank == 0:
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, 1)]):
            work.wait()
    torch.npu.synchronize()


@pytest.mark.parametrize("how", ["all_reduce", "irecv"])
def test_a_killed_rank_ends_those_who_wait_for_it_at_once_and_is_named(how: str) -> None:
    done = ranks.start(3, killed, how)
    assert done.outcomes[1].exit == -signal.SIGKILL
    waiting = [0, 2] if how == "all_reduce" else [0]
    for rank in waiting:
        error = done.errors[rank]
        assert error is not None and re.search(
            rf"rank {rank} of 3: rank 1 \(RANK 1, pid \d+\) .*(ended|killed)", error
        ), error
    sockets = Path("/proc/net/unix").read_text()
    for communicator in {line["id"] for line in done.created()}:
        assert communicator not in sockets  # nothing is left over


def killed_with_a_child(rank: int, size: int) -> None:
    x = torch.ones(4, device="npu")
    dist.all_reduce(x)
    torch.npu.synchronize()
    if rank == 1:
        if os.fork() == 0:
            ranks.wait_for_end(0)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(x)
    torch.npu.synchronize()


def test_a_killed_rank_is_noticed_at_once_though_a_child_of_it_lives_on() -> None:
    done = ranks.start(2, killed_with_a_child)
    error = done.errors[0]
    assert error is not None and re.search(r"rank 1 \(RANK 1, pid \d+\) has ended or was killed", error), error


def careless(rank: int, size: int) -> None:
    dist.all_reduce(torch.ones(4 + rank, device="npu"), async_op=True)
    time.sleep(HANG)


def test_torch_npu_ends_a_rank_that_never_asks_after_a_failed_operation() -> None:
    for rank, outcome in enumerate(ranks.start(2, careless).outcomes):
        assert outcome.exit == -signal.SIGABRT
        told = rf"watchdog thread terminated with exception: .* HcclAllReduce .* rank {rank} of 2: the message of rank {1 - rank} "
        assert outcome.error is not None and re.search(told, outcome.error), outcome.error


def ended_early(rank: int, size: int) -> None:
    x = torch.ones(4, device="npu")
    dist.all_reduce(x)
    torch.npu.synchronize()
    if rank == 0:
        dist.all_reduce(x, async_op=True)
        torch.npu.synchronize()


def test_a_rank_that_ends_in_good_order_while_another_waits_for_it_is_named() -> None:
    first, second = ranks.start(2, ended_early).errors
    assert second is None
    assert first is not None and re.search(r"rank 1 \(RANK 1, pid \d+\) has destroyed its communicator", first), first


def stuck(rank: int, size: int) -> Any:
    time.sleep(HANG)


def test_ranks_that_do_not_answer_are_ended_by_the_limit() -> None:
    done = ranks.start(2, stuck, limit=2)
    assert all(error is not None and error.startswith("no answer within 2 s") for error in done.errors)
    with pytest.raises(RankError, match="rank 1: no answer within 2 s"):
        done.values()
