"""Seconds of the phases of one direction on each rank: local blocks, split heads, fetched keys, and their overlap."""

from __future__ import annotations

import numpy as np

from mindspeed_cp.algorithms.split_local_block import LATE_SHARE

#: Bytes of keys, values and their gradients in the backward divided by those of the forward: K and V once more, and
#: gradients in fp32.
BACKWARD_TRAFFIC = 3.0

#: Share of a rank's work on cut documents that is its local block, and share that waits for the last keys.
LOCAL_SHARE, LAST_ROUND_SHARE = 0.3, 0.25

#: Slow-down of routed transfers against their time on the NICs: relays pass rows on between steps, so the hops follow
#: each other and wait for late ranks.
ROUTING_SLOWDOWN = 2.0


class PhaseSeconds:
    """Seconds of the forward by rank or node.

    Attributes:
        attention: all attention kernels, fp64 [ranks], of which
        cut: documents whose keys are fetched,
        split: documents whose heads are split, and
        crossing: those of them that are on several groups of nodes.
        into, out: redistributions to split heads and back, fp64 [ranks].
        inside: keys over in-node links, fp64 [ranks].
        routed: keys over NICs that relays pass on, fp64 [nodes].
        nic: keys over NICs that ranks fetch themselves, fp64 [nodes].
        tokens: tokens that each rank holds, fp64 [ranks].
    """

    def __init__(self, ranks: int, nodes: int) -> None:
        self.attention, self.cut, self.split, self.crossing, self.tokens, self.inside, self.into, self.out = np.zeros(
            (8, ranks)
        )
        self.nic, self.routed = np.zeros((2, nodes))

    def add(self, rank: np.ndarray, **seconds: np.ndarray) -> None:
        """Add values to the ranks' sums; `rank` has the rank of each value."""
        for name, value in seconds.items():
            total = getattr(self, name)
            total += np.bincount(rank, value, len(total))

    def seconds(self, factor: float, ranks_per_node: int, into: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Return the seconds of one direction, fp64 [ranks].

        Args:
            factor: kernel time in units of the forward's; above 1, gradients travel too.
            ranks_per_node: ranks of a node.
            into, out: redistributions before and after the attention of split heads.
        """
        gradients = BACKWARD_TRAFFIC - 1 if factor > 1 else 0.0
        nic, routed = np.repeat(self.nic, ranks_per_node), np.repeat(self.routed, ranks_per_node)
        local = (self.attention - self.split - (1 - LOCAL_SHARE) * self.cut) * factor
        fetched = (1 - LOCAL_SHARE) * self.cut * factor
        fetches_nothing = self.cut == 0
        key_transfers = np.where(fetches_nothing, 0.0, self.inside + ROUTING_SLOWDOWN * routed)
        late = local * np.where(fetches_nothing, 0.5 * (self.split > 0), LATE_SHARE if gradients else 0.0)
        split_begins = np.maximum(local - late, into)
        split_done = np.maximum(
            split_begins + self.split * factor, into + nic + LAST_ROUND_SHARE * self.crossing * factor
        )
        keys_arrived = into + key_transfers
        fetched_done = np.maximum(
            split_done + fetched, np.where(fetches_nothing, 0.0, keys_arrived + LAST_ROUND_SHARE * fetched)
        )
        returned = np.maximum(split_done, keys_arrived) + out + gradients * key_transfers
        # Gradients of split heads return while other rounds are computed: NICs carry them after the keys.
        nics_done = into + (1 + gradients) * nic + LAST_ROUND_SHARE * self.crossing * factor + out
        return np.maximum(fetched_done + late, np.maximum(returned, nics_done))
