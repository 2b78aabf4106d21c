"""Peak bytes of the buffers that the engine allocates for a plan."""

from __future__ import annotations

import numpy as np

from mindspeed_cp.errors import PlanError
from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.plan.records import Messages, record

#: Bytes of one rank: K/V receive buffers, fp32 gradients, staging of messages in flight (its largest step), total.
PEAK = record("kv gradients staging total")


def peak_bytes(plan: Plan, direction: str, bytes_per_element: int = 2) -> np.ndarray:
    """Bytes of communication buffers of every rank: what the engine allocates beside the caller's tensors and the
    kernels' own results.

    * kv: slots 1 and up, K and V, for the whole program;
    * gradients (backward): dK and dV in fp32 of every slot that is computed or receives a reduce, for the whole
      program;
    * staging: rows that leave from several places are gathered, K and V that land in several places and every reduce
      are received apart; the largest sum over the messages in flight in one step.

    Args:
        plan: the plan.
        direction: "forward" or "backward".
        bytes_per_element: of K and V.

    Returns:
        Records of dtype PEAK [ranks].
    """
    program: Program = getattr(plan, direction)
    kv_heads = plan.attention.kv_heads
    held = np.array([np.subtract(*plan.kv_layout.head_range(r, kv_heads)[::-1]) for r in range(plan.ranks)])
    width = held * (plan.attention.head_dim + plan.attention.head_dim_v)
    out = np.zeros(plan.ranks, PEAK)
    out["kv"] = program.capacity[:, 1:].sum(1) * width * bytes_per_element
    if direction == "backward":
        summed = np.zeros_like(program.capacity, bool)
        summed[:, 0] = True
        summed[program.contents["rank"], program.contents["slot"]] = True
        summed[program.reduce.items["dst"], program.reduce.items["dst_slot"]] = True
        out["gradients"] = (program.capacity * summed).sum(1) * width * 4
    staged = np.zeros((program.steps, plan.ranks), np.int64)
    _add_staging(staged, program.fetch, bytes_per_element, receive_apart=~program.fetch.is_one_run("dst"))
    _add_staging(staged, program.reduce, 4, receive_apart=np.ones(len(program.reduce), bool))
    out["staging"] = staged.max(0) * width
    out["total"] = out["kv"] + out["gradients"] + out["staging"]
    return out


def _add_staging(staged: np.ndarray, messages: Messages, size: int, receive_apart: np.ndarray) -> None:
    for item, gathered, apart in zip(messages.items, ~messages.is_one_run("src"), receive_apart, strict=True):
        steps = slice(item["start"], item["done"] + 1)
        if gathered:
            staged[steps, item["src"]] += item["rows"] * size
        if apart:
            staged[steps, item["dst"]] += item["rows"] * size


def check_memory(plan: Plan, max_bytes: int, bytes_per_element: int) -> None:
    """Raise PlanError naming the rank and direction whose buffers pass `max_bytes`."""
    for direction in ("forward", "backward"):
        peak = peak_bytes(plan, direction, bytes_per_element)
        rank = int(np.argmax(peak["total"]))
        if peak["total"][rank] > max_bytes:
            p = peak[rank]
            raise PlanError(
                f"{direction}: rank {rank}: buffers take {p['total']} bytes ({p['kv']} keys and values, "
                f"{p['gradients']} gradients, "
                f"{p['staging']} staging), more than the bound of {max_bytes}"
            )
