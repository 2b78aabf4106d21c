"""Ulysses: every rank gets all tokens for some heads, by all-to-all, and computes them alone.

Heads need not divide by the ranks, and kv heads may be fewer than ranks: each rank has the kv heads that its query
heads read (Jacobs et al. 2023, DeepSpeed-Ulysses, needs both to divide).
"""

from __future__ import annotations

from mindspeed_cp.layout import Documents
from mindspeed_cp.plan.config import AttentionConfig, Topology
from mindspeed_cp.plan.hybrid import heads_split
from mindspeed_cp.plan.program import Plan


def build_ulysses(queries: Documents, keys: Documents, topology: Topology, attention: AttentionConfig) -> Plan:
    """Heads split over all ranks. The caller's layout is the packed row in equal shares, to one token.

    Args:
        queries, keys, topology, attention: as for the ring.
    """
    return heads_split("ulysses", queries, keys, topology, attention, topology.ranks, "contiguous")
