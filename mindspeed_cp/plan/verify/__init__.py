"""verify_plan: the proof that a plan computes exact attention, and can be run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from mindspeed_cp.errors import PlanError
from mindspeed_cp.plan.problem import documents_error
from mindspeed_cp.plan.program import DIRECTIONS, Plan, Program
from mindspeed_cp.plan.records import TILE
from mindspeed_cp.plan.verify.interpret import Interpreter, expected_sums, raise_wrong_gradient, raise_wrong_query
from mindspeed_cp.plan.verify.lifetimes import check_lifetimes
from mindspeed_cp.plan.verify.memory import check_peak_bytes, peak_bytes
from mindspeed_cp.plan.verify.structure import check_parts, check_program, check_tiles, check_types
from mindspeed_cp.schema.numbers import check_count, check_type

__all__ = ["peak_bytes", "verify_plan"]


def verify_plan(plan: Plan, *, max_bytes: int | None = None, bytes_per_element: int = 2) -> None:
    """Prove that a plan computes exact attention and can run, or raise.

    Proved for all ranks, forward and backward:

    * fields have the types and values that the engine reads, and the documents may have this attention, as in
      `build_plan`;
    * every (token, head) is held once by the caller's layouts and by the layout of queries, and at least once by the
      layout of keys and values; kv heads are beside the query heads that read them (:mod:`.structure`). What moves
      between two such layouts follows from them (:class:`mindspeed_cp.layout.Redistribution`);
    * every number refers to a step, slot, row and rank that exists; tiles lie in their document; messages are in one
      global order, tiles in the order of steps and slots, and of the shapes that operators rely on
      (:mod:`.structure`);
    * every visible (query, key) pair is computed exactly once, and no other pair is; in the backward, the gradient of
      every key returns to its owner with the contribution of every query exactly once (:mod:`.interpret`);
    * no stale, empty or half-received row is computed or sent; no row is received while it is read, sent or received
      again; no gradient is sent while it is still summed (:mod:`.lifetimes`);
    * no dead-lock, even if every send waits for its receiver: messages are in one global order, and none is done before
      it starts, so that the first unfinished one is at the head of the queues of both its ends
      (:mod:`mindspeed_cp.plan.program`); in a plan of parts, too, whose steps ascend in their common order;
      redistributions are posted all at once and need no order;
    * for a plan of parts: the parts cover the documents of the batch once, hold the rows of the plan, and are proved
      one by one (:mod:`.structure`);
    * if `max_bytes` is given, the peak of communication buffers is within it (:mod:`.memory`; :func:`peak_bytes` lists
      what the engine allocates on top).

    Args:
        plan: plan to prove.
        max_bytes: bound for the communication buffers of one rank, in bytes.
        bytes_per_element: element size of keys and values, for that bound.

    Raises:
        PlanError: names rank, step and tile or message, and the part.
        ConfigError: an argument is not a Plan, or not a number in its range.
    """
    check_type("plan", plan, Plan, "a Plan, from build_plan")
    check_count("bytes_per_element", bytes_per_element)
    if max_bytes is not None:
        check_count("max_bytes", max_bytes, least=0, most=None)
    check_types(plan)
    _check_layouts(plan)
    for index, part in enumerate(plan.parts):
        with _in_part(plan, index):
            _check_layouts(part)
    if plan.parts:
        check_parts(plan)
        for direction in DIRECTIONS:
            _check_inputs(plan, getattr(plan, direction), direction)
    elif plan.forward_order or plan.backward_order:
        raise PlanError("forward_order, backward_order: a plan without parts has none: it takes its steps in order")
    for index, part in enumerate(plan.parts_or_self):
        with _in_part(plan, index):
            _check_structure(part)
    for index, part in enumerate(plan.parts_or_self):
        with _in_part(plan, index):
            _prove(part)
    if max_bytes is not None:
        check_peak_bytes(plan, max_bytes, bytes_per_element)


@contextmanager
def _in_part(plan: Plan, index: int) -> Iterator[None]:
    """Name the part in errors of a plan of parts."""
    try:
        yield
    except PlanError as error:
        raise PlanError(f"part {index}: {error}" if plan.parts else str(error)) from None


def _check_structure(plan: Plan) -> None:
    """Check all that a proof of a plan without parts refers to, beside its layouts."""
    _check_heads(plan)
    for direction in DIRECTIONS:
        program: Program = getattr(plan, direction)
        _check_inputs(plan, program, direction)
        check_program(plan, program, direction)
        _check_heads_of_messages(plan, program, direction)


def _prove(plan: Plan) -> None:
    """Prove a plan without parts that has passed `_check_structure`."""
    attention = plan.attention
    rng = np.random.default_rng(0)
    query_numbers = rng.integers(1, 2**64, plan.documents.tokens, dtype=np.uint64)
    key_numbers = rng.integers(1, 2**64, plan.kv_documents.tokens, dtype=np.uint64) | np.uint64(1)
    query_sums, key_sums = expected_sums(plan.documents, plan.kv_documents, attention, query_numbers, key_numbers)
    has_heads = plan.q_layout_compute.head_counts(attention.heads) > 0
    computing = np.flatnonzero(has_heads).tolist()
    tile_cache: dict[tuple[int, int], list[np.ndarray]] = {}
    for direction, program in (("forward", plan.forward), ("backward", plan.backward)):
        tiles = _tiles(program, tile_cache, direction)
        for rank in range(plan.ranks):
            check_tiles(program, rank, tiles[rank], direction)
        check_lifetimes(program, tiles, direction)
        interpreter = Interpreter(plan, program, direction, tiles, query_numbers, key_numbers)
        interpreter.run()
        for rank in computing:
            wrong = np.flatnonzero(interpreter.out[rank] != query_sums[plan.q_layout_compute.tokens(rank)])
            if len(wrong):
                raise_wrong_query(plan, program, direction, rank, int(wrong[0]), tiles[rank])
        for rank in computing if direction == "backward" else ():
            wrong = np.flatnonzero(interpreter.gradient[rank][0] != key_sums[plan.kv_layout_compute.tokens(rank)])
            if len(wrong):
                raise_wrong_gradient(plan, program, rank, int(wrong[0]))


def _check_inputs(plan: Plan, program: Program, direction: str) -> None:
    """Check that a program is for the plan's attention, documents and layout of queries."""
    if program.attention != plan.attention:
        raise PlanError(f"{direction}: the program is for {program.attention}, the plan for {plan.attention}")
    if program.kv_documents != plan.kv_documents:
        raise PlanError(f"{direction}: its keys are of {program.kv_documents}, the plan's of {plan.kv_documents}")
    queries = program.q_layout_compute
    if queries.documents != plan.documents or not queries.same_as(plan.q_layout_compute):
        raise PlanError(f"{direction}: the program's queries are laid out in another way than the plan's")
    if direction == "forward" and len(program.reduce):
        item = program.reduce.items[0]
        raise PlanError(f"forward: rank {item['src']}, step {item['start']}: a forward has no gradients to send")


def _tiles(program: Program, cache: dict[tuple[int, int], list[np.ndarray]], direction: str) -> list[np.ndarray]:
    """Return the tiles of all ranks; programs of one plan that share contents and spans also share tiles."""
    key = id(program.contents), id(program.spans)  # both objects live as long as the plan
    if type(program) is not Program or key not in cache:
        cache[key] = [program.tiles(rank) for rank in range(program.ranks)]
    if any(not isinstance(tiles, np.ndarray) or tiles.dtype != TILE or tiles.ndim != 1 for tiles in cache[key]):
        raise PlanError(f"{direction}: its tiles are no array of records of {', '.join(TILE.names or ())}")
    return cache[key]


def _check_layouts(plan: Plan) -> None:
    """Check that all layouts have the documents of the plan and the ranks of the topology, and hold all tokens."""
    layouts = {"layout": plan.layout, "q_layout_compute": plan.q_layout_compute}
    layouts |= {"kv_layout_in": plan.kv_layout_in, "kv_layout_compute": plan.kv_layout_compute}
    if plan.linear_layout is not None:
        layouts["linear_layout"] = plan.linear_layout
    for name, layout in layouts.items():
        if layout.ranks != plan.topology.ranks:
            raise PlanError(f"{name}: it has {layout.ranks} ranks, the topology {plan.topology.ranks}")
        documents = plan.kv_documents if "kv" in name else plan.documents
        if layout.documents != documents:
            raise PlanError(f"{name}: it is of {layout.documents}, the caller's layout of {documents}")
    error = documents_error(plan.documents, plan.kv_documents, plan.attention)
    if error is not None:
        raise PlanError(error)
    for name, layout in layouts.items():
        if not name.endswith("_compute"):
            if layout.heads is not None:
                raise PlanError(f"{name}: the caller holds all heads, but it splits them")
            layout.check()


def _check_heads(plan: Plan) -> None:
    """Check the heads of all ranks, so that the sums can be computed without heads.

    A rank must have exactly the kv heads that its query heads read, and every key must be on one rank for each query
    head. As keys and values travel only between ranks with the same query heads, one sum over queries is then valid for
    each head of a rank; copies of a kv head on ranks with other query heads sum over those.
    """
    attention = plan.attention
    kv_heads = attention.kv_row.heads
    group = attention.heads // kv_heads
    split = attention.heads if plan.q_layout_compute.heads is not None else None
    plan.q_layout_compute.check(split)
    for rank in range(plan.ranks):
        first, last = plan.q_layout_compute.head_range(rank, attention.heads)
        kv_first, kv_last = plan.kv_layout_compute.head_range(rank, kv_heads)
        expected = (first // group, -(-last // group))
        if (last > first and (kv_first, kv_last) != expected) or (last == first and kv_last > kv_first):
            raise PlanError(
                f"layout: rank {rank}: kv heads {kv_first} to {kv_last - 1} are not exactly those that query heads "
                f"{first} to {last - 1} read"
            )
    try:
        replace(plan.kv_layout_compute, heads=plan.q_layout_compute.heads).check(split)
    except PlanError as error:
        raise PlanError(f"kv_layout_compute: keys and values, by the query heads that read them: {error}") from None


def _check_heads_of_messages(plan: Plan, program: Program, direction: str) -> None:
    """Check that keys, values and their gradients travel only between ranks with the same query heads."""
    ranges = plan.q_layout_compute.head_bounds(plan.attention.heads)
    for messages in (program.fetch, program.reduce):
        wrong = np.flatnonzero((ranges[messages.items["src"]] != ranges[messages.items["dst"]]).any(1))
        if len(wrong):
            item = messages.items[wrong[0]]
            raise PlanError(
                f"{direction}: rank {item['src']}, step {item['start']}: keys and values, or their gradients, go to "
                f"rank {item['dst']}, which has other heads"
            )
