"""Choice of a plan by simulation: among placements, and whether fetched keys travel whole or in pieces."""

from __future__ import annotations

from collections.abc import Callable

from mindspeed_cp.algorithms.kv_fetch.pieces import cut_fetches
from mindspeed_cp.algorithms.placement.policy import Placement
from mindspeed_cp.algorithms.placement.search import PlacementSearch
from mindspeed_cp.cluster import Cluster, LayerCost
from mindspeed_cp.cluster.cluster import cluster_of
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan.problem import AttentionConfig, Topology
from mindspeed_cp.plan.program import Plan
from mindspeed_cp.simulate.simulator import simulate_plan
from mindspeed_cp.simulate.tile_work import COARSE_SPANS
from mindspeed_cp.simulate.timeline import Timeline, fetch_waits

#: Placements that are simulated by default on up to so many ranks; on more none. What the model of the search ranks
#: lower is rarely faster. A number, not a limit of time: ranks plan alone and must choose alike.
SIMULATED_PLACEMENTS = ((16, 3), (128, 4), (1024, 9))

#: Pieces of fetched keys that are tried, and the least share of a layer that ranks wait for keys where they are.
FETCH_PIECES, LEAST_FETCH_WAITS = 2, 0.005


def fastest(
    plans: dict[Placement, Plan],
    result: PlacementSearch,
    build: Callable[[Placement], Plan | None],
    levelled: int,
    cluster: Cluster,
    layer: LayerCost,
) -> Timeline:
    """Return the timeline of the plan that is simulated fastest.

    Args:
        plans: plans of the best placements by the model.
        result: the search that found them.
        build: builds the plan of a placement.
        levelled: number of placements, the fastest ones first, that are placed anew by their simulated waits.
        cluster, layer: as for simulate_plan.
    """

    def simulate(plan: Plan) -> Timeline:
        return simulate_plan(plan, cluster, layer, COARSE_SPANS)

    timelines = {placement: simulate(plan) for placement, plan in plans.items()}
    order = sorted(timelines, key=lambda placement: timelines[placement].total)
    best = timelines[order[0]]
    for placement in order[:levelled]:
        timeline = timelines[placement]
        delay = timeline.steps_backward[:, -1, 2] - timeline.compute - timeline.linear
        another = result.levelled(placement, delay)
        plan = None if another is None else build(another)
        if plan is not None:
            best = min(best, simulate(plan), key=lambda timeline: timeline.total)
    return best


def in_pieces_if_faster(timeline: Timeline, cluster: Cluster, layer: LayerCost) -> Plan:
    """Return the plan of a timeline, its fetches in pieces if it is faster so; other arguments as for simulate_plan."""
    plan = timeline.plan
    if fetch_waits(timeline) < LEAST_FETCH_WAITS * timeline.total:
        return plan
    cut = cut_fetches(plan, FETCH_PIECES)
    return cut if simulate_plan(cut, cluster, layer, COARSE_SPANS).total < timeline.total else plan


# What travels in multi-head latent attention: latents, or keys and values of all heads.
#
# A latent is a few channels of a token in the place of all its heads' keys and values: of DeepSeek-V3's 128 heads of
# 192 + 128 channels, 576 instead of 40,960. But every rank that reads a token expands its latent again, in the forward
# and in the backward, where otherwise its owner expands it once. So latents are fast where links are the limit, and
# slow
# where messages are hidden behind short tiles anyway. The cost model decides, for each plan by itself.


def choose_latents(
    build: Callable[[AttentionConfig], Plan], topology: Topology, attention: AttentionConfig, latents: str
) -> Plan:
    """Return the plan in which latents travel, or the one in which keys and values do (`Plan.attention` says which).

    Args:
        build: function of the attention, with latents or without, that returns the plan.
        topology: the ranks, on the cluster that the cost model assumes.
        attention: of one layer; with latents if the caller can give these.
        latents: "on", "off", or "auto": latents if the modelled layer is faster with them than without.

    Raises:
        ConfigError: latents is "on" for an attention that has none.
    """
    if attention.latent is None:
        if latents == "on":
            raise ConfigError(
                "latents is 'on', but attention.latent is None; valid: 'auto' or 'off', or an attention with "
                "latent=(channels of the latent, channels of k that all heads share)"
            )
        return build(attention)
    if latents == "on":
        return build(attention)
    expanded = build(attention.expanded)
    if latents == "off" or not sends_keys(expanded):
        return expanded
    plan, cluster = build(attention), cluster_of(topology)
    seconds, expanded_seconds = (simulate_plan(x, cluster, None, COARSE_SPANS).total for x in (plan, expanded))
    return plan if seconds < expanded_seconds else expanded


def sends_keys(plan: Plan) -> bool:
    """Return True if keys and values travel between ranks in a plan."""
    return any(len(part.forward.fetch) or part.kv_redistribution is not None for part in plan.parts_or_self)
