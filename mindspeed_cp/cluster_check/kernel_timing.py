"""Seconds of the kernels of a rank, and how much of a transfer hides behind them. Runs in the workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mindspeed_cp.calibrate.kernels import KernelSizes, attention_call, measure_kernels
from mindspeed_cp.cluster_check.measuring_rank import MeasuringRank
from mindspeed_cp.comm import Transfer

TORCH_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ROUNDS = 3


def _sizes(item: dict[str, Any]) -> KernelSizes:
    return KernelSizes(
        item["heads"], item["kv_heads"], item["head_dim"], item["longest"], item["hidden_size"],
        TORCH_TYPES[item["dtype"]], item["seconds"],
    )  # fmt: skip


def time_kernels(context: MeasuringRank, item: dict[str, Any]) -> dict[str, Any]:
    """Time attention and matrix products, on all ranks at the same time as in training.

    Args:
        context: this rank.
        item: the fields of KernelSizes, with the name of the type.

    Returns:
        {"measurements": [{"kind", "seconds", "flops", "short_side", "calls"}]}.
    """
    context.meet()
    with torch.no_grad():
        measurements = measure_kernels(context.device, _sizes(item))
    return {"measurements": [vars(measurement) for measurement in measurements]}


def partner(rank: int, ranks_per_node: int, nodes: int) -> int | None:
    """Return the rank with which a rank exchanges: its like on the neighbouring node, or its neighbour on the node if
    there is only one; None if the number is odd and this is the last."""
    stride, groups = (ranks_per_node, nodes) if nodes > 1 else (1, ranks_per_node)
    group = rank // stride
    other = rank + stride if group % 2 == 0 else rank - stride
    return other if group ^ 1 < groups else None


def time_overlap(context: MeasuringRank, item: dict[str, Any]) -> dict[str, Any] | None:
    """Time kernels, sends and receives alone and at the same time.

    Args:
        context: this rank.
        item: the fields of KernelSizes, "seconds" of the kernels, "bytes" of a message, and the numbers of the grid.

    Returns:
        {"partner", "bytes", "compute", "send", "receive", "exchange", "compute+send", "compute+receive",
        "compute+exchange"}: seconds; None on a rank without a partner.
    """
    launch = context.launch
    peer = partner(launch.rank, launch.ranks_per_node, launch.nodes)
    with torch.no_grad():
        call = attention_call(context.device, _sizes(item), item["longest"], item["longest"], "causal")
        call.run()
        once = context.least_seconds(call.run, 2)
        calls = max(1, round(item["seconds"] / max(context.max(once), 1e-6)))

        def compute() -> None:
            for _ in range(calls):
                call.run()

        sent = torch.zeros(item["bytes"], dtype=torch.uint8, device=context.device)
        received = torch.empty_like(sent)
        acknowledgement = torch.zeros(1, dtype=torch.int64, device=context.device)

        def transfers(sends: bool, receives: bool) -> list[Transfer]:
            if peer is None:
                return []
            label = f"rank {launch.rank} and rank {peer} while they compute"
            posted = [Transfer(sent, peer, True, 0, label)] if sends else []
            return posted + ([Transfer(received, peer, False, 0, label)] if receives else [])

        def together(sends: bool, receives: bool, kernels: bool) -> Callable[[], None]:
            def run() -> None:
                pending = context.transport.post(transfers(sends, receives))
                if kernels:
                    compute()
                for transfer in pending:
                    transfer.wait()
                if sends != receives and peer is not None:  # a send is over when its receiver says so
                    end = context.receive if sends else context.send
                    end(acknowledgement, peer, "an acknowledgement")

            return run

        row: dict[str, Any] = {"partner": peer, "bytes": item["bytes"], "calls": calls}
        row["compute"] = context.least_seconds(compute, ROUNDS)
        context.seconds(together(True, True, False))  # connects
        first = peer is None or launch.rank < peer
        # One direction at a time: what the first rank of a pair sends, the second receives.
        for kernels in (False, True):
            prefix = "compute+" * kernels
            for sends in (True, False):
                own = sends == first
                seconds = context.least_seconds(together(own, not own, kernels), ROUNDS)
                row[prefix + ("send" if own else "receive")] = seconds
            row[prefix + "exchange"] = context.least_seconds(together(True, True, kernels), ROUNDS)
    return None if peer is None else row
