"""Real ProcessGroupHCCL over the stand-in for HCCL: values, communicators and their streams, and what goes wrong without a
wait, in a wrong order, or with ranks that do not agree or are gone.

Sends are synchronous where a test says so, so that an order that may hang does hang; time limits then name the ranks.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.host_cann import control, task_queue
from tests.npu import ranks

REDUCED = [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64]
MOVED = [*REDUCED, torch.float64, torch.uint8, torch.bool]
SYNCHRONOUS = {"HOST_HCCL_SYNC": "1"}
MOMENT = 0.06  # seconds that a stream is held where a rank waits: enough for what does not wait
SIZES = pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.thorough)])


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.device.type == "npu" and got.dtype == want.dtype
    assert torch.equal(got.cpu(), want), (got.cpu(), want)


def numbers(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, others on each rank: their sums are exact in every type."""
    made = torch.randint(0, 5, shape, generator=torch.Generator().manual_seed(rank))
    return made.to(dtype)


def prepared(size: int) -> dist.ProcessGroup:
    """A second group; on it and on the default one, the communicators of all pairs, made in one order by all ranks."""
    other, rank = dist.new_group(backend="hccl"), dist.get_rank()
    x = torch.zeros(1, device="npu")
    for group in (None, other):
        for a in range(size):
            for b in range(a + 1, size):
                if rank == a:
                    dist.isend(x, b, group=group).wait()
                elif rank == b:
                    dist.irecv(x, a, group=group).wait()
    torch.npu.synchronize()
    return other


# values


def messages_and_collectives(rank: int, size: int) -> None:
    for dtype in REDUCED:
        parts = [numbers(r, (size, 3), dtype) for r in range(size)]
        for op, want in (
            (dist.ReduceOp.SUM, torch.stack(parts).sum(0).to(dtype)),
            (dist.ReduceOp.MAX, torch.stack(parts).amax(0)),
            (dist.ReduceOp.MIN, torch.stack(parts).amin(0)),
        ):
            x = parts[rank].to("npu")
            dist.all_reduce(x, op=op)
            same(x, want)
        x = torch.empty(3, dtype=dtype, device="npu")
        dist.reduce_scatter_tensor(x, parts[rank].to("npu"))
        same(x, torch.stack(parts).sum(0).to(dtype)[rank])
    for dtype in MOVED:
        parts = [numbers(r, (size, 3), dtype) for r in range(size)]
        own = parts[rank].to("npu")
        x = torch.empty(size * size, 3, dtype=dtype, device="npu")
        dist.all_gather_into_tensor(x, own)
        same(x, torch.cat(parts))
        x = own.clone()
        dist.broadcast(x, size - 1)
        same(x, parts[-1])
        # rank r sends r + i rows to rank i; the first sends none to itself
        sent = [torch.full((r + i, 2), 10 * r + i).to(dtype) for r in range(size) for i in range(size)]
        rows = [len(sent[r * size + i]) for r in range(size) for i in range(size)]
        x = torch.empty(sum(rows[rank::size]), 2, dtype=dtype, device="npu")
        lengths = rows[rank * size : (rank + 1) * size]
        dist.all_to_all_single(x, torch.cat(sent[rank * size : (rank + 1) * size]).to("npu"), rows[rank::size], lengths)
        same(x, torch.cat(sent[rank::size]))
        for peer in range(size):  # each pair: the lower rank sends first
            if peer != rank:
                y = torch.empty_like(own)
                for turn in (rank, peer) if rank < peer else (peer, rank):
                    dist.send(own, peer) if turn == rank else dist.recv(y, peer)
                same(y, parts[peer])
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    assert objects == [{"rank": r, "text": "x" * r} for r in range(size)]
    dist.barrier()


@SIZES
def test_messages_and_collectives(size: int) -> None:
    done = ranks.run(size, messages_and_collectives)
    for rank in range(size):  # one communicator for both directions of a pair, and that of all
        assert sorted(line["size"] for line in done.created(rank)) == [2] * (size - 1) + [size]


def reduction_refused(rank: int, size: int, dtype: torch.dtype, op: str) -> str:
    """What is said to a reduction: at the call, or by torch_npu's queue, for which it is the last call."""
    work = None
    with pytest.raises(RuntimeError) as caught:
        work = dist.all_reduce(torch.ones(2, dtype=dtype).to("npu"), op=getattr(dist.ReduceOp, op), async_op=True)
        task_queue.wait_for_refusal()
    del work  # not before: ending its events may take the error of the queue, and drop it
    return str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "op", "says"),
    [(torch.float64, "SUM", "Unsupported data type"), (torch.bfloat16, "PRODUCT", "no product of bfp16")],
    ids=str,
)
def test_reductions_that_hccl_does_not_have_are_refused(dtype: torch.dtype, op: str, says: str) -> None:
    for told in ranks.run(2, reduction_refused, dtype, op).values():
        assert says in told, told


# communicators and streams


def two_groups(rank: int, size: int) -> int:
    """isend and irecv around a ring, on the default group and on another of the same ranks; the current stream."""
    other = dist.new_group(backend="hccl")
    x, y = torch.full((8,), float(rank), device="npu"), torch.empty(8, device="npu")
    after, before = (rank + 1) % size, (rank - 1) % size
    for group in (None, other):
        for _ in range(2):
            order = [lambda: dist.isend(x, after, group=group), lambda: dist.irecv(y, before, group=group)]  # noqa: B023
            works = []
            for post in order if rank % 2 == 0 else order[::-1]:
                works.append(post())
                torch.npu.current_stream().npu_stream  # noqa: B018  (torch_npu's queue has made the call)
            for work in works:
                work.wait()
            same(y, torch.full((8,), float(before)))
    return torch.npu.current_stream().npu_stream


def test_isend_and_irecv_make_a_communicator_and_a_stream_for_each_group_and_pair_when_first_used() -> None:
    done = ranks.run(4, two_groups)
    for rank, current in enumerate(done.values()):
        calls = done.calls(rank)
        assert (
            [line["name"] for line in calls].count("HcclSend")
            == [line["name"] for line in calls].count("HcclRecv")
            == 4
        )
        made = done.created(rank)
        assert [line["size"] for line in made] == [2] * 4  # two groups, two neighbours
        streams = {line["id"]: {call["stream"] for call in calls if call["id"] == line["id"]} for line in made}
        assert all(
            len(streams_of_one) == 1 for streams_of_one in streams.values()
        )  # a communicator runs on one stream,
        assert len(set.union(*streams.values())) == 4  # which is its own
        assert f"{current:#x}" not in set.union(*streams.values())
        for line in made:  # lazily: no communicator before the call that uses it
            first = min(call["time"] for call in calls if call["id"] == line["id"])
            assert not [other for other in made if line["time"] < other["time"] < first]


def test_without_buffers_for_pairs_isend_and_irecv_share_the_communicator_and_the_stream_of_the_group() -> None:
    done = ranks.run(4, two_groups, environment={"P2P_HCCL_BUFFSIZE": "0"})
    for rank in range(4):
        assert [line["size"] for line in done.created(rank)] == [4, 4]
        assert len({(line["comm"], line["stream"]) for line in done.calls(rank)}) == 2


def ring(rank: int, size: int, rows: int) -> None:
    x = torch.empty(rows, 64).fill_(rank + 1)
    x[-1] = torch.arange(64.0) + rank
    y = torch.empty(rows, 64, device="npu")
    after, before = (rank + 1) % size, (rank - 1) % size
    for _ in range(3):
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x.to("npu"), after), dist.P2POp(dist.irecv, y, before)]
        ):
            work.wait()
        want = torch.empty(rows, 64).fill_(before + 1)
        want[-1] = torch.arange(64.0) + before
        same(y, want)
    dist.all_reduce(y)


@SIZES
def test_a_batch_is_one_launch_on_the_communicator_and_stream_of_the_group(size: int) -> None:
    done = ranks.run(size, ring, 2)
    for rank in range(size):
        assert [line["size"] for line in done.created(rank)] == [size]
        after, before = (rank + 1) % size, (rank - 1) % size
        batches = done.calls(rank, "HcclGroupEnd")  # CANN 9: sends and receives between HcclGroupStart and HcclGroupEnd
        assert [line["items"] for line in batches] == [[["send", after, 512], ["recv", before, 512]]] * 3
        assert [line["name"] for line in done.calls(rank)] == ["HcclGroupEnd"] * 3 + ["HcclAllReduce"]
        assert len({line["stream"] for line in done.calls(rank)}) == 1  # collectives of the group share it


def batches_of_older_cann(rank: int, size: int) -> str:
    ring(rank, size, 2)
    x, y = torch.ones(2, device="npu"), torch.empty(2, device="npu")
    peer = 1 - rank
    try:
        works = dist.batch_isend_irecv([*[dist.P2POp(dist.isend, x, peer)] * 2, *[dist.P2POp(dist.irecv, y, peer)] * 2])
        task_queue.wait_for_refusal()  # works stay, as ending their events may take the error
    except RuntimeError as error:
        return str(error)
    return f"{len(works)} works"


@pytest.mark.thorough  # needs ranks whose torch_npu was imported with another version of CANN
def test_a_batch_of_cann_8_is_one_HcclBatchSendRecv_which_refuses_two_sends_to_the_same_rank() -> None:
    done = ranks.run(2, batches_of_older_cann, environment={"HOST_CANN_VERSION": "8.3.0"})
    for rank, told in enumerate(done.values()):
        assert [line["items"] for line in done.calls(rank, "HcclBatchSendRecv")] == [
            [["send", 1 - rank, 512], ["recv", 1 - rank, 512]]
        ] * 3
        assert f"two sends to rank {1 - rank} in one list" in told


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


def test_two_groups_of_the_same_ranks_run_side_by_side() -> None:
    """One after the other they would wait for each other: that this run ends is what is tested."""
    done = ranks.run(3, crosswise)
    first, second = (
        next(call for call in done.calls(0, "HcclAllReduce") if call["bytes"] == bytes_) for bytes_ in (12, 20)
    )
    assert first["stream"] != second["stream"]


# waits: a stream is held until the rank without a wait has read or written too early, so the damage is certain


def new(value: float) -> torch.Tensor:
    x = torch.full((1000,), value, device="npu")
    torch.npu.synchronize()
    return x


def is_filled(x: torch.Tensor, value: float) -> bool:
    return x.cpu().tolist() == [value] * 1000


def receive_and_read(rank: int, size: int) -> tuple[bool, bool]:
    """Whether the receiver sees the old contents before wait(), and the message after it."""
    prepared(size)
    x, y, side = new(3.0), new(-1.0), torch.npu.Stream()
    if rank == 0:
        dist.isend(x, 1).wait()
        return True, True
    with control.held(side):
        with torch.npu.stream(side):
            work = dist.irecv(y, 0)
        is_old = is_filled(y, -1.0)
    work.wait()
    return is_old, is_filled(y, 3.0)


def test_a_receive_buffer_holds_the_message_only_after_wait() -> None:
    assert ranks.run(2, receive_and_read).values() == [(True, True)] * 2


def send_and_overwrite(rank: int, size: int, waits: bool) -> bool:
    """Whether the message arrives as it was when it was sent."""
    prepared(size)
    x, y, side = new(3.0), new(-1.0), torch.npu.Stream()
    if rank == 1:
        dist.irecv(y, 0).wait()
        return is_filled(y, 3.0)
    with control.held(side, MOMENT if waits else None):
        with torch.npu.stream(side):
            work = dist.isend(x, 1)
        if waits:
            work.wait()
        x.fill_(-2.0)
        torch.npu.current_stream().synchronize()
    work.wait()
    return True


def test_a_send_buffer_may_be_overwritten_only_after_wait() -> None:
    assert ranks.run(2, send_and_overwrite, True).values() == [True, True]
    assert ranks.run(2, send_and_overwrite, False).values() == [True, False]


# orders that hang


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


def test_a_ring_of_4_may_alternate_between_two_groups() -> None:
    ranks.run(4, alternating, environment=SYNCHRONOUS)


def test_a_ring_of_3_that_alternates_between_two_groups_hangs_and_says_where() -> None:
    errors = ranks.start(3, alternating, True, environment=SYNCHRONOUS).errors
    send = r"HcclSend on communicator '\w+', rank 1 of 2: waited 3 s until rank 0 \(RANK 0, pid \d+\) takes 64 bytes"
    receive = r"HcclRecv on communicator '\w+', rank 0 of 2: waited 3 s for 64 bytes from rank 1 \(RANK 2, pid \d+\)"
    assert_waits(
        {send: errors[2], receive: errors[0]}
    )  # the edge that closes the ring: its ends are on different groups


# ranks that do not agree, do not come, or are gone


def sizes(rank: int, size: int) -> None:
    x = torch.ones(4 + rank, device="npu")
    dist.send(x, 0) if rank else dist.recv(x, 1)


def calls(rank: int, size: int) -> None:
    x = torch.ones(4, device="npu")
    dist.broadcast(x, 1) if rank else dist.all_reduce(x)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (sizes, "HcclRecv .* rank 0 of 2: the message of rank 1 .* has 20 bytes, this rank expects 16 bytes"),
        (
            calls,
            "HcclAllReduce .* rank 0 of 2: .* rank 1 .* comes from HcclBroadcast .* the ranks make different calls",
        ),
    ],
)
def test_ranks_that_do_not_agree_get_an_error_that_names_both(function: Any, told: str) -> None:
    error = ranks.start(2, function).errors[0]
    assert error is not None and re.search(told, error), error


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
