"""Systems that give each document to a group of ranks: with a ring in each group, or with keys that are fetched."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks.published.bins import assigned_ranks, packed_bins, ring_seconds, seated
from benchmarks.published.groups import Thresholds, power_of_two_groups, zoned_groups
from benchmarks.published.rings import Group, grouped_rings
from benchmarks.published.routed import RoutedLinkQueues, routing_pays
from benchmarks.published.systems.case import Case
from benchmarks.published.timing import Candidate
from mindspeed_cp import AttentionConfig, Documents, Topology
from mindspeed_cp.algorithms.hierarchical import plan_from_placement
from mindspeed_cp.algorithms.linear_layout import cheapest_mode, with_linear_layout
from mindspeed_cp.algorithms.placement.estimate import PlacementModel
from mindspeed_cp.algorithms.placement.placer import DocumentPlacer
from mindspeed_cp.algorithms.placement.policy import DocumentShares, Placement, PlacementPolicy
from mindspeed_cp.cluster import LayerCost

#: `max_seqlen_per_dp_cp_rank` of dynamic context parallelism: tokens of a document that a rank takes. All are tried.
MOST_TOKENS = (2048, 4096, 8192)

#: Of Zeppelin's zones; all are tried.
ZONES = tuple(
    Thresholds(*thresholds) for thresholds in ((1.0, 1.0), (1.0, 0.5), (0.5, 0.5), (0.25, 0.5), (2.0, 1.0), (1.0, 2.0))
)

#: Room of a rank in DHP's bins, in shares of the mean; all are tried. So many of the best are simulated.
ROOM = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 8.0)
SIMULATED = 2


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


def dhp(case: Case) -> list[Candidate]:
    """Build DHP (arXiv 2602.21788): bins of documents on groups of any number of ranks, a ring in each. Documents are
    packed by best fit, and ranks assigned by its dynamic program over bins and ranks, by this project's speeds of
    kernels and links (`bins.py`). Its bound of memory is not public: several are tried, of tokens and of work, and the
    two whose slowest bin is done soonest by the objective are simulated. Assumed in its favour: all bins at once,
    groups inside nodes where they fit, linear layers where attention is, documents of a bin in one ring."""
    lengths, ranks = case.documents.lengths, case.topology.ranks
    work = _estimate(case).work
    plans: dict[tuple[Group, ...], tuple[float, str]] = {}
    for what, sizes in (("tokens", lengths.astype(float)), ("work", work)):
        for factor in ROOM:
            bin_of, needs = packed_bins(sizes, factor * max(float(sizes.sum()), 1e-30) / ranks)
            if needs.sum() > ranks:
                continue
            seconds = ring_seconds(lengths, bin_of, len(needs), ranks, case.attention, case.cluster)
            assigned = assigned_ranks(seconds, needs)
            assert assigned is not None, "there are enough ranks"
            groups = seated(assigned[0], case.topology.nodes, case.topology.ranks_per_node)
            label = f"bins of {factor:g} x mean {what}"
            plans.setdefault(tuple(groups[number] for number in bin_of.tolist()), (assigned[1], label))
    best = sorted(plans, key=lambda groups: plans[groups][0])[:SIMULATED]
    return [_rings(case, "DHP", plans[groups][1], groups, interleaved=False) for groups in best]


def _rings(case: Case, name: str, label: str, groups: Sequence[Group], interleaved: bool) -> Candidate:
    """Return forwarding rings in groups of ranks."""

    def rings(documents: Documents, topology: Topology, attention: AttentionConfig) -> Candidate:
        return Candidate(label, grouped_rings(name, documents, topology, attention, groups, interleaved))

    return case.once(rings, name, *groups)


def _placement(groups: Sequence[Group]) -> Placement:
    """Return groups with equal shares as a placement of the planner."""
    members = DocumentShares.from_lists(
        [(doc, list(group), [1.0 / len(group)] * len(group)) for doc, group in enumerate(groups)]
    )
    return Placement(PlacementPolicy(1.0, math.inf, power=True), members, {})


def _in_groups(case: Case, label: str, groups: Sequence[Group]) -> list[Candidate]:
    """Build plans of documents in groups of ranks: by forwarding rings, or with keys fetched from their owners."""

    def fetched(documents: Documents, topology: Topology, attention: AttentionConfig) -> Candidate:
        plan = plan_from_placement(_placement(groups), documents, documents, topology, attention, routing=False)
        return Candidate(f"{label}, fetched", plan)

    rings = _rings(case, "dynamic CP", f"{label}, rings", groups, interleaved=False)
    return [rings, case.once(fetched, label, "fetched", *groups)]


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
    candidate = _rings(case, "Zeppelin", f"zones {zones.node:g}, {zones.rank:g}", groups, interleaved=True)
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
