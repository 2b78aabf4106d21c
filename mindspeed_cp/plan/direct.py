"""Direct exchange: every rank gets what it needs of every other rank from that rank itself, one source per round.

In round g rank r takes from rank r - 1 - g: each round is a permutation of the ranks, so on a full mesh every link is
used once, and no rank is everybody's target. No algorithm that gives each rank all it needs moves fewer rows to it.
"""

from __future__ import annotations

import numpy as np

from mindspeed_cp.layout import Documents
from mindspeed_cp.plan.config import AttentionConfig, Topology, check_count
from mindspeed_cp.plan.exchange import exchange
from mindspeed_cp.plan.placement import place
from mindspeed_cp.plan.program import Plan


def build_direct(
    queries: Documents,
    keys: Documents,
    topology: Topology,
    attention: AttentionConfig,
    prefetch: int = 1,
    layout: str = "zigzag",
) -> Plan:
    """Direct exchange over all ranks.

    Args:
        queries, keys, topology, attention, layout: as for the ring.
        prefetch: rounds on their way while one is computed; buffers are one more.

    Raises:
        ConfigError: prefetch is below 1 or above 10**9.
    """
    check_count("prefetch", prefetch, what="a whole number of rounds")
    held, held_kv = place(layout, queries, keys, topology.ranks, attention)
    programs = exchange(held, held_kv, attention, np.arange(topology.ranks) - 1, prefetch)
    return Plan("direct", attention, topology, held, held_kv, held, held_kv, *programs)
