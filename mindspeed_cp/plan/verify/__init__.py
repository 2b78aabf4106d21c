"""verify_plan: the proof that a plan computes exact attention, and can be run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mindspeed_cp.errors import PlanError
from mindspeed_cp.layout import Layout
from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.plan.verify.explain import refuse_gradient, refuse_query
from mindspeed_cp.plan.verify.interpret import Interpreter, expected_sums
from mindspeed_cp.plan.verify.lifetimes import check_lifetimes
from mindspeed_cp.plan.verify.memory import check_memory, peak_bytes
from mindspeed_cp.plan.verify.moves import check_move
from mindspeed_cp.plan.verify.parts import check_parts
from mindspeed_cp.plan.verify.queues import check_queues
from mindspeed_cp.plan.verify.structure import check_program, check_tiles

__all__ = ["peak_bytes", "verify_plan"]


def verify_plan(plan: Plan, *, max_bytes: int | None = None, bytes_per_element: int = 2, seed: int = 0) -> None:
    """Prove a plan, or raise.

    Proved, for all ranks, forward and backward:

    * every (token, head) is held once by the caller's layouts and by the layout of queries, and at least once by that
      of keys and values; kv heads serve the query heads beside them; moves between layouts bring every row and head to
      its place once (:mod:`.moves`);
    * every number refers to a step, slot, row and rank that exists; messages are in one global order;
    * every visible (query, key) pair is computed exactly once and no other pair is; in the backward the gradient of
      every key comes back to its owner with every query's part exactly once (:mod:`.interpret`);
    * no stale, empty or half-received row is computed or sent; no row is received while it is read, sent or received
      again; no gradient is sent while it is still summed (:mod:`.lifetimes`);
    * no dead-lock, even if every send waits for its receiver (:mod:`.queues`); moves between layouts are posted all at
      once and need no such order;
    * a plan of parts: its parts are over disjoint documents that are all of the batch, their rows are the plan's, each
      is proved by itself, and in the order of their steps no dead-lock is possible (:mod:`.parts`);
    * the peak bytes of communication buffers are within `max_bytes`, when that is given (:mod:`.memory`; the engine's
      accumulators, copies and kernels come on top: :func:`peak_bytes` has their sizes).

    Args:
        plan: the plan.
        max_bytes: bound for the communication buffers of one rank.
        bytes_per_element: of keys and values, for that bound.
        seed: of the random numbers.

    Raises:
        PlanError: names rank, step and tile or message, and the part.
    """
    _check_layouts(plan)
    if plan.parts:
        check_parts(plan)
    elif plan.order or plan.order_backward:
        raise PlanError("order: a plan without parts has none: its steps are taken as they are")
    for number, piece in enumerate(plan.pieces):
        try:
            _prove(piece, seed)
        except PlanError as error:
            raise PlanError(f"part {number}: {error}" if plan.parts else str(error)) from None
    if max_bytes is not None:
        check_memory(plan, max_bytes, bytes_per_element)


def _prove(plan: Plan, seed: int) -> None:
    """The proof of a plan without parts."""
    attention = plan.attention
    _check_layouts(plan)
    _check_heads(plan)
    _check_moves(plan)
    rng = np.random.default_rng(seed)
    a = rng.integers(1, 2**64, plan.documents.tokens, dtype=np.uint64)
    b = rng.integers(1, 2**64, plan.kv_documents.tokens, dtype=np.uint64) | np.uint64(1)
    see = expected_sums(plan.documents, plan.kv_documents, attention, a, b)
    has_heads = [np.ptp(plan.q_layout.head_range(rank, attention.heads)) > 0 for rank in range(plan.ranks)]
    known: dict[tuple[int, int], list[np.ndarray]] = {}
    for name, program in (("forward", plan.forward), ("backward", plan.backward)):
        if program.attention != attention:
            raise PlanError(f"{name}: the program is for {program.attention}, the plan for {attention}")
        if program.kv_documents != plan.kv_documents:
            raise PlanError(f"{name}: its keys are of {program.kv_documents}, the plan's of {plan.kv_documents}")
        if program.q_layout.documents != plan.documents or not program.q_layout.same_as(plan.q_layout):
            raise PlanError(f"{name}: the program's queries are laid out in another way than the plan's")
        if name == "forward" and len(program.reduce):
            item = program.reduce.items[0]
            raise PlanError(f"forward: rank {item['src']}, step {item['start']}: a forward has no gradients to send")
        check_program(plan, program, name)
        _check_heads_of_messages(plan, program, name)
        tiles = _tiles(program, known)
        for rank in range(plan.ranks):
            check_tiles(program, rank, tiles[rank], name)
        check_lifetimes(program, tiles, name)
        check_queues(program, name)
        run = Interpreter(plan, program, name, tiles, a, b)
        run.run()
        for rank in np.flatnonzero(has_heads).tolist():
            wrong = np.flatnonzero(run.out[rank] != see[0][plan.q_layout.tokens(rank)])
            if len(wrong):
                refuse_query(plan, program, name, rank, int(wrong[0]), tiles[rank])
        for rank in np.flatnonzero(has_heads).tolist() if name == "backward" else ():
            wrong = np.flatnonzero(run.gradient[rank][0] != see[1][plan.kv_layout.tokens(rank)])
            if len(wrong):
                refuse_gradient(plan, program, rank, int(wrong[0]), tiles, (a, b))


def _tiles(program: Program, known: dict[tuple[int, int], list[np.ndarray]]) -> list[np.ndarray]:
    """Tiles of all ranks; forward and backward may share their contents and spans, and then their tiles: layout and
    mask are those of the plan in both."""
    key = id(program.contents), id(program.spans)  # both live as long as the plan
    if type(program) is not Program or key not in known:
        known[key] = [program.tiles(rank) for rank in range(program.ranks)]
    return known[key]


def _check_layouts(plan: Plan) -> None:
    """The three layouts are of one batch and of the topology's ranks, and each holds what it must."""
    layouts = {"layout": plan.layout, "q_layout": plan.q_layout}
    layouts |= {"layout_kv": plan.layout_kv, "kv_layout": plan.kv_layout}
    for name, layout in layouts.items():
        if layout.ranks != plan.topology.ranks:
            raise PlanError(f"{name}: it has {layout.ranks} ranks, the topology {plan.topology.ranks}")
        documents = plan.kv_documents if "kv" in name else plan.documents
        if layout.documents != documents:
            raise PlanError(f"{name}: it is of {layout.documents}, the caller's layout of {documents}")
    if len(plan.documents) != len(plan.kv_documents):
        raise PlanError(f"layout_kv: {len(plan.kv_documents)} documents of keys for {len(plan.documents)} of queries")
    for name in ("layout", "layout_kv"):
        if layouts[name].heads is not None:
            raise PlanError(f"{name}: the caller holds all heads, but it splits them")
        layouts[name].check()
    if plan.linear is not None:
        _check_linear(plan, plan.linear)


def _check_linear(plan: Plan, linear: Layout) -> None:
    """The layout of the linear layers has every token of the queries, with all heads, once."""
    if linear.ranks != plan.ranks or linear.documents != plan.documents:
        raise PlanError(
            f"linear: it is of {linear.ranks} ranks and {linear.documents}, the plan of {plan.ranks} and "
            f"{plan.documents}"
        )
    if linear.heads is not None:
        raise PlanError("linear: linear layers have all heads, but it splits them")
    linear.check()


def _check_moves(plan: Plan) -> None:
    for name, move in (("q_move", plan.q_move), ("kv_move", plan.kv_move)):
        if move is not None:
            check_move(move, name)


def _check_heads(plan: Plan) -> None:
    """Heads as a proof without heads needs them.

    A rank has just the kv heads that its query heads read. Every key is on one rank for each query head: as keys and
    values travel only between ranks with the same query heads, one sum over queries stands for each of a rank's heads,
    and copies of a kv head, on ranks with other query heads, have sums over these.
    """
    attention = plan.attention
    kv_heads, group = attention.kv_heads, attention.heads // attention.kv_heads
    split = attention.heads if plan.q_layout.heads is not None else None
    plan.q_layout.check(split)
    for rank in range(plan.ranks):
        (a, b), (c, d) = plan.q_layout.head_range(rank, attention.heads), plan.kv_layout.head_range(rank, kv_heads)
        if (b > a and (c, d) != (a // group, -(-b // group))) or (b == a and d > c):
            raise PlanError(
                f"layout: rank {rank}: kv heads {c} to {d - 1} are not just those that query heads {a} to {b - 1} read"
            )
    try:
        replace(plan.kv_layout, heads=plan.q_layout.heads).check(split)
    except PlanError as error:
        raise PlanError(f"kv_layout: keys and values, by the query heads that read them: {error}") from None


def _check_heads_of_messages(plan: Plan, program: Program, name: str) -> None:
    """Keys, values and their gradients travel between ranks with the same query heads."""
    held = np.array([plan.q_layout.head_range(rank, plan.attention.heads) for rank in range(plan.ranks)])
    for messages in (program.fetch, program.reduce):
        other = np.flatnonzero((held[messages.items["src"]] != held[messages.items["dst"]]).any(1))
        if len(other):
            item = messages.items[other[0]]
            raise PlanError(
                f"{name}: rank {item['src']}, step {item['start']}: keys and values, or their gradients, go to rank "
                f"{item['dst']}, which has other heads"
            )
