"""Ulysses: every rank gets all tokens of some heads by all-to-all, and computes them without further messages.

Heads need not divide by the ranks, and kv heads may be fewer than ranks: each rank has the kv heads that its query
heads read (Jacobs et al. 2023, DeepSpeed-Ulysses, needs both to divide).
"""

from __future__ import annotations

from mindspeed_cp.algorithms.hybrid import head_groups_ring
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
        documents: lengths of the documents, or of their queries in cross-attention.
        kv_documents: lengths of the documents' keys and values.
        topology: context-parallel ranks.
        attention: attention of one layer.
    """
    return head_groups_ring("ulysses", documents, kv_documents, topology, attention, topology.ranks, "contiguous")
