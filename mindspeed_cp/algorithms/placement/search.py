"""Search for the placement of a batch that the cost model finds fastest, among a few dozen.

::

    build_hierarchical                                   algorithms/hierarchical.py
      PlacementSearch                                    this file
        for remap in (off, on):                          a layout for linear layers, or none
          for policy in _policies(remap):                policy.py
            DocumentPlacer.place(policy)                 placer.py, on the loads of loads.py:
              split heads of the longest over nodes        NodeLoads
              cut long ones over the fewest ranks          fill_fewest, water_fill
              short ones whole to the emptiest rank        NodeRoom
              level the shares, hand documents on          repair_placement
            PlacementModel.score(placement)              estimate.py: seconds of each rank, both directions
            twice, if ranks wait longer than others:     place anew, late ranks with less work; score
          until one is within 1 % of the bound
      plan_from_placement, simulate the best few         hierarchical.py

Candidates are policies (:class:`mindspeed_cp.algorithms.placement.policy.PlacementPolicy`): from which length documents
are cut, from which length their heads are split over nodes, with or without a separate layout for linear layers; groups
of powers of two; and all documents cut over all ranks, by tokens or by heads inside nodes. By the model, the choice is
never worse than any of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np

from mindspeed_cp.algorithms.placement.estimate import BACKWARD_TRAFFIC, PlacementEstimate, PlacementModel
from mindspeed_cp.algorithms.placement.placer import DocumentPlacer
from mindspeed_cp.algorithms.placement.policy import Placement, PlacementPolicy
from mindspeed_cp.errors import ConfigError

#: Values of `PlacementPolicy.split` are tried first, with the first of CUT_ABOVE; then the other values of CUT_ABOVE,
#: with the best two of `split`.
SPLIT_HEADS_ABOVE = (0.12, float("inf"), 0.0, 0.06, 0.4, 0.2, 0.03)
CUT_ABOVE = (0.5, 1.0, 0.2)

#: Values of `PlacementPolicy.cut` for flexible groups; with more documents than MAX_FLEXIBLE the first alone.
FLEXIBLE_ABOVE, MAX_FLEXIBLE = (0.1, 0.0), 512

#: The search ends when a placement is this close to the bound that no plan can beat.
STOP_WITHIN = 1.01

#: Of placements this close to the fastest, one of another kind is simulated rather than one of the same: the model's
#: errors are alike for placements of a kind.
OTHER_KIND_WITHIN = 1.05

#: Most tokens of a rank over the mean at which a layout for linear layers has nothing to level.
EVEN_WITHIN = 1.005

#: Placements of a policy that are tried by how long ranks wait under the one before, and the longest wait, as part of
#: the bound, that is not worth it.
LEVELLED_TRIALS, LEVEL_ABOVE = 2, 0.02

#: A placement that is slower than this multiple of the fastest so far is not placed anew by its waits; and if all first
#: ones with a layout for linear layers are slower than the second multiple, no more of these are tried.
LEVEL_WITHIN, LINEAR_LAYOUT_WITHIN = 1.2, 1.1

#: A layout for linear layers must win this much to be worth its launches, which the model leaves out.
LINEAR_LAYOUT_GAIN = 0.995

#: Cutting all documents over all ranks or nodes is not tried if over all ranks that makes more chunks: thousands of
#: documents over a thousand ranks are chunks of a token or two, and their estimate would take most of the search.
MAX_DOC_CHUNKS = 2**19

#: Batches with more documents and ranks (each counted LARGE_RANK times) are searched with two values of `split` and the
#: first of CUT_ABOVE alone: a placement of 4,096 ranks takes some 50 ms.
LARGE_BATCH, LARGE_RANK, LARGE_SPLITS = 2**14, 4, (0.12, 0.0)

#: Placements up to so many times as slow as the fastest are about as fast, and nearly as fast.
NEARLY = (1.003, 1.015)

#: With larger fixed costs they must be at most so many times as slow as the fastest then is.
WORTHWHILE = 0.99

#: The most of them whose loss with larger fixed costs is modelled.
MOST_NEAR = 6

#: Tolerance of token counts, which are sums of floating-point shares.
TOKEN_ROUNDING = 0.5


@dataclass(frozen=True)
class _Trial:
    """A placement, its estimate, and the seconds by which it is compared."""

    placement: Placement
    score: PlacementEstimate
    seconds: float

    @property
    def waits(self) -> float:
        """Seconds that all ranks wait together."""
        return float(self.score.delay.sum())

    @property
    def kind(self) -> tuple[bool, ...]:
        """What placements have in common that the model misjudges alike. A layout for linear layers makes no difference
        where ranks hold equal numbers of tokens."""
        policy, tokens = self.placement.policy, self.score.tokens
        moves_rows = policy.remap and bool(tokens.max() > EVEN_WITHIN * tokens.mean())
        return policy.everywhere, policy.flexible, policy.equal > 0, policy.wide, moves_rows


_by_seconds = attrgetter("seconds", "waits")


class PlacementSearch:
    """Search for the placement of a batch that the model finds fastest.

    Args:
        model: cost model of the batch.
        token_cap: maximum number of tokens on a rank; None: no limit.
        remap: layout for linear layers: "off", "on", or "auto" (if it is faster).
        head_split: allow heads to be split.

    Attributes:
        model: the same.
        score: estimate of the fastest placement.
        ranked: all placements that were tried, the fastest first.
        bound: seconds that no plan can beat.

    Raises:
        ConfigError: no placement keeps the token cap.
    """

    def __init__(
        self,
        model: PlacementModel,
        token_cap: int | None = None,
        remap: str = "auto",
        head_split: bool = True,
    ) -> None:
        self.model, self.bound = model, model.bound
        self._most_tokens = np.inf if token_cap is None else token_cap + TOKEN_ROUNDING
        never = float("inf")
        splits_heads = head_split and model.topology.ranks_per_node > 1
        self._is_large = len(model.lengths) + LARGE_RANK * model.topology.ranks > LARGE_BATCH
        splits = LARGE_SPLITS if self._is_large else SPLIT_HEADS_ABOVE
        self._splits: Sequence[float] = splits if splits_heads else (never,)
        self._placers: dict[bool, DocumentPlacer] = {}  # by `PlacementPolicy.remap`
        self.tried: list[_Trial] = []
        self._least = np.inf  # seconds of the fastest placement so far
        cross_node = min_cross_node_length(model)
        for with_remap in {"off": (False,), "on": (True,), "auto": (False, True)}[remap]:
            self._placers[with_remap] = DocumentPlacer(model, not with_remap, token_cap, cross_node)
            self._try_policies(with_remap)
            if self._least <= STOP_WITHIN * self.bound:
                break
        if not self.tried:
            tokens = max(-(-int(model.lengths.sum()) // model.topology.ranks), token_cap or 0) * 5 // 4
            raise ConfigError(
                f"max_seqlen_per_dp_cp_rank is {token_cap}: no placement found that keeps it; valid: more, such as "
                f"{tokens}"
            )
        self.tried.sort(key=_by_seconds)
        self.score = self.tried[0].score
        self.ranked = tuple(trial.placement for trial in self.tried)

    def best_of_policies(self, count: int) -> list[Placement]:
        """Return the fastest placements of at most `count` policies, one of each; of those that are the same by their
        seconds and waits, the first. After the fastest come those that are nearly as fast and of other kinds, then all
        others."""
        best: dict[PlacementPolicy, _Trial] = {}
        seen = set()
        for trial in self.tried:
            if (trial.seconds, trial.waits) not in seen:
                seen.add((trial.seconds, trial.waits))
                best.setdefault(trial.placement.policy, trial)
        kinds: dict[tuple[bool, ...], _Trial] = {}
        for trial in best.values():
            if trial.seconds <= OTHER_KIND_WITHIN * self.tried[0].seconds:
                kinds.setdefault(trial.kind, trial)
        others = [trial for trial in best.values() if kinds.get(trial.kind) is not trial]
        return [trial.placement for trial in (*kinds.values(), *others)][:count]

    def robust(self) -> list[Placement]:
        """Return the placements that lose least if fixed costs are the most that the cluster says, of those that are
        about as fast as the fastest, and of those that are nearly as fast, where that is worthwhile; maybe such of
        `ranked` in fewer parts."""
        model, best = self.model.with_most_fixed_costs(), self.tried[0].seconds
        variants: list[tuple[float, float, Placement]] = []  # seconds, seconds with larger fixed costs
        near = {(trial.seconds, trial.waits): trial for trial in self.tried if trial.seconds <= NEARLY[-1] * best}
        for trial in list(near.values())[:MOST_NEAR]:
            gain = LINEAR_LAYOUT_GAIN ** -float(trial.placement.policy.remap)
            fewer = model.in_parts(trial.placement)
            variants.append((trial.seconds, model.score(trial.placement).total * gain, trial.placement))
            if (fewer.parts, fewer.parts_across) != (trial.placement.parts, trial.placement.parts_across):
                variants.append((self.model.score(fewer).total * gain, model.score(fewer).total * gain, fewer))
        chosen = []
        for within in NEARLY:
            _, slow, placement = min((each for each in variants if each[0] <= within * best), key=itemgetter(1))
            if slow < WORTHWHILE * variants[0][1]:
                chosen.append(placement)
        return chosen

    def _try_policies(self, remap: bool) -> None:
        """Try all policies, with or without a layout for linear layers, until one is close to the bound."""
        placer = self._placers[remap]
        seen: set[tuple[Any, ...]] = set()
        for policy in self._policies(remap, placer):
            cut, halved = placer.counts(policy)
            flags = policy.wide, policy.power, policy.everywhere, policy.group_nodes, policy.flexible, policy.equal
            key = (max(cut, halved), halved, *flags)  # equal keys place alike
            if key not in seen:
                seen.add(key)
                place = (
                    placer.place_flexible if policy.flexible else placer.place_equal if policy.equal else placer.place
                )
                placement = place(policy)
                if placement is not None:
                    self._try(self.model.in_parts(placement))
            if self._least <= STOP_WITHIN * self.bound:
                return

    def levelled(self, placement: Placement, delay: np.ndarray) -> Placement | None:
        """Place the documents of a placement anew, so that ranks that wait longer under it get less work.

        Args:
            placement: one of `ranked`, or the result of this method.
            delay: seconds that each rank waited before it was done, fp64 [ranks].

        Returns:
            The placement, maybe above the token cap; None if the waits are about equal or the policy leaves no choice.
        """
        policy, delay = placement.policy, delay - delay.min()
        if not policy.can_be_levelled or delay.max() < LEVEL_ABOVE * self.bound:
            return None
        placement = self._placers[policy.remap].place(policy, placement, delay)
        return self.model.in_parts(placement)

    def _try(self, placement: Placement) -> None:
        """Try a placement; then, as long as some ranks wait longer than others, those with documents placed anew."""
        before = np.inf
        for left in range(1 if self._is_large else LEVELLED_TRIALS, -1, -1):
            score = self.model.score(placement)
            if score.tokens.max() <= self._most_tokens:
                seconds = score.total / (LINEAR_LAYOUT_GAIN if placement.policy.remap else 1.0)
                self.tried.append(_Trial(placement, score, seconds))
                self._least = min(self._least, seconds)
            if not left or score.total >= before or score.total > LEVEL_WITHIN * self._least:
                return
            before, again = score.total, self.levelled(placement, score.delay)
            if again is None:
                return
            placement = again

    def _over_nodes(self, trials: Sequence[_Trial]) -> list[_Trial]:
        """Return those that split the heads of some document over several nodes."""
        node = self.model.topology.ranks_per_node
        return [trial for trial in trials if any(size > node for size in trial.placement.split)]

    def _policies(self, remap: bool, placer: DocumentPlacer) -> Iterator[PlacementPolicy]:
        """Yield the policies in the order of trying; later ones depend on the results of earlier ones.

        Args:
            remap: linear layers have a layout of their own.
            placer: the placer of these.
        """
        wide = placer.widest > 1
        before, never = len(self.tried), float("inf")
        for split in self._splits:
            yield PlacementPolicy(CUT_ABOVE[0], split, remap=remap)
        if self._is_large:
            return
        best = sorted(self.tried[before:], key=_by_seconds)[: 1 if remap else 2]
        if remap and best and best[0].seconds > LINEAR_LAYOUT_WITHIN * self._least:
            return
        splits = [trial.placement.policy.split for trial in best]
        # Documents of about a rank's share are even without split heads, once linear layers have their own layout.
        for split in dict.fromkeys([*splits, never] if remap else splits):
            for cut in CUT_ABOVE[1:]:
                yield PlacementPolicy(cut, split, remap=remap)
        if wide:
            over_nodes = self._over_nodes(self.tried[before:])
            if over_nodes:
                policy = min(over_nodes, key=_by_seconds).placement.policy
                yield replace(policy, wide=False)
                fastest = min(self.tried, key=_by_seconds).placement.policy
                for split in self._splits if not fastest.wide else ():
                    yield replace(policy, split=split, wide=False)
        if remap or self.model.topology.ranks == 1:  # the placements of other systems have no layout for linear layers
            return
        if len(self._splits) > 1:
            for cut in FLEXIBLE_ABOVE if len(self.model.lengths) <= MAX_FLEXIBLE else FLEXIBLE_ABOVE[:1]:
                yield PlacementPolicy(cut, never, flexible=True)
                if wide and self._over_nodes([trial for trial in self.tried[-1:] if trial.placement.policy.flexible]):
                    yield PlacementPolicy(cut, never, flexible=True, wide=False, group_nodes=1)
            for size in placer.equal_sizes:
                yield PlacementPolicy(0, 0, equal=size)
        yield PlacementPolicy(1.0, never, power=True)
        if len(self.model.lengths) * self.model.topology.ranks > MAX_DOC_CHUNKS:
            return
        yield PlacementPolicy(0, never, everywhere=True)
        if len(self._splits) > 1:
            for is_wide in (True, False) if wide else (False,):
                yield PlacementPolicy(0, 0, wide=is_wide, everywhere=True)
            for power in range(1, placer.widest.bit_length() - 1):
                yield PlacementPolicy(0, 0, everywhere=True, group_nodes=2**power)


def min_cross_node_length(model: PlacementModel) -> float:
    """Return the length in tokens below which cutting a document over nodes does not pay.

    Attention grows with the square of the length, transfers with the length. A document is worth cutting over two ranks
    of a node if half of its attention takes longer than its transfers over their link, and over two nodes if the
    attention of a node's ranks takes longer than its transfers over the NICs. The larger of the two lengths is
    returned. Counted are forward and backward: 1 + 3 times K and V of half the document for each side, and the pairs at
    the rate of long tiles, n(n+1)/2 of them under a causal mask. (Zeppelin, 2509.21841, has the same thresholds.)
    """
    # Shorter documents stay in a node even if they overfill it slightly: a short document over two nodes ties their
    # ranks together, and in the backward all that share heads with them wait, too.
    cluster, attention, cost = model.cluster, model.attention, model.cost
    long_tile = 1e6  # rows
    seconds = float(cost.attention_seconds(1.0, long_tile) + cost.attention_seconds(1.0, long_tile, backward=True))
    per_squared_token = seconds * (0.5 if attention.mask == "causal" else 1.0)
    traffic = model.kv_row * (1 + BACKWARD_TRAFFIC) / 2  # each side gets the other's half
    over_ranks = traffic / cluster.effective_pair / (per_squared_token / 2)
    nics = cluster.nics_per_node * cluster.effective_nic
    return max(over_ranks, traffic / nics / (per_squared_token / (2 * model.topology.ranks_per_node)))
