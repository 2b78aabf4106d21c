"""KV all-gather: all that a rank needs of all others at once, in one slot in token order.

What a causal or window mask hides is neither sent nor kept. One slot in token order makes the fewest tiles of all
algorithms, for the largest buffer; only the own block hides the transfer. (Llama 3, Grattafiori et al. 2024, section
3.3.2, gathers everything.)
"""

from __future__ import annotations

import numpy as np

from mindspeed_cp.layout import Documents
from mindspeed_cp.plan.config import AttentionConfig, Topology
from mindspeed_cp.plan.exchange import exchange
from mindspeed_cp.plan.placement import place
from mindspeed_cp.plan.program import Plan


def build_all_gather(
    queries: Documents, keys: Documents, topology: Topology, attention: AttentionConfig, layout: str = "zigzag"
) -> Plan:
    """KV all-gather over all ranks; arguments as for the ring."""
    held, held_kv = place(layout, queries, keys, topology.ranks, attention)
    programs = exchange(held, held_kv, attention, np.zeros(topology.ranks, np.int64), prefetch=1)
    return Plan("all_gather", attention, topology, held, held_kv, held, held_kv, *programs)
