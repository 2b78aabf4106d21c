"""One attention problem, run on the engine and on the dense fp64 reference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from mindspeed_cp import AttentionConfig, Documents, Plan, Topology, build_plan, context_parallel_attention
from mindspeed_cp.ops.attention import dense_packed_attention

NAMES = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    """What is computed; the same on every rank."""

    lengths: tuple[int, ...]
    ranks: int
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 16
    head_dim_v: int = 16
    mask: str = "causal"
    dtype: torch.dtype = torch.float32
    algorithm: str = "ring"
    options: tuple[tuple[str, object], ...] = ()
    seed: int = 0

    def with_ranks(self, ranks: int) -> Case:
        return replace(self, ranks=ranks)

    def plan(self) -> Plan:
        attention = AttentionConfig(self.heads, self.kv_heads, self.head_dim, self.head_dim_v, mask=self.mask)
        return build_plan(Documents(list(self.lengths)), Topology(1, self.ranks), attention, self.algorithm, **dict(self.options))

    def inputs(self) -> list[torch.Tensor]:
        """q, k, v and dout of the whole batch."""
        generator = torch.Generator().manual_seed(self.seed)
        shapes = (
            (self.heads, self.head_dim),
            (self.kv_heads, self.head_dim),
            (self.kv_heads, self.head_dim_v),
            (self.heads, self.head_dim_v),
        )
        return [torch.randn(sum(self.lengths), *shape, generator=generator).to(self.dtype) for shape in shapes]

    def reference(self) -> list[torch.Tensor]:
        """out, dq, dk and dv in fp64, from the same rounded inputs."""
        q, k, v, dout = (x.double() for x in self.inputs())
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out, _ = dense_packed_attention(*leaves, Documents(list(self.lengths)), mask=self.mask)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def run(rank: int, group: Any, case: Case) -> list[torch.Tensor]:
    """This rank's rows of out, dq, dk and dv."""
    plan = case.plan()
    q, k, v, dout = (plan.layout.shard(x, rank) for x in case.inputs())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = context_parallel_attention(*leaves, plan, group)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def errors(
    case: Case, results: list[list[torch.Tensor]], reference: list[torch.Tensor]
) -> dict[str, tuple[float, float]]:
    """For out, dq, dk and dv: the largest error over the largest reference value (1 at least), and the relative L2 error."""
    plan = case.plan()
    out = {}
    for i, name in enumerate(NAMES):
        whole = plan.layout.unshard([r[i] for r in results]).double()
        assert torch.isfinite(whole).all(), name
        wrong = whole - reference[i]
        scale = max(1.0, float(reference[i].abs().max())) if reference[i].numel() else 1.0
        largest = float(wrong.abs().max()) / scale if wrong.numel() else 0.0
        out[name] = largest, float(wrong.norm() / reference[i].norm().clamp(min=1e-30))
    return out
