"""KV all-gather: every rank fetches all keys that it needs at once, into one slot in token order.

Keys that a causal mask or window hides are neither sent nor kept. One slot in token order gives the fewest tiles of all
algorithms, for the largest buffer; only the local block hides the transfer. (Llama 3, Grattafiori et al. 2024, section
3.3.2, gathers everything.)
"""

from __future__ import annotations

import numpy as np

from mindspeed_cp.algorithms.kv_fetch.programs import direct_fetch_programs
from mindspeed_cp.algorithms.layouts import LayoutName, build_layouts
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan.problem import AttentionConfig, Topology
from mindspeed_cp.plan.program import Plan


def build_all_gather(
    documents: Documents,
    kv_documents: Documents,
    topology: Topology,
    attention: AttentionConfig,
    *,
    layout: LayoutName = "zigzag",
) -> Plan:
    """All-gather of the needed keys and values over all ranks.

    Args:
        documents: lengths of the documents, or of their queries in cross-attention.
        kv_documents: lengths of the documents' keys and values.
        topology: context-parallel ranks.
        attention: attention of one layer.
        layout: "zigzag" (balanced under a causal mask), "contiguous" (balanced under a full mask, few messages under a
            window), or "balanced" (short documents stay whole).
    """
    layouts = build_layouts(layout, documents, kv_documents, topology.ranks, attention)
    programs = direct_fetch_programs(*layouts, attention, np.zeros(topology.ranks, np.int64), prefetch=1)
    return Plan("all_gather", attention, topology, *layouts, *layouts, *programs)
