"""verify_plan: the proof that a plan computes exact attention, and can be run."""

from __future__ import annotations

import numpy as np

from mindspeed_cp.errors import PlanError
from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.plan.verify.explain import refuse_gradient, refuse_query
from mindspeed_cp.plan.verify.interpret import Interpreter, expected_sums
from mindspeed_cp.plan.verify.lifetimes import check_lifetimes
from mindspeed_cp.plan.verify.memory import check_memory, peak_bytes
from mindspeed_cp.plan.verify.queues import check_queues
from mindspeed_cp.plan.verify.structure import check_program, check_tiles

__all__ = ["peak_bytes", "verify_plan"]


def verify_plan(plan: Plan, *, max_bytes: int | None = None, bytes_per_element: int = 2, seed: int = 0) -> None:
    """Prove a plan, or raise.

    Proved, for all ranks, forward and backward:

    * every (token, head) is held once by the caller's layout and by the layout of queries, and at least once by that of
      keys and values; kv heads serve the query heads beside them;
    * every number refers to a step, slot, row and rank that exists; messages are in one global order;
    * every visible (query, key) pair is computed exactly once and no other pair is; in the backward the gradient of
      every key comes back to its owner with every query's part exactly once (:mod:`.interpret`);
    * no stale, empty or half-received row is computed or sent; no row is received while it is read, sent or received
      again; no gradient is sent while it is still summed (:mod:`.lifetimes`);
    * no dead-lock, even if every send waits for its receiver (:mod:`.queues`);
    * the peak bytes of buffers are within `max_bytes`, when that is given (:mod:`.memory`).

    Args:
        plan: the plan.
        max_bytes: bound for the buffers of one rank.
        bytes_per_element: of keys and values, for that bound.
        seed: of the random numbers.

    Raises:
        PlanError: names rank, step and tile or message.
    """
    attention = plan.attention
    _check_layouts(plan)
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(1, 2**64, plan.documents.tokens, dtype=np.uint64) for _ in range(2))
    b |= np.uint64(1)
    see = expected_sums(plan.documents, attention.mask, a, b)
    known: dict[tuple[int, int], list[np.ndarray]] = {}
    for name, program in (("forward", plan.forward), ("backward", plan.backward)):
        if program.mask != attention.mask:
            raise PlanError(f"{name}: the program's mask is {program.mask}, the attention's {attention.mask}")
        if program.q_layout.documents != plan.documents or not program.q_layout.same_as(plan.q_layout):
            raise PlanError(f"{name}: the program's queries are laid out in another way than the plan's")
        if name == "forward" and len(program.reduce):
            item = program.reduce.items[0]
            raise PlanError(f"forward: rank {item['src']}, step {item['start']}: a forward has no gradients to send")
        check_program(plan, program, name)
        tiles = _tiles(program, known)
        for rank in range(plan.ranks):
            check_tiles(program, rank, tiles[rank], name)
        check_lifetimes(program, tiles, name)
        check_queues(program, name)
        run = Interpreter(plan, program, name, tiles, a, b)
        run.run()
        for rank in range(plan.ranks):
            wrong = np.flatnonzero(run.out[rank] != see[0][plan.q_layout.tokens(rank)])
            if len(wrong):
                refuse_query(plan, program, name, rank, int(wrong[0]), tiles[rank])
        for rank in range(plan.ranks) if name == "backward" else ():
            wrong = np.flatnonzero(run.gradient[rank][0] != see[1][plan.kv_layout.tokens(rank)])
            if len(wrong):
                refuse_gradient(plan, program, rank, int(wrong[0]), tiles, (a, b))
    if max_bytes is not None:
        check_memory(plan, max_bytes, bytes_per_element)


def _tiles(program: Program, known: dict[tuple[int, int], list[np.ndarray]]) -> list[np.ndarray]:
    """Tiles of all ranks; forward and backward may share their contents and spans, and then their tiles: layout and
    mask are those of the plan in both."""
    key = id(program.contents), id(program.spans)
    if type(program) is not Program or key not in known:
        known[key] = [program.tiles(rank) for rank in range(program.ranks)]
    return known[key]


def _check_layouts(plan: Plan) -> None:
    """The three layouts are of one batch and of the topology's ranks, and each holds what it must."""
    layouts = {"layout": plan.layout, "q_layout": plan.q_layout, "kv_layout": plan.kv_layout}
    for name, layout in layouts.items():
        if layout.ranks != plan.topology.ranks:
            raise PlanError(f"{name}: it has {layout.ranks} ranks, the topology {plan.topology.ranks}")
        if layout.documents != plan.documents:
            raise PlanError(f"{name}: it is of {layout.documents}, the caller's layout of {plan.documents}")
    if plan.layout.heads is not None:
        raise PlanError("layout: the caller holds all heads, but it splits them")
    plan.layout.check()
    _check_heads(plan)


def _check_heads(plan: Plan) -> None:
    attention = plan.attention
    kv_heads = attention.kv_heads
    group = attention.heads // kv_heads
    plan.q_layout.check(attention.heads if plan.q_layout.heads is not None else None)
    plan.kv_layout.check(
        kv_heads if plan.kv_layout.heads is not None else None, replicated=plan.kv_layout.heads is not None
    )
    for rank in range(plan.ranks):
        (a, b), (c, d) = plan.q_layout.head_range(rank, attention.heads), plan.kv_layout.head_range(rank, kv_heads)
        if b > a and (c * group > a or d * group < b):
            raise PlanError(f"layout: rank {rank}: kv heads {c} to {d - 1} do not serve query heads {a} to {b - 1}")
    for program in (plan.forward, plan.backward):
        for messages in (program.fetch, program.reduce):
            for item in messages.items if plan.kv_layout.heads is not None else ():
                if (plan.kv_layout.heads[item["src"]] != plan.kv_layout.heads[item["dst"]]).any():  # type: ignore[index]
                    raise PlanError(
                        f"rank {item['src']}, step {item['start']}: keys and values go to rank {item['dst']}, "
                        "which has other heads"
                    )
