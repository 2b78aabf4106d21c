"""What travels in multi-head latent attention: latents, or keys and values of all heads.

A latent is a few channels of a token in the place of all its heads' keys and values: of DeepSeek-V3's 128 heads of
192 + 128 channels, 576 instead of 40,960. But every rank that reads a token expands its latent again, in the forward
and in the backward, where otherwise its owner expands it once. So latents are fast where links are the limit, and slow
where messages are hidden behind short tiles anyway. The cost model decides, for each plan by itself.
"""

from __future__ import annotations

from collections.abc import Callable

from mindspeed_cp.cluster.cluster import cluster_of
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan.problem import AttentionConfig, Topology
from mindspeed_cp.plan.program import Plan
from mindspeed_cp.simulate.simulator import simulate_plan
from mindspeed_cp.simulate.tile_work import COARSE_SPANS


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
