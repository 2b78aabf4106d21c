"""Real ProcessGroupHCCL over the stand-in for HCCL: values, communicators, streams, refusals."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.npu import ranks

SIZES = pytest.mark.parametrize("size", [2, 3, 4])
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
REDUCED = [*FLOATS, torch.int8, torch.int16, torch.int32, torch.int64]
MOVED = [*REDUCED, torch.float64, torch.uint8, torch.bool]


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.device.type == "npu" and got.dtype == want.dtype
    assert torch.equal(got.cpu(), want), (got.cpu(), want)


def numbers(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, others on each rank: their sums are exact in every type."""
    made = torch.randint(0, 5, shape, generator=torch.Generator().manual_seed(rank))
    return made.to(dtype)


def test_every_entry_point_that_torch_npu_looks_up_is_there() -> None:
    from tests.host_cann import build

    wheel = build._package("torch_npu")
    include = wheel / "include"
    registered = set(
        re.findall(
            r"TORCH_NPU_(?:LOAD|REGISTER)_FUNCTION\((?:libhcomm, )?(Hc\w+)\)",
            (include / "torch_npu/csrc/distributed/HcclCompile.h").read_text(),
        )
    )
    declared = set(re.findall(r"\b(Hccl[A-Z]\w+)\(", (include / "third_party/hccl/inc/hccl/hccl.h").read_text()))
    texts = set((wheel / "lib/libtorch_npu.so").read_bytes().split(b"\0"))
    wanted = registered | {name for name in declared if name.encode() in texts}
    assert {"HcclSend", "HcclGroupStart", "HcclGetCommName", "HcommMemAlloc"} <= wanted
    library = Path(ranks.folder()) / "libhccl.so"
    listing = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout
    assert wanted - {line.split()[-1] for line in listing.splitlines()} == set()


# ---- values -----------------------------------------------------------------------------------------------------------


def collectives(rank: int, size: int) -> None:
    for dtype in REDUCED:
        parts = [numbers(r, (size, 3), dtype) for r in range(size)]
        total = torch.stack(parts).sum(0).to(dtype)
        x = parts[rank].to("npu")
        dist.all_reduce(x)
        same(x, total)
        for op, want in (
            (dist.ReduceOp.MAX, torch.stack(parts).amax(0)),
            (dist.ReduceOp.MIN, torch.stack(parts).amin(0)),
        ):
            x = parts[rank].to("npu")
            dist.all_reduce(x, op=op)
            same(x, want)
        x = torch.empty(3, dtype=dtype, device="npu")
        dist.reduce_scatter_tensor(x, parts[rank].to("npu"))
        same(x, total[rank])
        x = torch.empty(3, dtype=dtype, device="npu")
        dist.reduce_scatter(x, list(parts[rank].to("npu")))
        same(x, total[rank])
        for root in range(size):
            x = parts[rank].to("npu")
            dist.reduce(x, root)
            if rank == root:
                same(x, total)
    for dtype in MOVED:
        parts = [numbers(r, (size, 3), dtype) for r in range(size)]
        mine = parts[rank].to("npu")
        x = torch.empty(size * size, 3, dtype=dtype, device="npu")
        dist.all_gather_into_tensor(x, mine)
        same(x, torch.cat(parts))
        several = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(several, mine)
        for x, want in zip(several, parts, strict=True):
            same(x, want)
        for root in range(size):
            x = mine.clone()
            dist.broadcast(x, root)
            same(x, parts[root])
            x = torch.empty(3, dtype=dtype, device="npu")
            dist.scatter(x, list(mine) if rank == root else None, src=root)
            same(x, parts[root][rank])
        x = torch.empty_like(mine)
        dist.all_to_all_single(x, mine)
        same(x, torch.stack([part[rank] for part in parts]))
        several = [torch.empty(3, dtype=dtype, device="npu") for _ in range(size)]
        dist.all_to_all(several, list(mine))
        for x, part in zip(several, parts, strict=True):
            same(x, part[rank])
        # rank r sends r + i rows to rank i; the first sends none to itself
        sent = [torch.full((r + i, 2), 10 * r + i).to(dtype) for r in range(size) for i in range(size)]
        rows = [len(sent[r * size + i]) for r in range(size) for i in range(size)]
        x = torch.empty(sum(rows[rank::size]), 2, dtype=dtype, device="npu")
        lengths = rows[rank * size : (rank + 1) * size]
        dist.all_to_all_single(x, torch.cat(sent[rank * size : (rank + 1) * size]).to("npu"), rows[rank::size], lengths)
        same(x, torch.cat(sent[rank::size]))


@SIZES
def test_collectives(size: int) -> None:
    ranks.run(size, collectives)


def uneven(rank: int, size: int) -> None:
    parts = [numbers(r, (2 * r + 1, 3), torch.float32) for r in range(size)]
    several = [torch.empty(part.shape, device="npu") for part in parts]
    dist.all_gather(several, parts[rank].to("npu"))
    for x, want in zip(several, parts, strict=True):
        same(x, want)
    total = [sum(numbers(10 * r + i, (i + 1,), torch.float32) for r in range(size)) for i in range(size)]
    x = torch.empty(rank + 1, device="npu")
    dist.reduce_scatter(x, [numbers(10 * rank + i, (i + 1,), torch.float32).to("npu") for i in range(size)])
    same(x, total[rank])
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    assert objects == [{"rank": r, "text": "x" * r} for r in range(size)]
    dist.barrier()


@SIZES
def test_collectives_of_uneven_parts_and_of_objects(size: int) -> None:
    ranks.run(size, uneven)


def rounding(rank: int, size: int) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        # from far below the smallest normal number of fp16 to its largest, ties to even among them
        parts = [
            torch.randn(4000, generator=torch.Generator().manual_seed(r)) * 2.0 ** torch.arange(-30, 10).repeat(100)
            for r in range(size)
        ]
        parts = [part.to(dtype) for part in parts]
        want = parts[0].float()
        for part in parts[1:]:
            want = want + part.float()
        x = parts[rank].to("npu")
        dist.all_reduce(x)
        same(x, want.to(dtype))
    x = torch.full((2,), 60000.0, dtype=torch.float16, device="npu")
    dist.all_reduce(x)
    assert torch.isinf(x.cpu()).all()
    x = torch.tensor([float("nan"), float("inf"), -float("inf")], dtype=torch.float16, device="npu")
    dist.all_reduce(x)
    assert torch.isnan(x.cpu()[0]) and x.cpu()[1:].tolist() == [float("inf"), -float("inf")]


def test_reductions_add_in_fp32_in_the_order_of_ranks_and_round_once() -> None:
    ranks.run(3, rounding)


def reductions_refused(rank: int, size: int) -> list[str]:
    told = []
    for dtype, op in (
        (torch.float64, dist.ReduceOp.SUM),
        (torch.bfloat16, dist.ReduceOp.PRODUCT),
        (torch.int16, dist.ReduceOp.PRODUCT),
    ):
        try:
            dist.all_reduce(torch.ones(2, dtype=dtype).to("npu"), op=op)
            told.append("")
        except RuntimeError as error:
            told.append(str(error))
    return told


def test_reductions_that_hccl_does_not_have_are_refused() -> None:
    for told in ranks.run(2, reductions_refused).values():
        assert all(told), told


# ---- point to point, streams and communicators ------------------------------------------------------------------------


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
            for work in [post() for post in (order if rank % 2 == 0 else order[::-1])]:
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
        assert all(len(found) == 1 for found in streams.values())  # a communicator runs on one stream,
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
        dist.batch_isend_irecv([*[dist.P2POp(dist.isend, x, peer)] * 2, *[dist.P2POp(dist.irecv, y, peer)] * 2])
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_batch_of_cann_8_is_one_HcclBatchSendRecv_which_refuses_two_sends_to_the_same_rank() -> None:
    done = ranks.run(2, batches_of_older_cann, environment={"HOST_CANN_VERSION": "8.3.0"})
    for rank, told in enumerate(done.values()):
        assert [line["items"] for line in done.calls(rank, "HcclBatchSendRecv")] == [
            [["send", 1 - rank, 512], ["recv", 1 - rank, 512]]
        ] * 3
        assert f"two sends to rank {1 - rank} in one list" in told


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


def many_groups(rank: int, size: int) -> list[int]:
    """Open files after each of some groups was made, used and destroyed."""
    found = []
    for _ in range(6):
        group = dist.new_group(backend="hccl")
        dist.all_reduce(torch.ones(3, device="npu"), group=group)
        torch.npu.synchronize()
        dist.destroy_process_group(group)
        dist.barrier()
        torch.npu.synchronize()
        time.sleep(0.1)
        found.append(len(os.listdir("/proc/self/fd")))
    return found


def test_destroyed_groups_leave_no_connection() -> None:
    for rank, found in enumerate((done := ranks.run(2, many_groups)).values()):
        assert len(set(found)) == 1, found
        assert sum(line["event"] == "destroy" and line["process"] == rank for line in done.trace) == 7


# ---- what ranks do not agree on ---------------------------------------------------------------------------------------


def sizes(rank: int, size: int) -> None:
    x = torch.ones(4 + rank, device="npu")
    dist.send(x, 0) if rank else dist.recv(x, 1)


def counts(rank: int, size: int) -> None:
    dist.all_reduce(torch.ones(4 + rank, device="npu"))


def types(rank: int, size: int) -> None:
    dist.all_reduce(torch.ones(4, dtype=[torch.int32, torch.float32][rank]).to("npu"))


def calls(rank: int, size: int) -> None:
    x = torch.ones(4, device="npu")
    dist.broadcast(x, 1) if rank else dist.all_reduce(x)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (
            sizes,
            "HcclRecv on communicator .* rank 0 of 2: the message of rank 1 .* has 20 bytes, this rank expects 16 bytes",
        ),
        (
            counts,
            "HcclAllReduce on communicator 'group_name_0' .* rank 0 of 2: .* rank 1 .* has 20 bytes, this rank expects 16",
        ),
        (types, "HcclAllReduce on communicator .* rank 0 of 2: .* rank 1 .* has type fp32, this rank expects int32"),
        (
            calls,
            "HcclAllReduce on communicator .* rank 0 of 2: .* rank 1 .* comes from HcclBroadcast .* the ranks make different calls",
        ),
    ],
)
def test_ranks_that_do_not_agree_get_an_error_that_names_both(function: Any, told: str) -> None:
    error = ranks.start(2, function).errors[0]
    assert error is not None and re.search(told, error), error
