"""Direct KV fetch: every rank fetches what it needs of another rank's keys from that rank, one source in each round.

In round g rank r fetches from rank r - 1 - g. Each round is a permutation of the ranks, so on a full mesh every link is
used once, and no rank is the source of all others. No algorithm that gives each rank all it needs moves fewer rows to
it.

KV all-gather is the case of a single round, into one slot in token order. This gives the fewest tiles of all
algorithms, for the largest buffer; only the local block hides the transfer. Keys that a causal mask or window hides are
neither sent nor kept. (Llama 3, Grattafiori et al. 2024, section 3.3.2, gathers everything.)
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from mindspeed_cp.algorithms.kv_fetch.programs import direct_fetch_programs
from mindspeed_cp.algorithms.layouts import LayoutName, build_layouts
from mindspeed_cp.algorithms.options import AtLeast
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan.problem import AttentionConfig, Topology
from mindspeed_cp.plan.program import Plan


def build_direct(
    documents: Documents,
    kv_documents: Documents,
    topology: Topology,
    attention: AttentionConfig,
    *,
    prefetch: Annotated[int, AtLeast(1, "rounds")] = 1,
    layout: LayoutName = "zigzag",
) -> Plan:
    """Direct fetches: every rank gets what it needs from each owner.

    Args:
        documents, kv_documents, topology, attention: as for :func:`mindspeed_cp.build_plan`.
        prefetch: rounds in flight while one is computed; a rank has one receive buffer more.
        layout: "zigzag" (balanced under a causal mask), "contiguous" (balanced under a full mask, few messages under a
            window), or "balanced" (short documents stay whole)
    """
    layouts = build_layouts(layout, documents, kv_documents, topology.ranks, attention)
    programs = direct_fetch_programs(*layouts, attention, np.arange(topology.ranks) - 1, prefetch)
    return Plan("direct", attention, topology, *layouts, *layouts, *programs)


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
        documents, kv_documents, topology, attention: as for :func:`mindspeed_cp.build_plan`.
        layout: "zigzag" (balanced under a causal mask), "contiguous" (balanced under a full mask, few messages under a
            window), or "balanced" (short documents stay whole).
    """
    layouts = build_layouts(layout, documents, kv_documents, topology.ranks, attention)
    programs = direct_fetch_programs(*layouts, attention, np.zeros(topology.ranks, np.int64), prefetch=1)
    return Plan("all_gather", attention, topology, *layouts, *layouts, *programs)
