"""Hybrid: Ulysses in groups of neighbouring ranks, a ring over the groups. Ulysses is the case of one group.

Under Ulysses every rank gets all tokens of some heads by all-to-all, and computes them without further messages. Heads
need not divide by the ranks, and kv heads may be fewer than ranks: each rank has the kv heads that its query heads read
(Jacobs et al. 2023, DeepSpeed-Ulysses, needs both to divide).
"""

from __future__ import annotations

from typing import Annotated

from mindspeed_cp.algorithms.head_groups import head_groups_plan
from mindspeed_cp.algorithms.layouts import LayoutName, build_layouts
from mindspeed_cp.algorithms.options import DividesRanks
from mindspeed_cp.algorithms.ring import ring_programs
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan.problem import AttentionConfig, Topology
from mindspeed_cp.plan.program import Plan


def build_ulysses(
    documents: Documents,
    kv_documents: Documents,
    topology: Topology,
    attention: AttentionConfig,
) -> Plan:
    """Heads split over all ranks; the caller holds the packed row in equal shares.

    Args:
        documents, kv_documents, topology, attention: as for :func:`mindspeed_cp.build_plan`.
    """
    return head_groups_ring("ulysses", documents, kv_documents, topology, attention, topology.ranks, "contiguous")


def build_hybrid(
    documents: Documents,
    kv_documents: Documents,
    topology: Topology,
    attention: AttentionConfig,
    *,
    ulysses_degree: Annotated[int | None, DividesRanks()] = None,
    layout: LayoutName = "zigzag",
) -> Plan:
    """Ulysses in groups of neighbouring ranks, a ring over the groups.

    Args:
        documents, kv_documents, topology, attention: as for :func:`mindspeed_cp.build_plan`.
        ulysses_degree: ranks of a group; default: the largest divisor of the ranks of a node that is neither all ranks
            nor above the number of heads.
        layout: "zigzag" (balanced under a causal mask), "contiguous" (balanced under a full mask, few messages under a
            window), or "balanced" (short documents stay whole).
    """
    degree, per_node = ulysses_degree, topology.ranks_per_node
    if degree is None:
        degrees = range(1, min(per_node, attention.heads, topology.ranks - 1) + 1)
        degree = max((size for size in degrees if per_node % size == 0), default=1)
    return head_groups_ring("hybrid", documents, kv_documents, topology, attention, degree, layout)


def head_groups_ring(
    name: str,
    documents: Documents,
    kv_documents: Documents,
    topology: Topology,
    attention: AttentionConfig,
    degree: int,
    layout: str,
) -> Plan:
    """Return a plan with heads split in groups of `degree` ranks and a ring over the groups."""
    layouts = build_layouts(layout, documents, kv_documents, topology.ranks // degree, attention)
    return head_groups_plan(name, *layouts, topology, attention, ring_programs(*layouts, attention))
