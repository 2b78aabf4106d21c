"""A layer's attention neither waits for the device nor makes anything anew: it is all there once a plan is prepared."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_cp.engine import prepare
from mindspeed_cp.ops.attention.npu.backend import NpuAttention
from tests.engine.cases import Case, attend, local
from tests.npu.ranks import run

LENGTHS = (61, 5, 0, 44, 1, 30)
CASES = {
    "packed": Case(LENGTHS, 2),
    "ALiBi": Case(LENGTHS, 2, alibi=True),
    "window": Case(LENGTHS, 2, window=(17, 0)),
    "grouped heads, uneven": Case(LENGTHS, 2, heads=6, kv_heads=3, algorithm="ulysses"),
    "direct": Case(LENGTHS, 2, algorithm="direct"),
}

#: Operators that make the host wait for the device, or do so in one of torch_npu's versions of them.
WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "equal",
    "is_nonzero",
    "index_fill_",
    "masked_select",
    "unique_dim",
    "_unique2",
}


class Seen(TorchDispatchMode):
    """Operators on the way to the device, and copies between it and the host that wait for each other."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        given = [x for x in args if isinstance(x, torch.Tensor)]
        made = func(*args, **(kwargs or {}))
        places = {x.device.type for x in (*given, made) if isinstance(x, torch.Tensor)}
        waits = len(places) > 1 and not (name == "copy_" and (kwargs or {}).get("non_blocking", args[2:] == (True,)))
        self.names.append("copy between host and device" if waits else name)
        return made


def first_layers(rank: int, size: int) -> dict[str, tuple[list[str], list[str]]]:
    """What the first layer's forward and backward of each case do that they should not."""
    return {name: one_layer(rank, case) for name, case in CASES.items()}


def one_layer(rank: int, case: Case) -> tuple[list[str], list[str]]:
    plan, leaves, dout = local(rank, case)
    prepare(plan, rank, case.dtype, device=torch.device("npu", rank))
    on_npu = [x.detach().to("npu").requires_grad_() for x in leaves]
    on_npu_dout = dout.to("npu")
    results = []
    with Seen() as forward:
        out = attend(case, plan, on_npu, None)
    results.append(forward.names)
    with Seen() as backward:
        torch.autograd.grad(out, on_npu, on_npu_dout)
    results.append(backward.names)
    assert all(len(names) > 10 for names in results)
    bad = WAITS | {"copy between host and device"}
    return tuple([name for name in names if name in bad] for names in results)


def test_the_first_layer_neither_waits_nor_copies() -> None:
    for layers in run(2, first_layers).values():
        assert layers == dict.fromkeys(CASES, ([], []))


def ones_made(rank: int, size: int) -> list[int]:
    """Tensors of ones that each of three layers makes, where the gradient gets lse and 1."""
    case, backend = CASES["ALiBi"], NpuAttention(statistics="lse")
    plan, leaves, dout = local(rank, case)
    prepare(plan, rank, case.dtype, backend, torch.device("npu", rank))
    on_npu, on_npu_dout = [x.detach().to("npu").requires_grad_() for x in leaves], dout.to("npu")
    results = []
    for _ in range(3):
        with Seen() as seen:
            torch.autograd.grad(attend(case, plan, on_npu, None, backend=backend), on_npu, on_npu_dout)
        results.append(sum(name in ("ones", "ones_like") for name in seen.names))
    return results


def test_sums_of_ones_are_made_once_for_all_layers() -> None:
    for first, *later in run(2, ones_made).values():
        assert first > 0 and later == [0, 0]
