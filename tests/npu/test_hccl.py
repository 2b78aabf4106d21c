"""Real ProcessGroupHCCL over the stand-in for HCCL: values, and what ranks do not agree on."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.host_cann import task_queue
from tests.npu import ranks
from tests.npu.groups import MOVED, REDUCED, SIZES, numbers, same


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
        own = parts[rank].to("npu")
        x = torch.empty(size * size, 3, dtype=dtype, device="npu")
        dist.all_gather_into_tensor(x, own)
        same(x, torch.cat(parts))
        several = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(several, own)
        for x, want in zip(several, parts, strict=True):
            same(x, want)
        for root in range(size):
            x = own.clone()
            dist.broadcast(x, root)
            same(x, parts[root])
            x = torch.empty(3, dtype=dtype, device="npu")
            dist.scatter(x, list(own) if rank == root else None, src=root)
            same(x, parts[root][rank])
        x = torch.empty_like(own)
        dist.all_to_all_single(x, own)
        same(x, torch.stack([part[rank] for part in parts]))
        several = [torch.empty(3, dtype=dtype, device="npu") for _ in range(size)]
        dist.all_to_all(several, list(own))
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
    [
        (torch.float64, "SUM", "Unsupported data type"),
        (torch.bfloat16, "PRODUCT", "no product of bfp16"),
        (torch.int16, "PRODUCT", "no product of int16"),
    ],
    ids=str,
)
def test_reductions_that_hccl_does_not_have_are_refused(dtype: torch.dtype, op: str, says: str) -> None:
    for told in ranks.run(2, reduction_refused, dtype, op).values():
        assert says in told, told


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
