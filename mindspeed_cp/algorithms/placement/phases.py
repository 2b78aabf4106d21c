"""Seconds of the phases of one direction on each rank: local blocks, split heads, fetched keys, and their overlap."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mindspeed_cp.algorithms.placement.split_parts import part_weights
from mindspeed_cp.algorithms.split_local_block import LATE_SHARE

#: Bytes of keys, values and their gradients in the backward divided by those of the forward: K and V once more, and
#: gradients in fp32.
BACKWARD_TRAFFIC = 3.0

#: Share of a rank's work on cut documents that is its local block, and share that waits for the last keys.
LOCAL_SHARE, LAST_ROUND_SHARE = 0.3, 0.25

#: Slow-down of routed transfers against their time on the NICs: relays pass rows on between steps, so the hops follow
#: each other and wait for late ranks.
ROUTING_SLOWDOWN = 2.0


@dataclass(frozen=True, eq=False)
class Redistributions:
    """Seconds of the redistributions of split documents in one direction.

    Attributes:
        node: documents inside a node, fp64 [ranks].
        across: documents over several nodes, fp64 [ranks].
    """

    node: np.ndarray
    across: np.ndarray

    @property
    def all(self) -> np.ndarray:
        """Sum of both, fp64 [ranks]."""
        return self.node + self.across


class PhaseSeconds:
    """Seconds of the forward by rank or node.

    Attributes:
        attention: all attention kernels, fp64 [ranks], of which
        cut: documents whose keys are fetched,
        split_node: documents whose heads are split over ranks of one node,
        split: other documents whose heads are split, and
        crossing: those of them that are on several groups of nodes.
        into_node, out_node: redistributions to heads that are split inside a node, and back, fp64 [ranks].
        largest_into: of the document with the most of `into_node`, fp64 [ranks].
        into, out: the same of other documents, fp64 [ranks].
        inside: keys over in-node links, fp64 [ranks].
        routed: keys over NICs that relays pass on, fp64 [nodes].
        nic: keys over NICs that ranks fetch themselves, fp64 [nodes], of which
        last_nic: those of the last group of nodes.
        tokens: tokens that each rank holds, fp64 [ranks].
        parts: number of parts of documents whose heads are split inside a node
            (:mod:`mindspeed_cp.algorithms.placement.split_parts`).
    """

    def __init__(self, ranks: int, nodes: int, parts: int = 1) -> None:
        self.parts = parts
        self.attention, self.cut, self.split, self.crossing, self.tokens, self.inside = np.zeros((6, ranks))
        self.split_node, self.into, self.out, self.into_node, self.out_node, self.largest_into = np.zeros((6, ranks))
        self.nic, self.last_nic, self.routed = np.zeros((3, nodes))

    def add(self, rank: np.ndarray, **seconds: np.ndarray) -> None:
        """Add values to the ranks' sums; `rank` has the rank of each value."""
        for name, value in seconds.items():
            total = getattr(self, name)
            total += np.bincount(rank, value, len(total))

    @property
    def part(self) -> np.ndarray:
        """Share of the first and of the last part of documents whose heads are split inside a node, or of the largest
        document if that is more, fp64 [ranks]."""
        share = self.largest_into / np.maximum(self.into_node, 1e-12)
        return np.where(self.into_node > 0, np.maximum(share, part_weights(self.parts)[0]), 1.0)

    def redistributions(self) -> tuple[Redistributions, Redistributions]:
        """Return the redistributions to split heads, and back."""
        return Redistributions(self.into_node, self.into), Redistributions(self.out_node, self.out)

    def seconds(
        self, factor: float, ranks_per_node: int, before: Redistributions, after: Redistributions
    ) -> np.ndarray:
        """Return the seconds of one direction, fp64 [ranks].

        Args:
            factor: kernel time in units of the forward's; above 1, gradients travel too.
            ranks_per_node: ranks of a node.
            before, after: redistributions before and after the attention of split heads.
        """
        gradients = BACKWARD_TRAFFIC - 1 if factor > 1 else 0.0
        nic, last_nic, routed = (np.repeat(x, ranks_per_node) for x in (self.nic, self.last_nic, self.routed))
        across, node, part = self.split * factor, self.split_node * factor, self.part
        before_node, before_all, after_node, after_all = before.node * part, before.all, after.node * part, after.all
        local = (self.attention - self.split - self.split_node - (1 - LOCAL_SHARE) * self.cut) * factor
        fetched = (1 - LOCAL_SHARE) * self.cut * factor
        fetches_nothing = self.cut == 0
        key_transfers = np.where(fetches_nothing, 0.0, self.inside + ROUTING_SLOWDOWN * routed)
        is_split = across + node > 0
        late = local * np.where(fetches_nothing, 0.5 * is_split, LATE_SHARE if gradients else 0.0)
        # The first part inside the node, documents over several nodes, the other parts inside the node.
        first_done = np.maximum(local - late, before_node) + node * part
        across_begun = before_node + before.across
        across_done = np.maximum(first_done, across_begun) + across
        keys_crossed = across_begun + nic
        across_done = np.maximum(across_done, keys_crossed + LAST_ROUND_SHARE * self.crossing * factor)
        split_done = np.maximum(across_done + node * (1 - part), before_all + node * part)
        keys_arrived = before_all + key_transfers
        fetched_done = np.maximum(
            split_done + fetched, np.where(fetches_nothing, 0.0, keys_arrived + LAST_ROUND_SHARE * fetched)
        )
        last = np.where(node > 0, after_node, after.across)
        returned = np.maximum(split_done, keys_arrived) + last + gradients * key_transfers
        across_returned = across_done + after.across + after.node * (1 - part)
        all_returned = np.maximum(first_done, before_all) + after_all
        # Gradients of split heads return while other rounds are computed: NICs carry them after the keys.
        nics_done = np.maximum(keys_crossed + gradients * nic, across_done + gradients * last_nic) + after.across
        return np.maximum.reduce([fetched_done + late, returned, across_returned, all_returned, nics_done])
