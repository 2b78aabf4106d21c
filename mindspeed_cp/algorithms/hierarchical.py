"""Hierarchical: every document on the ranks where it is cheapest: one rank, some ranks of a node, or several nodes.

A search (:mod:`mindspeed_cp.algorithms.placement.search`) compares a few dozen placements by a cost model and takes the
fastest. The plan has up to two kinds of parts (:mod:`mindspeed_cp.plan.parts`):

* documents whose keys are fetched (:mod:`mindspeed_cp.algorithms.kv_fetch.programs`), including those on a single rank;
* documents whose heads are split (:mod:`mindspeed_cp.algorithms.head_groups`), over one node or several.

Local blocks of the first part, including documents on a single rank, are computed while the redistributions of the
second travel: half of them at the beginning, half at the end. Zeppelin (2509.21841), ByteScale (2502.21231) and FlexSP
(2412.01523) have parts of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Literal

import numpy as np

from mindspeed_cp.algorithms.head_groups import head_groups_part
from mindspeed_cp.algorithms.kv_fetch.pieces import cut_fetches
from mindspeed_cp.algorithms.kv_fetch.programs import staged
from mindspeed_cp.algorithms.linear_layout import can_move_hidden, cheapest_mode, with_linear_layout
from mindspeed_cp.algorithms.options import AtLeast, FromModel
from mindspeed_cp.algorithms.placement.estimate import PlacementModel
from mindspeed_cp.algorithms.placement.policy import DocumentShares, Placement, apply_token_cap, split_parts
from mindspeed_cp.algorithms.placement.search import PlacementSearch
from mindspeed_cp.cluster import LayerCost
from mindspeed_cp.cluster.cluster import cluster_of
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents, Layout
from mindspeed_cp.layout.layout import weighted
from mindspeed_cp.plan.parts import StepOrder, combine, select_documents
from mindspeed_cp.plan.problem import AttentionConfig, Topology, document_pairs
from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.simulate.simulator import simulate_plan
from mindspeed_cp.simulate.tile_work import COARSE_SPANS
from mindspeed_cp.simulate.timeline import Timeline, fetch_waits

#: Pieces of fetched keys that are tried, and the least share of a layer that ranks wait for keys where they are.
FETCH_PIECES, LEAST_FETCH_WAITS = 2, 0.005

#: Steps of fetched documents that need nothing from other nodes: the local block, and two rounds inside the node.
LOCAL_STEPS = 3

#: Placements that are simulated by default on up to so many ranks; on more none. What the model of the search ranks
#: lower is rarely faster. A number, not a limit of time: ranks plan alone and must choose alike.
SIMULATED_PLACEMENTS = ((16, 3), (128, 4), (1024, 9))


def build_hierarchical(
    documents: Documents,
    kv_documents: Documents,
    topology: Topology,
    attention: AttentionConfig,
    *,
    routing: bool = True,
    head_split: bool = True,
    remap: Literal["off", "auto", "qkv", "hidden"] = "auto",
    prefetch: Annotated[int, AtLeast(1, "nodes")] = 3,
    max_seqlen_per_dp_cp_rank: Annotated[int | None, AtLeast(1, "tokens")] = None,
    hidden_size: Annotated[int | None, AtLeast(1), FromModel()] = None,
    ffn_hidden_size: Annotated[int | None, AtLeast(1), FromModel()] = None,
    tensor_model_parallel_size: Annotated[int, AtLeast(1), FromModel()] = 1,
    sequence_parallel: Annotated[bool, FromModel()] = False,
    simulated_placements: Annotated[int | None, AtLeast(1, "placements")] = None,
    fetch_pieces: Annotated[int | None, AtLeast(1, "pieces")] = None,
    robustness: Annotated[float, AtLeast(0, "of the time of a layer")] = 0.01,
) -> Plan:
    """Every document on the ranks where it is cheapest: one rank, some ranks of a node, or several nodes.

    Args:
        documents: lengths of the documents, or of their queries in cross-attention.
        kv_documents: lengths of the documents' keys and values.
        topology: context-parallel ranks; its cluster gives the speed of devices and links (default: preset "a2").
        attention: attention of one layer.
        routing: keys and values cross to a node once, over all NICs, and are passed on inside it; False: every rank
            fetches what it needs from the owner.
        head_split: allow to split the heads of long documents over the ranks of nodes.
        remap: layout with equal tokens for the linear layers: "off"; "auto" (if the model predicts a gain, in the
            mode that moves fewer bytes if hidden_size is known); "qkv" (q, k, v and out move); "hidden" (hidden states
            move, under Megatron, which reads `Plan.linear_layout`; "qkv" if the heads of all documents are split, and
            in cross-attention).
        prefetch: nodes whose keys are in flight while those of one node are computed.
        max_seqlen_per_dp_cp_rank: most tokens that a rank may hold; default: no limit.
        hidden_size: hidden size of the model, for the cost of linear layers; default: heads * head_dim.
        ffn_hidden_size: FFN size of the model, for the cost of linear layers; default: 8/3 of hidden_size.
        tensor_model_parallel_size: tensor-parallel ranks of the model, for the cost of linear layers.
        sequence_parallel: tensor-parallel ranks share the rows of hidden states, so that each moves its share.
        simulated_placements: number of placements that are built and simulated (`mindspeed_cp.simulate_plan`), and
            compared. More than half are the best of the planner's model, of different policies, and of different
            kinds if one is nearly as fast; the others are the fastest of them with less work for the ranks that waited
            long. Up to four more are variants with fewer messages or parts, and with fewer tokens on a rank under a
            limit. Default: 3 on up to 16 ranks, 4 on up to 128, 9 on up to 1,024, else 1, which is not simulated.
        fetch_pieces: pieces in which fetched keys and values, and their gradients, travel; attention on a piece begins
            when it is there. Default: 2 if that is faster where placements are simulated, else 1.
        robustness: share of the modelled time that may be given up for a plan that loses less where fixed costs are
            higher. Of the simulated placements that are up to so much slower than the fastest, the one is used that
            loses least to the others if launches of kernels, or posts of messages, take the most that the cluster says
            they may (its `ranges`); 0: the fastest by the cluster's values.

    Raises:
        ConfigError: the cluster has fewer ranks per node than the topology, or a document exceeds
            max_seqlen_per_dp_cp_rank on all ranks.
    """
    sizes, cap = (hidden_size, ffn_hidden_size, tensor_model_parallel_size), max_seqlen_per_dp_cp_rank
    if simulated_placements is None:
        simulated_placements = next((count for most, count in SIMULATED_PLACEMENTS if topology.ranks <= most), 1)
    levelled = (simulated_placements - 1) // 2

    def build(placement: Placement) -> Plan | None:
        """Return the plan of a placement; None if it exceeds the token cap."""
        early = result.model.score(placement).early if placement.split else None
        plan = plan_from_placement(placement, *problem, prefetch, cap, early)
        if cap is not None and plan.layout.token_counts.max() > cap:
            return None
        if placement.policy.remap:
            mode: str = remap if remap != "auto" and can_move_hidden(plan) else "qkv"
            if remap == "auto" and hidden_size is not None:
                mode = cheapest_mode(plan, hidden_size, tensor_model_parallel_size, sequence_parallel)
            plan = with_linear_layout(plan, mode)
        return plan if fetch_pieces is None else cut_fetches(plan, fetch_pieces)

    problem = documents, kv_documents, topology, attention, routing
    for may_split in (head_split, False):  # equal parts of documents with split heads are rounded up, above the cap
        try:
            result = choose_placement(*problem, may_split, remap, cap, *sizes)
        except ConfigError:
            if not may_split:
                raise
            continue
        placements = result.best_of_policies(simulated_placements - levelled)
        if cap is not None and simulated_placements > 1:  # more room must not make plans slower
            with suppress(ConfigError):
                even = -(-documents.tokens // topology.ranks)
                less = (cap + even) // 2
                placements += choose_placement(*problem, may_split, remap, less, *sizes).best_of_policies(1)
        if robustness and simulated_placements > 1:
            placements = list(dict.fromkeys([*placements, *result.robust()]))
        plans = {placement: plan for placement in placements if (plan := build(placement)) is not None}
        if plans:
            break
    else:
        assert cap is not None, "plans are left out for the cap alone"
        raise ConfigError(
            f"max_seqlen_per_dp_cp_rank is {cap}: no placement found that keeps it; valid: more, such as {cap * 5 // 4}"
        )
    if simulated_placements == 1:
        return next(iter(plans.values()))
    cluster, layer = cluster_of(topology), LayerCost.for_attention(attention, *sizes, sequence_parallel)
    slow = cluster.at_range_end(True)
    more_launch, more_posting = slow.launch - cluster.launch, slow.posting - cluster.posting

    def simulate(plan: Plan) -> Timeline:
        return simulate_plan(plan, cluster, layer, COARSE_SPANS)

    def choose(timelines: Sequence[Timeline]) -> Timeline:
        """Return the timeline, of those that are nearly as short as the shortest, whose plan loses least to the others
        with larger fixed costs."""
        limit = (1 + robustness) * min(timeline.total for timeline in timelines)
        near = [timeline for timeline in timelines if timeline.total <= limit]
        costs = ((0.0, 0.0), (more_launch, 0.0), (0.0, more_posting))
        totals = np.array([[timeline.with_fixed_costs(*more) for more in costs] for timeline in near])
        return near[int((totals / np.maximum(totals.min(0), 1e-12)).max(1).argmin())]

    timelines = {placement: simulate(plan) for placement, plan in plans.items()}
    order, others = sorted(timelines, key=lambda placement: timelines[placement].total), []
    if order[0].parts_across > 1 and order[0].has_fetching_groups:  # their keys may keep the links busy anyway
        others.append(replace(order[0], parts_across=1))
    for placement in order[:levelled]:  # again, with less work for the ranks that waited long
        timeline = timelines[placement]
        delay = timeline.steps_backward[:, -1, 2] - timeline.compute - timeline.linear
        others += [another] if (another := result.levelled(placement, delay)) is not None else []
    more = [simulate(plan) for placement in others if (plan := build(placement)) is not None]
    best = choose([*timelines.values(), *more])
    if fetch_pieces is None and fetch_waits(best) >= LEAST_FETCH_WAITS * best.total:
        best = choose([best, simulate(cut_fetches(best.plan, FETCH_PIECES))])
    return best.plan


@lru_cache(maxsize=8)
def choose_placement(
    queries: Documents,
    keys: Documents,
    topology: Topology,
    attention: AttentionConfig,
    routing: bool = True,
    head_split: bool = True,
    remap: str = "auto",
    max_seqlen_per_dp_cp_rank: int | None = None,
    hidden_size: int | None = None,
    ffn_hidden_size: int | None = None,
    tensor_model_parallel_size: int = 1,
) -> PlacementSearch:
    """Return the placements that `build_hierarchical` compares; arguments as there.

    Cached, because other options need the same search, and a batch may be estimated and then planned.
    """
    layer = LayerCost.for_attention(attention, hidden_size, ffn_hidden_size, tensor_model_parallel_size)
    model = PlacementModel(queries, keys, topology, attention, cluster_of(topology), layer, routing)
    remap = remap if remap in ("off", "auto") else "on"
    return PlacementSearch(model, max_seqlen_per_dp_cp_rank, remap, head_split)


def plan_from_placement(
    placement: Placement,
    queries: Documents,
    keys: Documents,
    topology: Topology,
    attention: AttentionConfig,
    routing: bool = True,
    prefetch: int = 1,
    token_cap: int | None = None,
    early: np.ndarray | None = None,
) -> Plan:
    """Return the plan of a placement.

    Args:
        placement: placement of all documents; trees of documents count as one document each.
        queries, keys: documents by lengths of queries and of keys.
        topology, attention, routing, prefetch: as for `build_hierarchical`.
        token_cap: maximum number of tokens on a rank, kept in spite of rounding; None: no limit.
        early: `PlacementEstimate.early` of the placement; None: all ranks begin the backward at once.
    """
    is_split = np.isin(queries.tree_numbers, placement.split_documents)
    head_parts = []
    work = queries.tree_sums(document_pairs(queries, keys, attention))
    for size, members in split_parts(placement, work, topology.ranks_per_node):
        chosen = np.isin(queries.tree_numbers, members.doc)
        part_queries, part_keys = (select_documents(documents, chosen) for documents in (queries, keys))
        layouts = _layouts(part_queries, part_keys, topology.ranks // size, members, attention)
        head_parts.append(head_groups_part(*layouts, topology, attention))
    parts = []
    if not is_split.all() or not len(is_split):
        part_queries, part_keys = (select_documents(documents, ~is_split) for documents in (queries, keys))
        q_layout, kv_layout = _layouts(part_queries, part_keys, topology.ranks, placement.whole, attention)
        if token_cap is not None:
            is_self_attention = kv_layout is q_layout
            used = sum((part.layout.token_counts for part in head_parts), np.zeros(topology.ranks, np.int64))
            q_layout = apply_token_cap(q_layout, token_cap - used, topology.ranks_per_node)
            kv_layout = q_layout if is_self_attention else kv_layout
        beside = np.zeros(topology.ranks)  # pairs of split documents on each rank
        for size, members in placement.split.items():
            group_pairs = np.bincount(members.rank, work[members.doc] * members.share, topology.ranks // size)
            beside += np.repeat(group_pairs, size) / size
        fetch_options = routing, prefetch, beside if is_split.any() else None, 0.0 if early is None else early
        programs = staged(q_layout, kv_layout, attention, topology, *fetch_options)
        parts = [Plan("hierarchical", attention, topology, q_layout, kv_layout, q_layout, kv_layout, *programs)]
    parts += head_parts
    if len(parts) == 1:
        return replace(parts[0], algorithm="hierarchical")
    has_fetched = not is_split.all()
    orders = (_step_order(parts, has_fetched, direction) for direction in ("forward", "backward"))
    return combine("hierarchical", parts, *orders)


def _layouts(
    queries: Documents, keys: Documents, ranks: int, members: DocumentShares, attention: AttentionConfig
) -> tuple[Layout, Layout]:
    """Return the layouts of queries and of keys, the same object in self-attention."""
    members = members.of_documents(queries.tree_numbers)
    shares = members.doc, members.rank, members.share, attention.is_triangular
    layout = weighted(queries, ranks, *shares)
    return layout, layout if keys == queries else weighted(keys, ranks, *shares)


def _step_order(parts: list[Plan], has_fetched: bool, direction: str) -> StepOrder:
    """Return the order of the steps of all parts: one of each part in turn, and at the end those steps of the fetched
    documents (the first part, if `has_fetched`) that compute only local blocks.

    Ranks with fewer tokens reach the backward earlier. Until the last ranks that share a split document are there, they
    compute what needs their node alone: local blocks, and the rounds inside the node.
    """
    programs: list[Program] = [getattr(part, direction) for part in parts]
    steps = [program.steps for program in programs]
    in_turn = list(steps)  # steps of each part that are taken in turn
    first = 0  # steps of the fetched documents before all others
    if has_fetched:
        fetches = len(programs[0].fetch) > 0
        in_turn[0] = min(parts[0].forward.steps, steps[0]) if fetches else steps[0] - 1
        first = min(LOCAL_STEPS if direction == "backward" else 1, in_turn[0])
    heads = range(int(has_fetched), len(parts))
    single, several = ([part for part in heads if (steps[part] > 1) == many] for many in (False, True))
    order = [(0, step) for step in range(first)] + [(part, 0) for part in single[:1]]
    turns = max(in_turn)
    for step in range(turns):
        order += [(part, step) for part in several if step < in_turn[part]]
        beside = single[1:] if not several else single[1 + step :] if step == turns - 1 else single[1 + step : 2 + step]
        order += [(part, 0) for part in beside if several or step == 0]
        order += [(0, first + step)] if has_fetched and first + step < in_turn[0] else []
    return (*order, *((0, step) for step in range(in_turn[0], steps[0])))
