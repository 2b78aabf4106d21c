"""One attention problem, run on the engine, in this process or on gloo, and on the dense fp64 reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import pytest
import torch

from mindspeed_cp import AttentionConfig, Documents, Plan, Topology, build_plan, context_parallel_attention
from mindspeed_cp.engine import Stepping
from mindspeed_cp.ops.attention.reference import dense_packed_attention
from tests.engine.all_ranks import attend_all_ranks

NAMES = ("out", "dq", "dk", "dv")

#: Numbers of context-parallel ranks that every test of exactness goes through; by default only the first ones.
SIZES = (1, 2, 3, 4, 5, 8)
DEFAULT_SIZES = (3, 4)


def sizes(default: Sequence[int] = DEFAULT_SIZES, full: Sequence[int] = SIZES) -> Any:
    """Parametrises a test by `ranks`: the default sizes, and with --thorough all of them."""
    return pytest.mark.parametrize(
        "ranks", [pytest.param(n, marks=() if n in default else pytest.mark.thorough) for n in full]
    )


def variants(default: Sequence[int] = DEFAULT_SIZES, full: Sequence[int] = SIZES) -> Any:
    """Parametrises a test by `variant` and `ranks`: every variant on one of the default sizes, which take turns, and with
    --thorough on all sizes."""
    return pytest.mark.parametrize(
        ("variant", "ranks"),
        [
            pytest.param(variant, n, marks=() if n == default[i % len(default)] else pytest.mark.thorough)
            for i, variant in enumerate(VARIANTS)
            for n in full
        ],
    )


#: Option of hierarchical placements that cuts documents over ranks, which the planner leaves whole where they are as short
#: as those of tests: a rank holds at most a quarter more than its share of the tokens. `Case.plan` puts the number in.
CUT = ("max_seqlen_per_dp_cp_rank", "even")

#: Every algorithm, and its options where they change what is sent.
VARIANTS: dict[str, tuple[str, tuple[tuple[str, object], ...]]] = {
    "ring": ("ring", ()),
    "ring, contiguous": ("ring", (("layout", "contiguous"),)),
    "ring, balanced": ("ring", (("layout", "balanced"),)),
    "double_ring": ("double_ring", ()),
    "ulysses": ("ulysses", ()),
    "hybrid": ("hybrid", ()),
    "all_gather": ("all_gather", ()),
    "direct": ("direct", ()),
    "direct, 3 rounds ahead": ("direct", (("prefetch", 3),)),
    "direct, balanced": ("direct", (("layout", "balanced"),)),
    "hierarchical": ("hierarchical", ()),
    "hierarchical, KV fetch": ("hierarchical", (("head_split", False), CUT)),
    "hierarchical, qkv moved": ("hierarchical", (("head_split", False), ("remap", "qkv"))),
    "hierarchical, in pieces": ("hierarchical", (("head_split", False), CUT, ("fetch_pieces", 2))),
}


@dataclass(frozen=True)
class Case:
    """What is computed; the same on every rank. Its text, pasted into a test, runs it again.

    Attributes:
        lengths: of the documents; of their queries, where kv_lengths is given.
        ranks: context-parallel ranks, on `nodes` nodes.
        kv_lengths: of the documents' keys, if they differ.
        parents: of the documents, where some continue others.
        blocks: runs of tokens that see each other both ways.
        options: of the algorithm, as pairs.
        dropout_key: (seed, layer).
        seed: of the inputs.
        The others: see AttentionConfig.
    """

    lengths: tuple[int, ...]
    ranks: int
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 16
    head_dim_v: int = 16
    mask: str = "causal"
    window: tuple[int, int] | None = None
    alibi: bool | tuple[float, ...] = False
    dropout: float = 0.0
    scale: float | None = None
    first_head: int = 0
    kv_lengths: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32
    algorithm: str = "ring"
    options: tuple[tuple[str, object], ...] = ()
    nodes: int = 1
    dropout_key: tuple[int, int] = (11, 3)
    seed: int = 0
    parents: tuple[int, ...] | None = None
    blocks: tuple[tuple[int, int], ...] | None = None
    latent: tuple[int, int] | None = None

    def on(self, ranks: int, variant: str | None = None) -> Case:
        """The same problem on so many ranks, and by one of `VARIANTS` or an algorithm by its name."""
        algorithm, options = (self.algorithm, self.options) if variant is None else VARIANTS.get(variant, (variant, ()))
        return replace(self, ranks=ranks, algorithm=algorithm, options=options, nodes=nodes_for(algorithm, ranks))

    @property
    def documents(self) -> Documents:
        return Documents(list(self.lengths), self.parents, self.blocks)

    @property
    def kv_documents(self) -> Documents | None:
        return None if self.kv_lengths is None else Documents(list(self.kv_lengths))

    @property
    def attention(self) -> AttentionConfig:
        return AttentionConfig(
            self.heads, self.kv_heads, self.head_dim, self.head_dim_v, self.mask,
            self.window, self.alibi, self.dropout, self.scale, self.first_head, self.latent,
        )  # fmt: skip

    def plan(self) -> Plan:
        topology = Topology(self.nodes, self.ranks // self.nodes)
        options: dict[str, Any] = dict(self.options) | ({"latents": "on"} if self.latent else {})
        if CUT in self.options:
            options[CUT[0]] = max(1, -(-5 * self.documents.tokens // (4 * self.ranks)))
        return build_plan(self.documents, topology, self.attention, self.algorithm, self.kv_documents, **options)

    def inputs(self) -> list[torch.Tensor]:
        """q, k, v and dout of the whole batch; with latents, the channels that heads share for k, and latents for v."""
        generator = torch.Generator().manual_seed(self.seed)
        queries, keys = sum(self.lengths), sum(self.lengths if self.kv_lengths is None else self.kv_lengths)
        kv_heads, width, width_v = self.attention.kv_row
        shapes = (
            (queries, self.heads, self.head_dim),
            (keys, kv_heads, width),
            (keys, kv_heads, width_v),
            (queries, self.heads, self.head_dim_v),
        )
        return [torch.randn(*shape, generator=generator).to(self.dtype) for shape in shapes]

    def reference(self) -> list[torch.Tensor]:
        """out, dq, dk and dv in fp64, from the same rounded inputs."""
        fields_of = {field.name: getattr(self, field.name) for field in fields(Case)}
        return _reference(Case(**fields_of | {"ranks": 1, "nodes": 1, "algorithm": "ring", "options": ()}))


@lru_cache(256)
def _reference(case: Case) -> list[torch.Tensor]:
    q, k, v, dout = (x.double() for x in case.inputs())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    key = case.dropout_key if case.dropout else None
    out, _ = dense_packed_attention(
        case.attention, *leaves, case.documents, kv_documents=case.kv_documents, dropout_key=key
    )
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@lru_cache(8)
def plan_of(case: Case) -> Plan:
    """The case's plan, kept while the case is looked at."""
    return case.plan()


def nodes_for(algorithm: str, ranks: int) -> int:
    """Nodes that make the algorithm's own default interesting: two windows, or two nodes, where the ranks divide by two."""
    return 2 if algorithm in ("double_ring", "hierarchical") and ranks % 2 == 0 else 1


def local(rank: int, case: Case) -> tuple[Plan, list[torch.Tensor], torch.Tensor]:
    """The plan, this rank's q, k and v, which want gradients, and dout."""
    plan = case.plan()
    q, k, v, dout = case.inputs()
    leaves = [plan.layout.shard(q, rank), plan.kv_layout_in.shard(k, rank), plan.kv_layout_in.shard(v, rank)]
    return plan, [x.requires_grad_() for x in leaves], plan.layout.shard(dout, rank)


def attend(case: Case, plan: Plan, leaves: list[torch.Tensor], group: Any, **how: Any) -> torch.Tensor:
    """This rank's output."""
    key = case.dropout_key if case.dropout else None
    return context_parallel_attention(*leaves, plan, group, **({"dropout_key": key} | how))


def run(rank: int, group: Any, case: Case) -> list[torch.Tensor]:
    """This rank's rows of out, dq, dk and dv, in a process of its own."""
    plan, leaves, dout = local(rank, case)
    out = attend(case, plan, leaves, group)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def run_all(rank: int, group: Any, cases: list[Case]) -> list[list[torch.Tensor]]:
    """`run` of each case, one after the other."""
    return [run(rank, group, case) for case in cases]


def all_ranks(case: Case) -> tuple[Plan, list[list[torch.Tensor]], list[torch.Tensor]]:
    """The plan, q, k and v of all ranks, which want gradients, and dout of all ranks."""
    plan, inputs = plan_of(case), case.inputs()
    layouts = plan.layout, plan.kv_layout_in, plan.kv_layout_in, plan.layout
    q, k, v, dout = (
        [layout.shard(x, rank) for rank in range(case.ranks)] for layout, x in zip(layouts, inputs, strict=True)
    )
    return plan, [[x.requires_grad_() for x in leaves] for leaves in (q, k, v)], dout


def attend_here(
    case: Case, plan: Plan, leaves: Sequence[Sequence[torch.Tensor]], stepping: Stepping | None = None, **how: Any
) -> list[torch.Tensor]:
    """Every rank's output, in this process."""
    key = case.dropout_key if case.dropout else None
    with filled_with_nan():
        return attend_all_ranks(*leaves, plan, **({"dropout_key": key, "stepping": stepping} | how))


def run_here(case: Case, stepping: Stepping | None = None) -> list[list[torch.Tensor]]:
    """Every rank's rows of out, dq, dk and dv, in this process."""
    plan, leaves, dout = all_ranks(case)
    out = attend_here(case, plan, leaves, stepping)
    with filled_with_nan():
        gradients = torch.autograd.grad(out, [x for of_ranks in leaves for x in of_ranks], dout)
    return [[out[rank].detach(), *gradients[rank :: case.ranks]] for rank in range(case.ranks)]


@contextmanager
def filled_with_nan() -> Iterator[None]:
    """New memory is filled with NaN, so that whoever reads it is found; as in the processes of tests.workers."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def whole(case: Case, results: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """out, dq, dk and dv of the batch, from those of each rank."""
    plan = plan_of(case)
    layouts = plan.layout, plan.layout, plan.kv_layout_in, plan.kv_layout_in
    return [layout.unshard([part[i] for part in results]) for i, layout in enumerate(layouts)]


def errors(
    case: Case, results: list[list[torch.Tensor]], reference: list[torch.Tensor]
) -> dict[str, tuple[float, float]]:
    """For out, dq, dk and dv: the largest error over the largest reference value, and the relative L2 error.

    That value counts as 1 at least, under dropout as 1 / (1 - p): by that factor the weights that are kept grow, and with
    them the terms that cancel in dq and dk, to nothing where a query sees one key only.
    """
    out = {}
    for name, actual, exact in zip(NAMES, whole(case, results), reference, strict=True):
        assert actual.shape == exact.shape, (name, case)
        assert torch.isfinite(actual).all(), (name, case)
        wrong = actual.double() - exact
        largest = 0.0
        if wrong.numel():
            largest = float(wrong.abs().max()) / max(1 / (1 - case.dropout), float(exact.abs().max()))
        out[name] = largest, float(wrong.norm() / exact.norm().clamp(min=1e-30))
    return out


def worst(case: Case, results: list[list[torch.Tensor]]) -> float:
    """The largest of the errors of out, dq, dk and dv."""
    return max(largest for largest, _ in errors(case, results, case.reference()).values())
