"""Random plans lowered to Ascend's operators by the real backend, on tensors without contents: a test double for the
operators describes every call, and nothing is computed. And the lists of messages that such plans post."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mindspeed_cp import AttentionConfig, ConfigError, Documents, Topology, build_plan
from mindspeed_cp.algorithms import ALGORITHMS, algorithm_options
from mindspeed_cp.comm.group_transport import Transfer, split_launches
from mindspeed_cp.engine.rank_context import _p2p_ops
from mindspeed_cp.ops.attention.accumulators import GradientAccumulator, OutputAccumulator
from mindspeed_cp.ops.attention.contract import BackwardState, ForwardState, Heads
from mindspeed_cp.ops.attention.npu.backend import NpuAttention
from mindspeed_cp.ops.attention.npu.fused_operator import DropoutState, FusedArguments
from mindspeed_cp.plan import Plan, Program
from tests.host_cann import oracle
from tests.host_cann.cann_calls import AttentionCall, BatchCall, Item, Shaped, UpdateCall
from tests.ops.npu_oracle import sizes
from tests.plan.problems import LEFT_AT_DEFAULT

META = torch.device("meta")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEADS = ((1, 1), (4, 4), (8, 2), (12, 3), (6, 1), (16, 8))
WIDTHS = ((64, 64), (128, 128), (192, 128), (576, 512), (16, 24), (80, 80), (768, 768))
WINDOWS = (None, None, (0, 0), (1, 0), (7, 0), (0, 5), (30, 9), (-1, 3), (12, -1))
MOST_OF_A_DIRECTION, MOST_OF_A_SLOT = 40, 12  # calls, so that no plan outweighs the others


@dataclass
class DescribingOperator:
    """FusedOperator that keeps a description of every call.

    Attributes:
        calls: descriptions, in order.
    """

    calls: list[AttentionCall | UpdateCall] = field(default_factory=list)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, arguments: FusedArguments
    ) -> tuple[Tensor, Tensor, Tensor, DropoutState]:
        drop_mask = self._drop_mask(q, k, arguments)
        keywords = arguments.operator_keywords()
        self.calls.append(oracle.call_of(q, k, v, arguments.heads, arguments.layout, drop_mask=drop_mask, **keywords))
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        shape = (
            (q.shape[0], arguments.heads, 8) if arguments.layout == "TND" else (len(q), arguments.heads, q.shape[1], 8)
        )
        statistics = torch.empty(shape, device=META)
        return out, statistics, statistics, (1, 0, 1)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, out: Tensor, softmax_max: Tensor, softmax_sum: Tensor,
        rng_state: DropoutState, arguments: FusedArguments,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        given = dict(dy=dout, softmax_max=softmax_max, softmax_sum=softmax_sum, attention_in=out)
        keywords = arguments.operator_keywords() | given | dict(drop_mask=self._drop_mask(q, k, arguments))
        self.calls.append(oracle.call_of(q, k, v, arguments.heads, arguments.layout, gradient=True, **keywords))
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    def update(self, before: tuple[Tensor, Tensor, Tensor], part: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        self.calls.append(oracle.update_call_of(before, part))
        return before

    def _drop_mask(self, q: Tensor, k: Tensor, arguments: FusedArguments) -> Shaped | None:
        """The mask that torch_npu makes."""
        if arguments.keep_prob == 1:
            return None
        bits = oracle.dropout_numels(arguments.heads, sizes(q, k, arguments))
        return Shaped((-(-bits // 128) * 16,), "uint8")


@dataclass(frozen=True)
class Drawn:
    """A plan, and how the backend lowers it."""

    plan: Plan
    backend: NpuAttention
    dtype: torch.dtype
    rank: int
    heads: Heads


def draw(rng: random.Random, operator: DescribingOperator) -> Drawn | None:
    """A random plan of any algorithm; None where the settings exclude each other."""
    nodes, ranks = rng.choice(((1, 1), (1, 2), (1, 3), (1, 4), (2, 2), (1, 8), (2, 4)))
    (heads, kv_heads), (width, width_v) = rng.choice(HEADS), rng.choice(WIDTHS)
    alibi, dropout = rng.random() < 0.35, rng.choice((0.0, 0.0, 0.1))
    lowering = "tnd" if alibi or rng.random() < 0.8 else "masks"
    algorithm, lengths = rng.choice(list(ALGORITHMS)), _lengths(rng)
    squares = "split" if max(lengths) <= 300 and rng.random() < 0.5 else "shared"  # split: thousands of calls else
    try:
        attention = AttentionConfig(
            heads, kv_heads, width, width_v,
            mask=rng.choice(("causal", "full")), window=rng.choice(WINDOWS), alibi=alibi, dropout=dropout,
        )  # fmt: skip
        options = _options(rng, algorithm, nodes * ranks)
        plan = build_plan(Documents(lengths), Topology(nodes, ranks), attention, algorithm, **options)
        merge = rng.choice(("fp32", "ring_update"))
        statistics, key_gaps = rng.choice(("max_sum", "lse")), rng.choice(("copied", "skipped"))
        precision = rng.choice(("input", "input", "fp16", "fp32"))
        backend = NpuAttention(lowering, squares, merge, statistics, key_gaps, precision, operator)
        dtype = rng.choice(DTYPES)
        backend.check(attention, dtype)
    except ConfigError:
        return None
    first = rng.randrange(heads)
    last = rng.randint(first + 1, heads)
    every = rng.random() < 0.5
    shared = heads // kv_heads
    part = Heads.all(attention) if every else Heads((first, last), (first // shared, -(-last // shared)))
    return Drawn(plan, backend, dtype, rng.randrange(nodes * ranks), part)


def _lengths(rng: random.Random) -> list[int]:
    kind = rng.random()
    if kind < 0.02:  # more sequences than a call takes
        return [rng.randint(1, 3) for _ in range(rng.randint(2000, 5000))]
    if kind < 0.03:  # more keys than a call takes
        return [rng.randint(1_000_000, 1_300_000), rng.randint(1, 9000)]
    longest = rng.choice((3, 40, 300, 5000))
    return [rng.randint(0, longest) for _ in range(rng.randint(1, 9))]


def _options(rng: random.Random, algorithm: str, ranks: int) -> dict[str, object]:
    out: dict[str, object] = {}
    for name, option in algorithm_options(algorithm).items():
        if option.from_model or name in LEFT_AT_DEFAULT or rng.random() < 0.5:
            continue
        if option.divides_ranks:
            out[name] = rng.choice([d for d in range(1, ranks + 1) if ranks % d == 0])
        elif option.choices:
            out[name] = rng.choice(option.choices)
        elif option.type is bool:
            out[name] = rng.random() < 0.5
    return out


def run(drawn: Drawn, operator: DescribingOperator) -> None:
    """Forward and backward of one rank, until the calls are as many as one plan gives."""
    saved: dict[Any, Any] = {}
    for direction in ("forward", "backward"):
        program: Program = getattr(drawn.plan, direction)
        before = len(operator.calls)
        for (_, slot), calls_of_slot in _lowered(drawn, program).items():
            if len(operator.calls) - before >= MOST_OF_A_DIRECTION:
                break
            calls = calls_of_slot[:MOST_OF_A_SLOT]
            attention, (q, k, v) = drawn.plan.attention, _tensors(drawn, program, slot)
            drawn.backend.prepare(calls, attention, drawn.heads, META)
            key = (1, 1) if attention.dropout > 0 else None
            if direction == "forward":
                drawn.backend.forward(
                    calls,
                    attention,
                    ForwardState(q, OutputAccumulator(q, attention.head_dim_v), drawn.heads, key, saved),
                    k,
                    v,
                )
                continue
            out, lse = q.new_empty(*q.shape[:2], attention.head_dim_v), torch.empty(q.shape[:2], device=META)
            dq, dk, dv = (GradientAccumulator(x) for x in (q, k, v))
            state = BackwardState(q, out, lse, out, dq, drawn.heads, key, saved)
            try:
                drawn.backend.backward(calls, attention, state, k, v, dk, dv)
            except ConfigError:
                assert attention.dropout > 0  # a forward that was cut short, or plans of different tiles
                return


def _lowered(drawn: Drawn, program: Program) -> dict[tuple[int, int], list[Any]]:
    tiles, rows = program.tiles(drawn.rank), int(drawn.plan.q_layout_compute.token_counts[drawn.rank])
    direction = "forward" if program is drawn.plan.forward else "backward"
    try:
        return drawn.backend.lower(direction, tiles, rows, drawn.plan.attention, drawn.dtype)
    except ConfigError as error:
        assert "use more context-parallel ranks" in str(error)
        return {}


def _tensors(drawn: Drawn, program: Program, slot: int) -> tuple[Tensor, Tensor, Tensor]:
    attention, heads = drawn.plan.attention, drawn.heads
    rows, keys = int(drawn.plan.q_layout_compute.token_counts[drawn.rank]), int(program.capacity[drawn.rank, slot])
    q, kv = heads.q[1] - heads.q[0], heads.kv[1] - heads.kv[0]
    shapes = ((rows, q, attention.head_dim), (keys, kv, attention.head_dim), (keys, kv, attention.head_dim_v))
    return tuple(torch.empty(shape, dtype=drawn.dtype, device=META) for shape in shapes)  # type: ignore[return-value]


def lowered_calls(seed: int) -> Iterator[AttentionCall | UpdateCall]:
    """Calls of random plans, without end."""
    rng = random.Random(seed)
    while True:
        operator = DescribingOperator()
        drawn = draw(rng, operator)
        if drawn is not None:
            run(drawn, operator)
            yield from operator.calls


def posted_lists(seed: int) -> Iterator[BatchCall]:
    """Calls of HcclBatchSendRecv for the messages of random plans, without end: keys and values of every message of a
    step, as the transport splits them."""
    rng = random.Random(seed)
    while True:
        drawn = draw(rng, DescribingOperator())
        if drawn is None:
            continue
        ranks, attention = drawn.plan.topology.ranks, drawn.plan.attention
        for direction in ("forward", "backward"):
            program: Program = getattr(drawn.plan, direction)
            for operations in _p2p_ops(program, drawn.rank, META)[0]:
                transfers = [
                    Transfer(
                        torch.empty(x.count, width, dtype=drawn.dtype, device=META),
                        x.peer,
                        x.sends,
                        x.number,
                        x.label,
                        x.due,
                    )
                    for x in operations
                    for width in (attention.head_dim, attention.head_dim_v)
                ]
                for launch in split_launches(transfers):
                    yield BatchCall([_item(transfers[i], drawn.dtype) for i in launch], drawn.rank, ranks)


def _item(transfer: Transfer, dtype: torch.dtype) -> Item:
    number = {torch.float32: 4, torch.float16: 3, torch.bfloat16: 11}[dtype]
    return Item("send" if transfer.sends else "recv", transfer.peer, transfer.tensor.numel(), number)
