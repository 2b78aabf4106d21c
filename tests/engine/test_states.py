"""context_parallel_linear_attention and context_parallel_conv1d against the definition, token by token in fp64."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from mindspeed_cp import (
    AttentionConfig,
    ConfigError,
    Documents,
    Layout,
    StateConfig,
    Topology,
    build_plan,
    build_state_plan,
    context_parallel_conv1d,
    context_parallel_linear_attention,
)
from mindspeed_cp.comm.in_memory import InMemoryNetwork
from mindspeed_cp.engine import Stepping, linear_attention_in_process
from mindspeed_cp.engine.all_ranks import run_all_ranks
from mindspeed_cp.engine.convolution import convolve, fetch_run, halo_of, return_run
from mindspeed_cp.engine.linear_attention import checked_inputs
from mindspeed_cp.engine.state_run import StateCall, backward_run, forward_run, rank_states
from mindspeed_cp.layout import contiguous, zigzag
from mindspeed_cp.ops.linear_attention import ChunkedOperator, StateInputs
from tests.engine.linear_attention import FAST_DECAY, draw_rows, largest_error, recurrence, token_by_token
from tests.plan.states import SCHEDULES, random_layout, shreds
from tests.workers import GlooPool

KINDS = ("gated_delta", "kda", "lightning", "mamba2")
LENGTHS, PARENTS = (90, 7, 12, 9, 0, 3), (-1, 0, 0, 2, 2, 4)


def worst_of(layout: Layout, state: StateConfig, schedules: tuple[str, ...], seed: int, dtype=torch.float64) -> float:
    """Return the largest error of out and all gradients over schedules."""
    rows, dout = draw_rows(state, layout.documents.tokens, seed)
    wanted = token_by_token(rows, dout, layout.documents, state)
    given = [None if x is None else x.to(dtype) for x in rows]
    worst = 0.0
    for schedule in schedules:
        plan = build_state_plan(layout, state, schedule=schedule)
        result = linear_attention_in_process(plan, *given, dout.to(dtype), stepping=Stepping(lazy=True, seed=seed))
        assert result.out.dtype == dtype
        worst = max(worst, largest_error(result, wanted))
    return worst


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [3, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 2, 4, 5, 6, 7))])
@pytest.mark.parametrize("has_tree", [True, False])
def test_any_schedule_is_exact(kind: str, ranks: int, has_tree: bool) -> None:
    rng = Random(ranks)
    documents = Documents(LENGTHS, PARENTS if has_tree else None)
    layout = shreds(documents, ranks, rng) if ranks % 2 else zigzag(documents, ranks)
    state = StateConfig(kind, 3, 6, 4)
    assert worst_of(layout, state, SCHEDULES, ranks) <= 1e-10
    assert worst_of(layout, state, SCHEDULES[:1], ranks, torch.float32) <= 1e-5


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(60))
def test_random_layouts_are_exact(seed: int) -> None:
    rng = Random(seed)
    state = StateConfig(rng.choice(KINDS), rng.randint(1, 4), rng.choice((1, 3, 8)), rng.choice((1, 2, 5)))
    layout = random_layout(rng, tokens=90)
    assert worst_of(layout, state, ("auto", *SCHEDULES), seed) <= 1e-10
    assert worst_of(layout, state, ("auto", "scan"), seed, torch.float32) <= 1e-5


@pytest.mark.parametrize("kind", ["gated_delta", "kda", "mamba2"])
def test_decay_to_a_millionth_in_every_step_neither_overflows_nor_loses_digits(kind: str) -> None:
    layout = contiguous(Documents([210]), 3)
    state = StateConfig(kind, 2, 8, 4)
    rows, dout = draw_rows(state, 210, 0)
    gate = torch.full_like(rows.gate, FAST_DECAY)
    gate[100:140] = -1e-3  # behind long sums of fast decay, slow ones keep their digits
    for some_gate in (gate, torch.full_like(gate, FAST_DECAY)):
        rows = rows._replace(gate=some_gate)
        wanted = token_by_token(rows, dout, layout.documents, state)
        for dtype, limit in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
            given = [x.to(dtype) for x in rows if x is not None]
            result = linear_attention_in_process(build_state_plan(layout, state), *given, dout.to(dtype))
            assert largest_error(result, wanted) <= limit


def test_states_travel_in_fp32_under_bf16() -> None:
    layout, state = zigzag(Documents([200, 30]), 3), StateConfig("gated_delta", 2, 8)
    rows, dout = draw_rows(state, 230, 1, fast=0.0)
    rounded = StateInputs(*(x.bfloat16() for x in rows[:3]), rows.gate.float(), rows.beta.float())
    exact = token_by_token(
        StateInputs(*(x.double() for x in rounded)), dout.bfloat16().double(), layout.documents, state
    )
    errors = []
    for ranks_layout in (layout, contiguous(layout.documents, 1)):
        plan = build_state_plan(ranks_layout, state)
        result = linear_attention_in_process(plan, *rounded, dout.bfloat16())
        assert result.out.dtype == result.gradients.q.dtype == torch.bfloat16
        assert result.gradients.gate.dtype == torch.float32
        errors.append(largest_error(result, exact))
    assert errors[0] <= 1.1 * errors[1] + 1e-6 and errors[1] < 0.01


class _NoSynchronization(TorchFunctionMode):
    """Raises where a value of a tensor is read back to the host, or decides a size."""

    READERS = frozenset(
        [
            "item",
            "tolist",
            "numpy",
            "cpu",
            "nonzero",
            "unique",
            "masked_select",
            "equal",
            "allclose",
            "is_nonzero",
            "__bool__",
            "__int__",
            "__float__",
            "__index__",
        ]
    )

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function.__name__ not in self.READERS, f"{function.__name__} waits for the device"
        return function(*args, **(kwargs or {}))


def test_a_layer_never_waits_for_a_value() -> None:
    layout = zigzag(Documents([70, 5]), 3)
    for schedule, kind in zip(SCHEDULES, ("kda", "mamba2", "gated_delta", "kda"), strict=True):
        state = StateConfig(kind, 2, 4)
        rows, dout = draw_rows(state, 75, 1)
        plan = build_state_plan(layout, state, schedule=schedule)
        network = InMemoryNetwork(3)
        calls, inputs = [], []
        for rank in range(3):
            context = rank_states(plan, rank, torch.device("cpu"))
            shards = [layout.shard(x, rank) for x in rows]
            inputs.append(checked_inputs(*shards, context, ChunkedOperator()))
            calls.append(StateCall(context, ChunkedOperator(), network.transport(rank)))
        with _NoSynchronization(), pytest.raises(AssertionError, match="item waits"):
            rows.q.sum().item()
        with _NoSynchronization(), torch.no_grad():
            results = run_all_ranks([forward_run(*pair) for pair in zip(calls, inputs, strict=True)], network)
            runs = [
                backward_run(call, layout.shard(dout, rank), saved)
                for rank, (call, (_, saved)) in enumerate(zip(calls, results, strict=True))
            ]
            run_all_ranks(runs, network)


# Real process groups.


def layers_of_rank(rank: int, group: Any, ranks: int, has_tree: bool) -> list[Any]:
    """Run a convolution and each kind of linear attention on one rank, with grouped heads, twice backward."""
    documents = Documents(LENGTHS, PARENTS if has_tree else None)
    layout = shreds(documents, ranks, Random(ranks))
    results = []
    for kind in KINDS:
        state = StateConfig(kind, 4, 6, 4, 2)
        plan: Any = build_state_plan(layout, state, schedule=SCHEDULES[KINDS.index(kind)])
        rows, dout = draw_rows(state, documents.tokens, 5)
        q, k = rows.q[:, :2], rows.k[:, :2]
        own = [None if x is None else x if x.dim() == 1 else layout.shard(x, rank) for x in (q, k, *rows[2:])]
        leaves = [x.clone().requires_grad_() for x in own if x is not None]
        arguments = [*leaves, *([None] if rows.beta is None else [])]
        out = context_parallel_linear_attention(*arguments, plan, kind, group)
        weighted = (out * layout.shard(dout, rank)).sum()
        first = torch.autograd.grad(weighted, leaves, retain_graph=True)
        again = torch.autograd.grad(weighted, leaves)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
        results.append([out.detach(), *first])
    x, weight, bias, dy = convolution_rows(documents.tokens)
    own_x = layout.shard(x, rank).requires_grad_()
    parameters = [weight.requires_grad_(), bias.requires_grad_()]
    y = context_parallel_conv1d(own_x, parameters[0], plan, parameters[1], "silu", group)
    gradients = torch.autograd.grad((y * layout.shard(dy, rank)).sum(), [own_x, *parameters], allow_unused=True)
    results.append([y.detach(), *(torch.zeros_like(p) if g is None else g for p, g in zip([own_x, *parameters], gradients, strict=True))])  # fmt: skip
    return results


@pytest.mark.parametrize(
    ("ranks", "has_tree"), [(2, True), (3, False), pytest.param(7, True, marks=pytest.mark.thorough)]
)
def test_ranks_of_a_group_agree_with_the_definition(workers: Any, ranks: int, has_tree: bool) -> None:
    results = workers.run(ranks, layers_of_rank, ranks, has_tree)
    documents = Documents(LENGTHS, PARENTS if has_tree else None)
    layout = shreds(documents, ranks, Random(ranks))
    for number, kind in enumerate(KINDS):
        state = StateConfig(kind, 4, 6, 4, 2)
        rows, dout = draw_rows(state, documents.tokens, 5)
        leaves = [x.clone().requires_grad_() for x in (rows.q[:, :2], rows.k[:, :2], *rows[2:]) if x is not None]
        q, k = (x.repeat_interleave(2, 1) for x in leaves[:2])
        out = recurrence(StateInputs(q, k, *leaves[2:], *([None] if rows.beta is None else [])), documents, state)
        wanted = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
        for part, value in enumerate(wanted):
            shards = [result[number][part] for result in results]
            whole = sum(shards) if value.dim() == 1 else layout.unshard(shards)
            torch.testing.assert_close(whole, value, rtol=1e-10, atol=1e-10)
    x, weight, bias, dy = convolution_rows(documents.tokens)
    leaves = [value.requires_grad_() for value in (x, weight, bias)]
    y = torch.nn.functional.silu(convolved(*leaves, documents))
    wanted = [y.detach(), *torch.autograd.grad(y, leaves, dy)]
    for part, value in enumerate(wanted):
        shards = [result[-1][part] for result in results]
        torch.testing.assert_close(sum(shards) if part > 1 else layout.unshard(shards), value, rtol=1e-10, atol=1e-10)


def calls_of_rank(rank: int, group: Any) -> str:
    """Return the error of a call of whose plan rank 1 has another schedule."""
    layout, state = contiguous(Documents([20]), 2), StateConfig("gated_delta", 2, 4)
    plan = build_state_plan(layout, state, schedule="scan" if rank else "relay")
    rows, _ = draw_rows(state, 20, 0)
    try:
        context_parallel_linear_attention(*(layout.shard(x, rank) for x in rows), plan, group=group)
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_with_different_plans_are_found_before_a_state_travels(workers: Any) -> None:
    for message in workers.run(2, calls_of_rank):
        assert "do not have the same plan" in message and "schedule: " in message, message


# Convolutions.


def convolution_rows(tokens: int, width: int = 4) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    shapes = (tokens, 5), (5, width), (5,), (tokens, 5)
    return tuple(torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)


def convolved(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, documents: Documents) -> torch.Tensor:
    """Convolve each path by itself, token by token; differentiable."""
    width, out = weight.shape[1], []
    for doc in range(len(documents)):
        path = [doc] if documents.trees is None else documents.trees.path(doc).tolist()
        rows = torch.cat([x[int(documents.offsets[d]) : int(documents.offsets[d + 1])] for d in path])
        padded = torch.cat([x.new_zeros(width - 1, x.shape[1]), rows])
        own = range(len(rows) - int(documents.lengths[doc]), len(rows))
        out += [bias + (padded[row : row + width] * weight.t()).sum(0) for row in own]
    return torch.stack(out) if out else x


@pytest.mark.parametrize("seed", [0, 1, 2, 3, *(pytest.param(n, marks=pytest.mark.thorough) for n in range(4, 60))])
def test_convolutions_of_any_layout_are_exact(seed: int) -> None:
    rng = Random(seed)
    layout = random_layout(rng)
    width, ranks, tokens = (4, 2, 1, 9)[seed % 4], layout.ranks, layout.documents.tokens
    x, weight, bias, dy = convolution_rows(tokens, width)
    leaves = [value.clone().requires_grad_() for value in (x, weight, bias)]
    y = convolved(*leaves, layout.documents)
    wanted = torch.autograd.grad(y, leaves, dy) if tokens else [torch.zeros_like(value) for value in leaves]
    network, plan = InMemoryNetwork(ranks), build_state_plan(layout, StateConfig("kda", 1, 2))
    halos = [halo_of(plan, width, rank, x.device) for rank in range(ranks)]
    shards = [layout.shard(x, rank).requires_grad_() for rank in range(ranks)]
    runs = [
        fetch_run(shard.detach(), halo, network.transport(halo.rank)) for shard, halo in zip(shards, halos, strict=True)
    ]
    fetched = [rows.requires_grad_() for rows in run_all_ranks(runs, network)]
    parameters = [value.clone().requires_grad_() for value in (weight, bias)]
    outputs = [convolve(*pair, *parameters, halo) for *pair, halo in zip(shards, fetched, halos, strict=True)]
    douts = [layout.shard(dy, rank) for rank in range(ranks)]
    gradients = torch.autograd.grad(outputs, [*parameters, *shards, *fetched], douts, materialize_grads=True)
    runs = [return_run(gradients[2 + ranks + rank], halos[rank], network.transport(rank)) for rank in range(ranks)]
    own = [a + b for a, b in zip(gradients[2 : 2 + ranks], run_all_ranks(runs, network), strict=True)]
    pairs = [(layout.unshard([out.detach() for out in outputs]), y.detach()), (layout.unshard(own), wanted[0])]
    for value, reference in [*pairs, *zip(gradients[:2], wanted[1:], strict=True)]:
        torch.testing.assert_close(value, reference, rtol=1e-10, atol=1e-10)


# One rank, and what is refused.


def test_one_rank_needs_no_group_and_a_plan_of_softmax_serves() -> None:
    documents = Documents([30, 0, 12])
    plan = build_plan(documents, Topology(1, 1), AttentionConfig(4), "ring")
    state = StateConfig("gated_delta", 3, 4, 5, scale=0.3)
    rows, dout = draw_rows(state, 42, 0)
    leaves = [x.clone().requires_grad_() for x in rows if x is not None]
    out = context_parallel_linear_attention(*leaves, plan, scale=0.3)
    wanted = token_by_token(rows, dout, documents, state)
    torch.testing.assert_close(out.detach(), wanted.out, rtol=1e-12, atol=1e-12)
    for value, reference in zip(torch.autograd.grad(out, leaves, dout), wanted.gradients, strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-11, atol=1e-11)
    x, weight, *_ = convolution_rows(42)
    torch.testing.assert_close(
        context_parallel_conv1d(x, weight, plan), convolved(x, weight, torch.zeros(5, dtype=x.dtype), documents)
    )


def test_bad_input_is_refused_in_one_line() -> None:
    layout, state = contiguous(Documents([12]), 1), StateConfig("gated_delta", 2, 4)
    plan = build_state_plan(layout, state)
    q, k, v, gate, beta = draw_rows(state, 12, 0)[0]
    late = gate.clone()
    late[3, 1] = 0.5
    calls: list[tuple[dict[str, Any], str]] = [
        ({"gate": late}, "rank 0: gate has the value 0.5; valid: finite logs of decays, at most 0"),
        ({"gate": gate - float("inf")}, "gate has the value -inf"),
        ({"gate": gate * float("nan")}, "gate has the value nan"),
        ({"beta": beta + 2}, "beta has the value 2.*; valid: from 0 to 2"),
        ({"beta": None}, "rank 0: beta is None; valid: a tensor of shape .12, 2. for kind gated_delta"),
        ({"gate": gate[:, :1]}, r"gate is \[12, 1\]"),
        ({"gate": gate.long()}, "gate is torch.int64"),
        ({"q": q[:8], "k": k[:8], "v": v[:8]}, r"gate is \[12, 2\]; valid|q and v have 8 and 8 rows"),
        ({"v": v[:8]}, "q and v have 12 and 8 rows; the plan gives this rank 12 .is it a plan of another batch"),
        ({"v": v.float()}, "v is torch.float32 on cpu, q is torch.float64"),
        ({"k": k[..., :2]}, "k has shape .*valid: that of q"),
        ({"q": q[0]}, r"q has shape \[2, 4\]; valid: \[rows, heads, channels\]"),
        ({"q": None}, "q is a NoneType"),
        ({"kind": "delta"}, "kind is 'delta'; valid: gated_delta, kda, lightning, mamba2"),
        ({"kind": "kda"}, "the tensors and arguments have kind kda, the plan kind gated_delta"),
        ({"scale": 3.0}, "the tensors and arguments have scale 3.0, the plan scale None"),
        ({"plan": layout}, "plan is .*valid: a StatePlan"),
        (
            {"plan": build_state_plan(contiguous(Documents([12]), 2), state)},
            "the plan is for 2 ranks, but the group has 1",
        ),
        ({"backend": "triton"}, "backend is 'triton'; valid: torch, fla, an operator, or None"),
        ({"backend": "fla"}, "backend is 'fla' with tensors on cpu; valid: tensors on a GPU"),
        ({"batch_digest": "x"}, "batch_digest is 'x'"),
    ]
    names = ("q", "k", "v", "gate", "beta", "plan")
    for change, words in calls:
        arguments = dict(zip(names, (q, k, v, gate, beta, plan), strict=True)) | change
        with pytest.raises(ConfigError, match=words) as error:
            context_parallel_linear_attention(**arguments)
        assert "\n" not in str(error.value)
    x, weight, bias, _ = convolution_rows(12)
    for change, words in (
        ({"x": x[:5]}, "x has 5 rows; the plan gives this rank 12"),
        ({"x": x[:, :2]}, "x has 2 channels, weight 5"),
        ({"weight": weight.repeat(1, 99)}, "weight has 396 columns, the width of the kernel; valid: 1 to 256"),
        ({"weight": weight[:, 0]}, r"weight is \[5\]"),
        ({"weight": weight.float()}, "weight is torch.float32 on cpu, x is torch.float64"),
        ({"bias": bias[:2]}, r"bias is \[2\]; valid: a tensor \[5\], or None"),
        ({"activation": "gelu"}, "activation is 'gelu'; valid: None or 'silu'"),
        ({"plan": layout}, "plan is"),
        (
            {"plan": replace(plan, layout=contiguous(Documents([12]), 2))},
            "the plan is for 2 ranks, but the group has 1",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            context_parallel_conv1d(**{"x": x, "weight": weight, "plan": plan, "bias": bias} | change)


def test_key_heads_in_one_process_are_those_of_the_plan() -> None:
    state, documents = StateConfig("gated_delta", 4, 8, 6, key_heads=2), Documents([5, 70, 0, 130, 3])
    plan = build_state_plan(zigzag(documents, 3), state, Topology(1, 3))
    generator = torch.Generator().manual_seed(3)
    rows = [
        torch.randn(208, heads, dim, dtype=torch.float64, generator=generator)
        for heads, dim in ((2, 8), (2, 8), (4, 6))
    ]
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in rows[:2])
    gate, beta = -torch.rand(208, 4, dtype=torch.float64), torch.rand(208, 4, dtype=torch.float64)
    result = linear_attention_in_process(plan, q, k, rows[2], gate, beta, torch.ones_like(rows[2]))
    repeated = [x.repeat_interleave(2, 1) for x in (q, k)]
    whole = StateInputs(*repeated, rows[2], gate, beta)
    wanted = token_by_token(whole, torch.ones_like(rows[2]), documents, StateConfig("gated_delta", 4, 8, 6))
    assert torch.allclose(result.out, wanted.out, atol=1e-12)
    assert result.gradients is not None and wanted.gradients is not None
    for own, of_all in zip(result.gradients[:2], wanted.gradients[:2], strict=True):
        assert torch.allclose(own, of_all.unflatten(1, (2, 2)).sum(2), atol=1e-11)
    with pytest.raises(ConfigError, match="have key_heads 4, the plan key_heads 2"):
        linear_attention_in_process(plan, *repeated, rows[2], gate, beta)
    with pytest.raises(ConfigError, match="dout has shape"):
        linear_attention_in_process(plan, q, k, rows[2], gate, beta, rows[2][:, :, :5])
    mamba = StateConfig("mamba2", 4, 8, 6, key_heads=2)  # its step width has no upper limit
    steps = linear_attention_in_process(
        build_state_plan(zigzag(documents, 3), mamba, Topology(1, 3)), q, k, rows[2], gate, 7 * beta
    )
    assert bool(steps.out.isfinite().all())


def ranks_differ(rank: int, group: Any, what: str) -> str:
    """Return the error of a call that differs on rank 1."""
    documents, state = Documents([9, 20, 3]), StateConfig("lightning", 2, 4)
    plan = build_state_plan(contiguous(documents, 2), state, Topology(1, 2), "heads")
    rows = plan.layout.shard(torch.ones(32, 2, 4), rank)
    gate, beta = -torch.ones(len(rows), 2), torch.ones(len(rows), 2)
    try:
        if what == "width":
            context_parallel_conv1d(rows.flatten(1), torch.ones(8, 3 + rank), plan, group=group)
        elif what == "activation":
            context_parallel_conv1d(
                rows.flatten(1), torch.ones(8, 3), plan, activation="silu" if rank else None, group=group
            )
        else:
            gate = gate.double() if what == "type" and rank else gate
            given = None if what == "beta" and rank else beta
            context_parallel_linear_attention(rows, rows, rows, gate, given, plan, group=group)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("what", "name"), [
    ("width", "channels_width_activation_bias"), ("activation", "channels_width_activation_bias"),
    ("beta", "types_of_v_gate_beta"), ("type", "types_of_v_gate_beta"),
])  # fmt: skip
def test_calls_that_differ_between_ranks_are_refused_before_anything_is_sent(
    workers: GlooPool, what: str, name: str
) -> None:
    for error in workers.run(2, ranks_differ, what):
        assert name in error and "\n" not in error.strip()
