"""Batches, the two bases of comparison, and the time of every system on them.

Basis 1: all ranks are one context-parallel group, and the batch is one packed row over it. Basis 2: contexts of 64K on
64 ranks. The step's documents are cut into four packed rows of 64K tokens, each of which 16 ranks run by an even-split
ring (CP16 x DP4; the time is that of the slowest of the four), as one does who packs rows; against systems that treat
the same documents as one pool over all 64 ranks. A system that can do both counts by the better, as does one that
packs the documents of the rows anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.data import FURTHER_SETS, HEADS, real_lengths_folder
from benchmarks.published.systems import EITHER, OURS, POOLED, REPACKED, SYSTEMS
from benchmarks.published.systems.even import Case
from benchmarks.published.timing import Candidate, Layer, fastest
from mindspeed_cp import AttentionConfig, Documents, Topology
from mindspeed_cp.algorithms.placement.estimate import PlacementModel
from mindspeed_cp.algorithms.registry import with_reduce_dtype
from mindspeed_cp.cluster import Cluster, ComputeCost, LayerCost, load_cluster
from mindspeed_cp.data.lengths import sample_batch
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import assign_to_least_loaded
from mindspeed_cp.plan.problem import visible_pairs

#: Tokens of a rank.
TOKENS = 4096

#: Basis 2.
RANKS, CONTEXT = 64, 2**16


def one_row(ranks: int, name: str, seed: int) -> list[Documents]:
    """Return a batch of basis 1: one packed row."""
    return [Documents(sample_batch(name, ranks * TOKENS, seed, folder=real_lengths_folder(name)))]


def four_rows(name: str, seed: int) -> list[Documents]:
    """Return a batch of basis 2: rows of CONTEXT tokens each; a document that does not fit into the rest of a row is
    cut."""
    lengths = sample_batch(name, RANKS * TOKENS, seed, longest=CONTEXT, folder=real_lengths_folder(name))
    return cut_into_rows(lengths, CONTEXT)


def further_row(name: str, seed: int) -> list[Documents]:
    """Return a batch of a further set of lengths: one packed row over RANKS ranks."""
    return [Documents(_further_lengths(name, seed))]


def further_rows(name: str, seed: int) -> list[Documents]:
    """Return a batch of a further set of lengths as rows of CONTEXT tokens each."""
    return cut_into_rows(_further_lengths(name, seed), CONTEXT)


def _further_lengths(name: str, seed: int) -> np.ndarray:
    return FURTHER_SETS[name](RANKS * TOKENS, RANKS, np.random.default_rng(seed))


def cut_into_rows(lengths: np.ndarray, context: int) -> list[Documents]:
    """Return packed rows of just so many tokens each, in the order of documents; the last one may be shorter."""
    ends = np.cumsum(lengths)
    borders = np.arange(0, int(ends[-1]) + context, context)
    edges = np.unique(np.concatenate([[0], ends, borders[borders < ends[-1]]]))
    pieces, row = np.diff(edges), edges[:-1] // context
    return [Documents(pieces[row == number]) for number in range(int(row[-1]) + 1)]


def pool_of(rows: Sequence[Documents]) -> Documents:
    """Return all documents of the rows, as one batch."""
    return Documents(np.concatenate([row.lengths for row in rows]))


@dataclass(frozen=True)
class Place:
    """Where a batch runs.

    Attributes:
        name: of the cluster's preset.
        heads: of HEADS.
        ranks: in all.
        changed: what the cluster really does, where that is other than the preset, by which plans are made: factors of
            its values.
        reduce_dtype: type in which gradients of keys and values travel in other systems than ours.
        tokens_over_mean: tokens that a rank may hold, in shares of the batch; None: any number.
    """

    name: str
    heads: str
    ranks: int
    changed: tuple[tuple[str, float], ...] = ()
    reduce_dtype: str = "float32"
    tokens_over_mean: float | None = None

    @property
    def attention(self) -> AttentionConfig:
        """Of the layer."""
        return HEADS[self.heads]

    def check(self) -> None:
        """Raise ConfigError where there is no such cluster, or the ranks are no whole nodes."""
        self.case(Documents([]), self.ranks)

    def case(
        self,
        documents: Documents,
        ranks: int,
        shared: dict[object, Candidate] | None = None,
        room: int | None = None,
    ) -> Case:
        """Return the case of documents on some of the ranks; for `shared` and `room` see :class:`Case`.

        Raises:
            ConfigError: no such cluster, or the ranks are no whole nodes.
        """
        preset = load_cluster(self.name)
        per = min(preset.ranks_per_node, ranks)
        if ranks % per:
            raise ConfigError(
                f"ranks is {ranks}; valid for cluster {self.name}: up to {per}, or a multiple of it, ranks of a node"
            )
        topology = Topology(ranks // per, per, self.name)
        candidates = {} if shared is None else shared
        return Case(documents, topology, self.attention, preset.with_ranks(per), candidates, room)

    def truth(self, cluster: Cluster) -> Cluster:
        """Return the cluster as it really is."""
        return cluster.with_values(**{key: getattr(cluster, key) * factor for key, factor in self.changed})


@dataclass(frozen=True, eq=False)
class Timed:
    """What a system made of a batch.

    Attributes:
        seconds: of one layer, forward and backward; of the slowest row, where there are several.
        chosen: the fastest way for each row; one, where the batch is one pool.
        layers: of each of them.
        pooled: the batch ran as one pool.
    """

    seconds: float
    chosen: tuple[Candidate, ...]
    layers: tuple[Layer, ...]
    pooled: bool

    @property
    def fullest(self) -> int:
        """Tokens of the fullest rank."""
        return max(int(candidate.plan.layout.token_counts.max()) for candidate in self.chosen)

    @property
    def slowest(self) -> Layer:
        """The layer of the slowest row."""
        return max(self.layers, key=lambda layer: layer.total)


class Bench:
    """Times systems on batches; plans that do not depend on clusters and heads are made once."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], list[Candidate]] = {}
        self._shared: dict[object, Candidate] = {}

    def time(self, system: str, rows: Sequence[Documents], place: Place) -> Timed | None:
        """Time a system on a batch; None where it cannot run it.

        Args:
            system: of SYSTEMS.
            rows: of the batch; several: basis 2.
            place: where.
        """
        results = []
        if len(rows) == 1 or system not in POOLED:
            results.append(self._on(system, rows, place, place.ranks // len(rows)))
        if len(rows) > 1 and system in (*POOLED, *EITHER):
            results.append(self._on(system, [pool_of(rows)], place, place.ranks))
        if len(rows) > 1 and system in REPACKED:
            cluster = place.case(rows[0], place.ranks // len(rows)).cluster
            repacked = rows_of_equal_work(rows, place.attention, cluster)
            if all(row.tokens for row in repacked):
                results.append(self._on(system, repacked, place, place.ranks // len(rows)))
        possible = [timed for timed in results if timed is not None]
        return min(possible, key=lambda timed: timed.seconds, default=None)

    def _on(self, system: str, rows: Sequence[Documents], place: Place, ranks: int) -> Timed | None:
        """Time rows beside each other, each on so many ranks."""
        chosen, layers = [], []
        mean = sum(row.tokens for row in rows) / ranks / len(rows)
        room = None if place.tokens_over_mean is None else math.ceil(place.tokens_over_mean * mean)
        for row in rows:
            case = place.case(row, ranks, self._shared, room)
            truth = place.truth(case.cluster)
            candidates = self._candidates(system, case, place.reduce_dtype)
            if not candidates:
                return None
            candidate, layer = fastest(candidates, truth)
            chosen.append(candidate)
            layers.append(layer)
        return Timed(max(layer.total for layer in layers), tuple(chosen), tuple(layers), len(rows) == 1)

    def _candidates(self, system: str, case: Case, reduce_dtype: str) -> list[Candidate]:
        key = system, case.documents, case.topology, case.attention, case.room
        if key not in self._made:
            made = SYSTEMS[system](case)
            if system != OURS:
                made = [replace(way, plan=with_reduce_dtype(way.plan, reduce_dtype)) for way in made]
            self._made[key] = [
                way for way in made if case.room is None or way.plan.layout.token_counts.max() <= case.room
            ]
        return self._made[key]


def bound(rows: Sequence[Documents], place: Place) -> float:
    """Return the seconds of a layer that no plan beats: perfect balance over all ranks, whole documents, nothing
    exposed."""
    case = place.case(pool_of(rows), place.ranks)
    truth, layer_cost = place.truth(case.cluster), LayerCost.for_attention(case.attention)
    documents = case.documents
    return PlacementModel(documents, documents, case.topology, case.attention, truth, layer_cost, routing=True).bound


# WLB-LLM's packing: rows of any length with equal work, arXiv 2503.17924.


def rows_of_equal_work(rows: Sequence[Documents], attention: AttentionConfig, cluster: Cluster) -> list[Documents]:
    """Pack the documents of some rows anew into as many: longest first, each into the row with least work so far.

    Work is seconds of attention and of linear layers on one rank. Assumed in its favour: no limit of a row's tokens, so
    that rows differ in length as they need, where the paper has one of memory. Left out: outliers that wait for later
    batches, since all systems run the same documents.

    Args:
        rows: packed rows.
        attention: of the layer.
        cluster: its speeds.
    """
    lengths = np.concatenate([row.lengths for row in rows])
    cost = ComputeCost(cluster, attention)
    work = cost.attention_seconds(visible_pairs(lengths, lengths, attention), lengths)
    work = work + cost.linear_layer_seconds(lengths)
    order = np.argsort(-work, kind="stable")
    row_of = np.zeros(len(lengths), np.int64)
    row_of[order] = assign_to_least_loaded(work[order].tolist(), [0.0] * len(rows))
    return [Documents(lengths[row_of == number]) for number in range(len(rows))]
