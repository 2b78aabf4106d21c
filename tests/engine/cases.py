"""One attention problem, run on the engine and on the dense fp64 reference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from mindspeed_cp import AttentionConfig, Documents, Plan, Topology, build_plan, context_parallel_attention
from mindspeed_cp.ops.attention.reference import dense_attention_of

NAMES = ("out", "dq", "dk", "dv")

#: Numbers of context-parallel ranks that every test of exactness goes through.
SIZES = (1, 2, 3, 4, 5, 8)

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
    "hierarchical, exchange": ("hierarchical", (("head_split", False), ("remap", "qkv"))),
}


@dataclass(frozen=True)
class Case:
    """What is computed; the same on every rank. Its text, pasted into a test, runs it again.

    Attributes:
        lengths: of the documents; of their queries, where kv_lengths is given.
        ranks: context-parallel ranks, on `nodes` nodes.
        kv_lengths: of the documents' keys, if they differ.
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

    def on(self, ranks: int, variant: str | None = None) -> Case:
        """The same problem on so many ranks, and by one of `VARIANTS`."""
        algorithm, options = (self.algorithm, self.options) if variant is None else VARIANTS[variant]
        return replace(self, ranks=ranks, algorithm=algorithm, options=options, nodes=nodes_for(algorithm, ranks))

    @property
    def documents(self) -> Documents:
        return Documents(list(self.lengths))

    @property
    def kv_documents(self) -> Documents | None:
        return None if self.kv_lengths is None else Documents(list(self.kv_lengths))

    @property
    def attention(self) -> AttentionConfig:
        return AttentionConfig(
            self.heads, self.kv_heads, self.head_dim, self.head_dim_v, self.mask,
            self.window, self.alibi, self.dropout, self.scale, self.first_head,
        )  # fmt: skip

    def plan(self) -> Plan:
        topology = Topology(self.nodes, self.ranks // self.nodes)
        return build_plan(
            self.documents, topology, self.attention, self.algorithm, self.kv_documents, **dict(self.options)
        )

    def inputs(self) -> list[torch.Tensor]:
        """q, k, v and dout of the whole batch."""
        generator = torch.Generator().manual_seed(self.seed)
        queries, keys = sum(self.lengths), sum(self.lengths if self.kv_lengths is None else self.kv_lengths)
        shapes = (
            (queries, self.heads, self.head_dim),
            (keys, self.kv_heads, self.head_dim),
            (keys, self.kv_heads, self.head_dim_v),
            (queries, self.heads, self.head_dim_v),
        )
        return [torch.randn(*shape, generator=generator).to(self.dtype) for shape in shapes]

    def reference(self) -> list[torch.Tensor]:
        """out, dq, dk and dv in fp64, from the same rounded inputs."""
        q, k, v, dout = (x.double() for x in self.inputs())
        leaves = [x.requires_grad_() for x in (q, k, v)]
        key = self.dropout_key if self.dropout else None
        out, _ = dense_attention_of(
            self.attention, *leaves, self.documents, kv_documents=self.kv_documents, dropout_key=key
        )
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def nodes_for(algorithm: str, ranks: int) -> int:
    """Nodes that make the algorithm's own default interesting: two windows, or two nodes, where the ranks divide by two."""
    return 2 if algorithm in ("double_ring", "hierarchical") and ranks % 2 == 0 else 1


def local(rank: int, case: Case) -> tuple[Plan, list[torch.Tensor], torch.Tensor]:
    """The plan, this rank's q, k and v, which want gradients, and dout."""
    plan = case.plan()
    q, k, v, dout = case.inputs()
    leaves = [plan.layout.shard(q, rank), plan.layout_kv.shard(k, rank), plan.layout_kv.shard(v, rank)]
    return plan, [x.requires_grad_() for x in leaves], plan.layout.shard(dout, rank)


def attend(case: Case, plan: Plan, leaves: list[torch.Tensor], group: Any, **how: Any) -> torch.Tensor:
    """This rank's output."""
    key = case.dropout_key if case.dropout else None
    return context_parallel_attention(*leaves, plan, group, **({"dropout_key": key} | how))


def run(rank: int, group: Any, case: Case) -> list[torch.Tensor]:
    """This rank's rows of out, dq, dk and dv."""
    plan, leaves, dout = local(rank, case)
    out = attend(case, plan, leaves, group)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def run_all(rank: int, group: Any, cases: list[Case]) -> list[list[torch.Tensor]]:
    """`run` of each case, one after the other."""
    return [run(rank, group, case) for case in cases]


def whole(case: Case, results: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """out, dq, dk and dv of the batch, from those of each rank."""
    plan = case.plan()
    layouts = plan.layout, plan.layout, plan.layout_kv, plan.layout_kv
    return [layout.unshard([part[i] for part in results]) for i, layout in enumerate(layouts)]


def errors(
    case: Case, results: list[list[torch.Tensor]], reference: list[torch.Tensor]
) -> dict[str, tuple[float, float]]:
    """For out, dq, dk and dv: the largest error over the largest reference value, and the relative L2 error.

    That value counts as 1 at least, under dropout as 1 / (1 - p): by that factor the weights that are kept grow, and with
    them the terms that cancel in dq and dk, to nothing where a query sees one key only.
    """
    out = {}
    for name, found, exact in zip(NAMES, whole(case, results), reference, strict=True):
        assert found.shape == exact.shape, (name, case)
        assert torch.isfinite(found).all(), (name, case)
        wrong = found.double() - exact
        largest = 0.0
        if wrong.numel():
            largest = float(wrong.abs().max()) / max(1 / (1 - case.dropout), float(exact.abs().max()))
        out[name] = largest, float(wrong.norm() / exact.norm().clamp(min=1e-30))
    return out


def worst(case: Case, results: list[list[torch.Tensor]]) -> float:
    """The largest of the errors of out, dq, dk and dv."""
    return max(largest for largest, _ in errors(case, results, case.reference()).values())
