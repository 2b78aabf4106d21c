"""The systems: each one's ways to run a batch, as plans that can be proved, or as plans on modelled links.

A system is a function of a :class:`Case`; it returns the ways that it would choose among, of which the fastest counts,
or none where it cannot run the case. So every system has the options that its users would tune, and where its paper
leaves something open the choice is made in its favour. All of them skip tiles that the mask hides, send and sum
gradients of keys in fp32 as this project's engine does, and start transfers as early as their buffers allow.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.published.gather import build_gathered
from benchmarks.published.groups import Thresholds, power_of_two_groups, zoned_groups
from benchmarks.published.rings import Group, grouped_rings
from benchmarks.published.routed import RoutedLinkQueues, routing_pays
from benchmarks.published.split_groups import differencing, flexible_groups, group_seconds, split_in_groups
from benchmarks.published.timing import Candidate
from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan
from mindspeed_cp.algorithms.hierarchical import plan_from_placement
from mindspeed_cp.algorithms.linear_layout import cheapest_mode, with_linear_layout
from mindspeed_cp.algorithms.placement.estimate import PlacementModel
from mindspeed_cp.algorithms.placement.placer import DocumentPlacer
from mindspeed_cp.algorithms.placement.policy import DocumentShares, Placement, PlacementPolicy
from mindspeed_cp.cluster import Cluster, LayerCost
from mindspeed_cp.plan import Plan

#: Tiles of so many ranks stand for those of all, where documents are cut evenly over all of them.
LOOKED_AT = 16

#: `max_seqlen_per_dp_cp_rank` of dynamic context parallelism: tokens of a document that a rank takes. All are tried.
MOST_TOKENS = (2048, 4096, 8192)

#: Of Zeppelin's zones; all are tried.
ZONES = tuple(
    Thresholds(*thresholds) for thresholds in ((1.0, 1.0), (1.0, 0.5), (0.5, 0.5), (0.25, 0.5), (2.0, 1.0), (1.0, 2.0))
)


@dataclass(frozen=True)
class Case:
    """One batch on some ranks.

    Attributes:
        documents: the batch, or one row of it.
        topology: the ranks; its cluster is the preset that plans may go by.
        attention: of the layer.
        cluster: that preset, of as many ranks a node as are in use.
        shared: candidates that were made already, for other clusters or heads too.
        placements: `simulated_placements` of this project's plans; None: the default.
    """

    documents: Documents
    topology: Topology
    attention: AttentionConfig
    cluster: Cluster
    shared: dict[object, Candidate] = field(default_factory=dict)
    placements: int | None = None

    def once(self, make: Callable[[Documents, Topology, AttentionConfig], Candidate], *what: object) -> Candidate:
        """Return a candidate that depends on documents, nodes and ranks, and on `what` names it, alone: neither on the
        cluster's speeds nor on numbers of heads."""
        topology = replace(self.topology, cluster=None)
        key = self.documents, topology, what
        if key not in self.shared:
            self.shared[key] = make(self.documents, topology, self.attention)
        return self.shared[key].with_attention(self.attention)


def ring(case: Case) -> list[Candidate]:
    """Build an even-split zig-zag ring over all ranks: TransformerEngine's context parallelism with `cp_comm_type: p2p`
    (Ring Attention, arXiv 2310.01889; zig-zag chunks as in Megatron-core). Assumed: documents of any length, where TE
    pads each to a multiple of twice the ranks; gradients of keys travel in fp32, where TE sends bf16 (see --bf16)."""
    return [case.once(lambda d, t, a: _even("ring", build_plan(d, t, a, "ring")), "ring")]


def double_ring(case: Case) -> list[Candidate]:
    """Build rings in nodes and between them at once (LoongTrain, arXiv 2406.18485; MindSpeed's `cp_window_size`): the
    window is a node. On one node it is the ring."""
    return [case.once(lambda d, t, a: _even("double ring", build_plan(d, t, a, "double_ring")), "double ring")]


def all_gather(case: Case) -> list[Candidate]:
    """Gather keys and values of all ranks on every rank, zig-zag chunks (Llama 3, arXiv 2407.21783, section
    3.3.2; TransformerEngine's `cp_comm_type: all_gather`). Blocks cross to each node once over all its NICs, and
    gradients come back likewise, as collective libraries do it. In the paper all of it is exposed; here a rank's own
    block is computed meanwhile."""
    return [case.once(lambda d, t, a: _even("all-gather", build_gathered(d, t, a)), "all-gather")]


def ulysses(case: Case) -> list[Candidate]:
    """Split heads over all ranks by all-to-all (DeepSpeed-Ulysses, arXiv 2309.14509). Not possible on more ranks than
    query heads. Key/value heads may be fewer than ranks, and are then copied, which the paper's code cannot do."""
    if case.topology.ranks > case.attention.heads:
        return []
    plan = build_plan(case.documents, case.topology, case.attention, "ulysses")
    return [_by_heads(case, "Ulysses", plan, case.topology.ranks)]


def usp(case: Case) -> list[Candidate]:
    """Build Ulysses in groups of neighbouring ranks, a zig-zag ring between them (USP, arXiv 2405.07719; Megatron's
    `a2a+p2p`). Of degrees from half a node's ranks up to the heads, the fastest; smaller ones leave more to the ring,
    and were never faster. A group may be larger than a node: its all-to-all then uses all NICs."""
    least = max(2, case.topology.ranks_per_node // 2)
    candidates = []
    for degree in (d for d in range(least, case.topology.ranks) if case.topology.ranks % d == 0):
        if degree <= case.attention.heads:
            plan = build_plan(case.documents, case.topology, case.attention, "hybrid", ulysses_degree=degree)
            candidates.append(_by_heads(case, f"USP, Ulysses {degree}", plan, degree))
    return candidates


def dynamic_cp(case: Case) -> list[Candidate]:
    """Build Megatron-core's dynamic (hybrid) context parallelism (its `BalancedCPScheduler`): every document on a power
    of two of neighbouring ranks by its length, balanced by s^2 / ranks. With TE's forwarding ring in each group, or
    with keys fetched from their owners; linear layers where attention is. Of several `max_seqlen_per_dp_cp_rank` the
    fastest. Assumed in its favour: groups run one after the other without the barriers of its schedule, and backwards
    after all forwards."""
    lengths, ranks = case.documents.lengths, case.topology.ranks
    candidates = []
    for most in MOST_TOKENS:
        candidates += _in_groups(case, f"dynamic CP <= {most}", power_of_two_groups(lengths, ranks, most))
    return candidates


def dynamic_cp_by_cost(case: Case) -> list[Candidate]:
    """Build what is not published: dynamic context parallelism with this project's cost model in place of s^2 / ranks,
    both for the size of a document's group and for the balance; linear layers count. It is among the candidates of this
    project's search too, there with its own exchange of keys in place of rings."""
    return _in_groups(case, "dynamic CP by cost", _groups_by_cost(case))


def zeppelin(case: Case) -> list[Candidate]:
    """Build Zeppelin (arXiv 2509.21841): documents on one rank, in a ring inside a node, or in a ring across nodes;
    messages between nodes routed over all NICs; ranks balanced by attention, and linear layers on equal tokens by a
    remap. The paper's thresholds are not public: several are tried, nodes filled by tokens and by attention, with and
    without remap, and the fastest counts; routing where its formula says that it pays. Assumed in its favour: documents
    of one group of ranks share a ring, where the paper has a ring for each; all rings of a rank and its local documents
    hide each other's transfers."""
    attention = _estimate(case).attention_work
    by_groups: dict[tuple[Group, ...], list[Candidate]] = {}
    for filling in (case.documents.lengths.astype(float), attention):
        for zones in ZONES:
            _zoned(case, by_groups, filling, attention, zones, remaps=True)
    return [candidate for candidates in by_groups.values() for candidate in candidates]


def zeppelin_by_cost(case: Case) -> list[Candidate]:
    """Build what is not published: Zeppelin's zones, rings and routing with nodes and ranks balanced by this project's
    cost model, in which linear layers count, and no remap."""
    work = _estimate(case).work
    by_groups: dict[tuple[Group, ...], list[Candidate]] = {}
    for zones in ZONES:
        _zoned(case, by_groups, work, work, zones, remaps=False)
    return [candidate for candidates in by_groups.values() for candidate in candidates]


def verl(case: Case) -> list[Candidate]:
    """Build verl's balance: documents whole in groups of neighbouring ranks, chosen by Karmarkar-Karp, Ulysses in each
    group (`verl/utils/seqlen_balancing.py`, `ulysses_sequence_parallel_size`). By tokens and by its workload,
    24,576 s + s^2; of all sizes of a group up to the heads the fastest."""
    lengths, ranks = case.documents.lengths.astype(float), case.topology.ranks
    candidates = []
    for size in _group_sizes(case):
        for what, costs in (("tokens", lengths), ("workload", 24576 * lengths + lengths**2)):
            group = differencing(costs, ranks // size)
            plan = split_in_groups(
                "verl", case.documents, case.topology, case.attention, np.full(len(lengths), size), group * size
            )
            candidates.append(Candidate(f"Ulysses {size}, by {what}", plan))
    return candidates


def flexsp(case: Case) -> list[Candidate]:
    """Build FlexSP (arXiv 2412.01523): groups of several sizes, powers of two, each document whole in one, Ulysses in
    each. Its objective is the time of the busiest group, by this project's speeds of kernels and links; it is minimized
    by bisection in place of its mixed integer program. Assumed in its favour: no limit of memory, all groups of a step
    at once."""
    seconds = {
        size: group_seconds(case.documents, case.topology, case.attention, case.cluster, size)
        for size in (1, *_group_sizes(case))
    }
    degree, first = flexible_groups(seconds, case.topology.ranks)
    plan = split_in_groups("FlexSP", case.documents, case.topology, case.attention, degree, first)
    sizes = ", ".join(map(str, np.unique(degree)[::-1].tolist()))
    return [Candidate(f"groups of {sizes}", plan)]


def _group_sizes(case: Case) -> list[int]:
    """Return the powers of two of ranks from 2 that the heads and the ranks can be divided into."""
    limit = min(case.topology.ranks, case.attention.heads)
    return [2**i for i in range(1, limit.bit_length()) if case.topology.ranks % 2**i == 0 and 2**i <= limit]


def eod_ring(case: Case, tensor_parallel: int = 1) -> list[Candidate]:
    """Build MindSpeed's ring with `--reset-attention-mask` (EOD reset): every document is padded to a multiple of cp *
    lcm(2, tp), then cut evenly over all ranks. The padding is computed and sent like tokens."""
    padded = Documents(eod_lengths(case.documents.lengths, case.topology.ranks, tensor_parallel))
    case = replace(case, documents=padded)
    return [case.once(lambda d, t, a: _even("EOD ring", build_plan(d, t, a, "ring")), "EOD ring")]


def eod_lengths(lengths: np.ndarray, ranks: int, tensor_parallel: int) -> np.ndarray:
    """Return the lengths padded to a multiple of ranks * lcm(2, tensor_parallel), int64 [documents]."""
    unit = ranks * math.lcm(2, tensor_parallel)
    return -(-lengths // unit) * unit


def ours(case: Case) -> list[Candidate]:
    """Build this project's hierarchical plans, as `algorithm: hierarchical` makes them by the preset, without options
    unless --placements is given: one plan, whatever the cluster really is."""
    plan = build_plan(
        case.documents, case.topology, case.attention, "hierarchical", simulated_placements=case.placements
    )
    return [Candidate("hierarchical", plan)]


#: By the name in the table. The first is what others are compared with, the last is this project's.
SYSTEMS: dict[str, Callable[[Case], list[Candidate]]] = {
    "even ring": ring,
    "EOD ring": eod_ring,
    "double ring": double_ring,
    "all-gather": all_gather,
    "Ulysses": ulysses,
    "USP": usp,
    "dynamic CP": dynamic_cp,
    "Zeppelin": zeppelin,
    "verl": verl,
    "FlexSP": flexsp,
    "dyn. by cost": dynamic_cp_by_cost,
    "Zep. by cost": zeppelin_by_cost,
    "ours": ours,
}

BASE, OURS = "even ring", "ours"

#: Variants of published systems with this project's cost model.
VARIANTS = ("dyn. by cost", "Zep. by cost")

#: Systems that go by documents, so that they can treat all ranks of a step as one pool.
POOLED = ("dynamic CP", "Zeppelin", "verl", "FlexSP", *VARIANTS, OURS)


def _even(label: str, plan: Plan) -> Candidate:
    """Return a plan in which every document is cut evenly over all ranks, so that evenly spaced ranks stand for the
    others."""
    count = min(plan.ranks, LOOKED_AT)
    chosen = np.unique(np.linspace(0, plan.ranks - 1, count).round().astype(np.int64))
    return Candidate(label, plan, _nearest(chosen, plan.ranks))


def _by_heads(case: Case, label: str, plan: Plan, degree: int) -> Candidate:
    """Return a plan whose groups of ranks split heads: where all have as many, the first member of each group stands
    for the others, and of many groups evenly spaced ones for their neighbours. Tiles do not depend on key/value
    heads."""
    if plan.attention.heads % degree:
        return Candidate(label, plan)
    groups = plan.ranks // degree
    chosen = np.unique(np.linspace(0, groups - 1, min(groups, LOOKED_AT)).round().astype(np.int64))
    representative = np.repeat(_nearest(chosen, groups), degree) * degree
    like = case.once(lambda *_: Candidate(label, plan, representative), label, plan.attention.heads)
    return Candidate(label, plan, representative, counted=like.counted)


def _nearest(chosen: np.ndarray, count: int) -> np.ndarray:
    """Return which of the chosen numbers, ascending, is nearest to each number below `count`."""
    edges = (chosen[1:] + chosen[:-1] + 1) // 2
    out: np.ndarray = chosen[np.searchsorted(edges, np.arange(count), "right")]
    return out


def _placement(groups: Sequence[Group]) -> Placement:
    """Return groups with equal shares as a placement of the planner."""
    members = DocumentShares.from_lists(
        [(doc, list(group), [1.0 / len(group)] * len(group)) for doc, group in enumerate(groups)]
    )
    return Placement(PlacementPolicy(1.0, math.inf, power=True), members, {})


def _in_groups(case: Case, label: str, groups: Sequence[Group]) -> list[Candidate]:
    """Build plans of documents in groups of ranks: by forwarding rings, or with keys fetched from their owners."""

    def rings(documents: Documents, topology: Topology, attention: AttentionConfig) -> Candidate:
        plan = grouped_rings("dynamic CP", documents, topology, attention, groups, interleaved=False)
        return Candidate(f"{label}, rings", plan)

    def fetched(documents: Documents, topology: Topology, attention: AttentionConfig) -> Candidate:
        plan = plan_from_placement(_placement(groups), documents, documents, topology, attention, routing=False)
        return Candidate(f"{label}, fetched", plan)

    return [case.once(make, label, name, *groups) for name, make in (("rings", rings), ("fetched", fetched))]


def _groups_by_cost(case: Case) -> list[Group]:
    """Return powers of two of ranks by the planner's cost model: as many as hold the document's work as equal
    shares."""
    members = DocumentPlacer(_estimate(case)).place(PlacementPolicy(1.0, math.inf, power=True)).whole
    edges = np.searchsorted(members.doc, np.arange(len(case.documents) + 1))
    return [tuple(members.rank[low:high].tolist()) for low, high in itertools.pairwise(edges.tolist())]


def _estimate(case: Case) -> PlacementModel:
    documents, attention = case.documents, case.attention
    layer = LayerCost.for_attention(attention)
    return PlacementModel(documents, documents, case.topology, attention, case.cluster, layer, routing=False)


def _zoned(
    case: Case,
    by_groups: dict[tuple[Group, ...], list[Candidate]],
    of_node: np.ndarray,
    of_rank: np.ndarray,
    zones: Thresholds,
    remaps: bool,
) -> None:
    """Add the plans of Zeppelin's zones at some thresholds, unless there are such groups already."""
    topology = case.topology
    groups = zoned_groups(of_node, of_rank, topology.nodes, topology.ranks_per_node, zones)
    if tuple(groups) in by_groups:
        return

    def rings(documents: Documents, topology: Topology, attention: AttentionConfig) -> Candidate:
        plan = grouped_rings("Zeppelin", documents, topology, attention, groups, interleaved=True)
        return Candidate(f"zones {zones.node:g}, {zones.rank:g}", plan)

    candidate = case.once(rings, "Zeppelin", *groups)
    if routing_pays(case.cluster) and any(_nodes(group, topology) > 1 for group in groups):
        candidate = replace(candidate, label=f"{candidate.label}, routed", links=RoutedLinkQueues)
    equal = with_linear_layout(
        candidate.plan, cheapest_mode(candidate.plan, case.attention.heads * case.attention.head_dim)
    )
    by_groups[tuple(groups)] = [candidate]
    if remaps and equal is not candidate.plan:
        by_groups[tuple(groups)].append(replace(candidate, label=f"{candidate.label}, remap", plan=equal))


def _nodes(group: Group, topology: Topology) -> int:
    return len({rank // topology.ranks_per_node for rank in group})
