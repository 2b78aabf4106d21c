"""Real ProcessGroupHCCL over the stand-in for HCCL: messages between two ranks, communicators and their streams."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.host_cann import cann_rules_hccl, task_queue
from tests.limits import HANG
from tests.npu import ranks
from tests.npu.groups import MOVED, SIZES, numbers, same


def exchange(rank: int, size: int) -> None:
    for dtype in MOVED:
        for a in range(size):
            for b in range(a + 1, size):
                x = numbers(rank, (4, 5), dtype).to("npu")
                y = torch.empty_like(x)
                if rank == a:
                    dist.send(x, b)
                    dist.recv(y, b)
                    same(y, numbers(b, (4, 5), dtype))
                elif rank == b:
                    dist.recv(y, a)
                    dist.send(x, a)
                    same(y, numbers(a, (4, 5), dtype))


@SIZES
def test_send_and_receive(size: int) -> None:
    done = ranks.run(size, exchange)
    for rank in range(size):
        assert {line["size"] for line in done.created(rank)} == {2}
        peers = {line["id"]: line["peer_process"] for line in done.calls(rank)}
        assert sorted(peers.values()) == [
            r for r in range(size) if r != rank
        ]  # one communicator for both directions of a pair
        assert {line["buffer_mb"] for line in done.created(rank)} == {20}  # P2P_HCCL_BUFFSIZE


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


def test_a_batch_of_cann_8_is_one_HcclBatchSendRecv_which_refuses_two_sends_to_the_same_rank() -> None:
    done = ranks.run(2, batches_of_older_cann, environment={"HOST_CANN_VERSION": "8.3.0"})
    for rank, told in enumerate(done.values()):
        assert [line["items"] for line in done.calls(rank, "HcclBatchSendRecv")] == [
            [["send", 1 - rank, 512], ["recv", 1 - rank, 512]]
        ] * 3
        assert f"two sends to rank {1 - rank} in one list" in told


def batches_against_rules(rank: int, size: int, stages: bool) -> str:
    """What HcclBatchSendRecv says under virtual pipeline stages; or to a second batch while another stream has one, of
    which rank 1's send is still to come."""
    first, second = (dist.new_group([0, 1], backend="hccl") for _ in range(2))
    x = torch.ones(2, device="npu")
    for group in (first, second):
        dist.all_reduce(x, group=group)
    torch.npu.synchronize()

    def batch(operation: Any, group: dist.ProcessGroup) -> list[dist.Work]:
        return dist.batch_isend_irecv([dist.P2POp(operation, x, 1 - rank, group=group)])

    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["refused"])
        if not stages:
            batch(dist.isend, first)
        return ""
    if stages:
        module = ModuleType("megatron.core.parallel_state")
        module.get_virtual_pipeline_model_parallel_world_size = lambda: 2  # type: ignore[attr-defined]
        sys.modules[module.__name__] = module
    else:
        cann_rules_hccl.MANY_RANKS, cann_rules_hccl.MOST_AT_ONCE = 1, 1
        batch(dist.irecv, first)
    with pytest.raises(RuntimeError) as caught:
        works = batch(dist.irecv, second)  # noqa: F841  (stays: see batches_of_older_cann)
        task_queue.wait_for_refusal()
    store.set("refused", "yes")
    ranks.wait_for_end(1)  # what rank 1 sends is received by this process, though its queue has ended
    return str(caught.value)


def test_a_batch_of_cann_8_passes_the_rules_before_it_is_sent() -> None:
    older = {"HOST_CANN_VERSION": "8.3.0"}
    done = ranks.run(2, batches_against_rules, True, environment=older)
    assert "with 2 virtual pipeline stages (rule batch-virtual-pipeline; " in done.values()[0]
    assert not done.calls(0, "HcclBatchSendRecv")
    done = ranks.run(2, batches_against_rules, False, environment=older)
    at_once = done.values()[0]
    assert "2 calls at once on a communicator of 2 ranks" in at_once and "(rule batch-at-once; " in at_once
    assert [line["items"] for line in done.calls(0, "HcclBatchSendRecv")] == [[["recv", 1, 8]]]


def test_messages_of_8_megabytes() -> None:
    ranks.run(3, ring, 8 * 2**20 // 256)


def sub_groups(rank: int, size: int) -> None:
    groups = [
        dist.new_group([0, 2], backend="hccl"),
        dist.new_group([1, 3], backend="hccl"),
        dist.new_group([1, 2, 3], backend="hccl"),
    ]
    for group in groups:
        members = dist.get_process_group_ranks(group)
        if rank in members:
            x = torch.tensor([rank], device="npu")
            dist.all_reduce(x, group=group)
            same(x, torch.tensor([sum(members)]))
            dist.broadcast(x, members[-1], group=group)
            y = torch.empty(len(members), dtype=torch.int64, device="npu")
            dist.all_gather_into_tensor(y, torch.tensor([rank], device="npu"), group=group)
            same(y, torch.tensor(members))


def test_groups_of_some_ranks() -> None:
    done = ranks.run(4, sub_groups)
    assert [line["size"] for line in sorted(done.created(3), key=lambda line: line["time"])] == [2, 3]


def options(rank: int, size: int) -> None:
    import torch_npu

    chosen = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
    chosen.hccl_config = {
        "hccl_buffer_size": 7,
        "qos_traffic_class": 132,
        "qos_service_level": 4,
        "hccl_sdma_qos": 3,
        "hccl_exec_timeout": 77,
    }
    group = dist.new_group(backend="hccl", pg_options=chosen)
    x = torch.ones(2, device="npu")
    dist.all_reduce(x, group=group)


def test_options_of_a_group_reach_hccl() -> None:
    for line in ranks.run(2, options).created():
        assert (line["buffer_mb"], line["traffic_class"], line["service_level"]) == (7, 132, 4)
        assert (line["qos"], line["exec_timeout"]) == (3, 77)


def sub_groups_and_a_pair(rank: int, size: int) -> None:
    sub_groups(rank, size)
    x = torch.full((3,), float(rank), device="npu")
    if rank < 2:
        dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
        same(x, torch.zeros(3))


def test_with_a_rank_table_communicators_are_made_from_it_and_from_one_another(tmp_path: Path) -> None:
    devices = [{"device_id": str(i), "device_ip": f"192.168.1.{i}", "rank_id": str(i)} for i in range(4)]
    servers = [{"server_id": "127.0.0.1", "device": devices}]
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"version": "1.0", "server_count": "1", "status": "completed", "server_list": servers}))
    done = ranks.run(4, sub_groups_and_a_pair, environment={"RANK_TABLE_FILE": str(table)})
    first, *others = sorted(done.created(1), key=lambda line: line["time"])
    assert (first["name"], first["size"]) == ("HcclCommInitClusterInfoConfig", 4)
    assert [(line["name"], line["size"]) for line in others] == [("HcclCreateSubCommConfig", n) for n in (2, 3, 2)]


def many_groups(rank: int, size: int) -> bool:
    """Whether as many files are open after some groups were made, used and destroyed as after the first of them."""

    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    for number in range(6):
        group = dist.new_group(backend="hccl")
        dist.all_reduce(torch.ones(3, device="npu"), group=group)
        torch.npu.synchronize()
        dist.destroy_process_group(group)
        dist.barrier()
        torch.npu.synchronize()
        if number == 0:
            time.sleep(0.1)  # for connections of the first group to close
            after_first = open_files()
    end = time.monotonic() + HANG
    while open_files() > after_first and time.monotonic() < end:
        time.sleep(0.02)
    return open_files() <= after_first


def test_destroyed_groups_leave_no_connection() -> None:
    done = ranks.run(2, many_groups)
    assert done.values() == [True, True]
    for rank in range(2):
        assert sum(line["event"] == "destroy" and line["process"] == rank for line in done.trace) == 7
