"""Hierarchical: every document where it is cheapest, on one rank, on some ranks of a node, or on several nodes.

A search (:mod:`.search`) compares a few dozen placements by a cost model and takes the fastest. What it places
becomes up to two parts of one plan (:mod:`.combine`):

* documents whose keys are exchanged (:mod:`.staged`), those that one rank has alone among them;
* documents whose heads are split inside nodes (:mod:`.node_split`), over one node or several.

The first part's own blocks, local documents among them, are computed while the moves of the second travel, and half of
them while its outputs do. Zeppelin (2509.21841), ByteScale (2502.21231) and FlexSP (2412.01523) have parts of this.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from mindspeed_cp.cost import Cluster, LayerCost, load_cluster
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents, Layout
from mindspeed_cp.layout.build import weighted
from mindspeed_cp.plan.combine import Order, combine, documents_of
from mindspeed_cp.plan.config import AttentionConfig, Topology, check_count
from mindspeed_cp.plan.estimate import Estimate
from mindspeed_cp.plan.node_split import node_split_part
from mindspeed_cp.plan.partition import Members, Placement
from mindspeed_cp.plan.placement import visible_pairs
from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.plan.remapped import fewer_bytes, has_hidden, with_linear_layout
from mindspeed_cp.plan.search import Choice, search
from mindspeed_cp.plan.staged import staged
from mindspeed_cp.plan.within import within

#: Whose speeds are taken where the topology names no cluster.
DEFAULT_CLUSTER = "a2"

#: Steps of the exchange that need nothing from other nodes: the own block and two rounds in the node (:mod:`.staged`).
IN_NODE = 3

REMAPS = ("off", "auto", "qkv", "hidden")


def build_hierarchical(
    queries: Documents,
    keys: Documents,
    topology: Topology,
    attention: AttentionConfig,
    routing: bool = True,
    head_split: bool = True,
    remap: str = "auto",
    prefetch: int = 3,
    max_seqlen_per_dp_cp_rank: int | None = None,
    hidden_size: int | None = None,
    ffn_hidden_size: int | None = None,
    tensor_model_parallel_size: int = 1,
    sequence_parallel: bool = False,
    simulated_placements: int = 1,
) -> Plan:
    """Hierarchical placement over all ranks.

    Args:
        queries, keys, attention: as for the ring.
        topology: the ranks; its cluster has the speeds of devices and links, by default those of preset "a2".
        routing: keys cross to a node once, over all NICs, and are passed on inside it; False: every rank fetches what
            it needs.
        head_split: heads of long documents may be split inside nodes.
        remap: a layout of their own, with equal tokens, for linear layers: "off", "auto" (where the model finds it
            faster, in the way that moves fewer bytes if hidden_size is given), or always, with "qkv" (q, k, v and out
            move) or "hidden" (hidden states move: under Megatron, which looks at `Plan.linear`; "qkv" for a batch of
            which all heads are split, and in cross-attention, where hidden states of one side are not both's).
        prefetch: nodes from which exchanged keys are on their way while those of one are computed.
        max_seqlen_per_dp_cp_rank: a rank holds no more tokens; default: no bound.
        hidden_size, ffn_hidden_size, tensor_model_parallel_size: of the model, for the cost of linear layers; default:
            heads * head_dim, a gated FFN of 8/3 that, and 1.
        sequence_parallel: tensor-parallel ranks share the rows of hidden states, of which each then moves its part.
        simulated_placements: of so many of the placements that the planner's model finds fastest, plans are built and
            simulated (:mod:`mindspeed_cp.cost.simulate`), and the one that the simulation finds fastest is taken. Each
            costs about as much as planning without; worth it where planning is hidden behind long steps.

    Raises:
        ConfigError: an option is out of range, the cluster has fewer ranks on a node than the topology, or a document
            does not fit into the bound.
    """
    check_count("prefetch", prefetch, what="a whole number of nodes")
    check_count("simulated_placements", simulated_placements, what="a whole number of placements")
    sizes = (hidden_size, ffn_hidden_size, tensor_model_parallel_size)
    bound = max_seqlen_per_dp_cp_rank

    for heads_too in (head_split, False):
        choice = choose(queries, keys, topology, attention, routing, heads_too, remap, bound, *sizes)
        best = choice.ranked[:simulated_placements]
        plans = [plan_of(each, queries, keys, topology, attention, routing, prefetch, bound) for each in best]
        fit = [i for i, plan in enumerate(plans) if bound is None or plan.layout.token_counts.max() <= bound]
        if fit or not heads_too:  # equal parts of split heads are rounded up
            break
    made = [
        _remapped(plans[i], remap, hidden_size, tensor_model_parallel_size, sequence_parallel)
        if best[i].setting.remap
        else plans[i]
        for i in fit or [0]
    ]
    return made[0] if len(made) == 1 else _fastest(made, topology, _layer(attention, *sizes, sequence_parallel))


def _remapped(
    plan: Plan, remap: str, hidden_size: int | None, tensor_model_parallel_size: int, sequence_parallel: bool
) -> Plan:
    mode = remap if has_hidden(plan) else "qkv"  # where all heads are split, their moves start at the linear layout
    if mode == "auto":
        sizes = tensor_model_parallel_size, sequence_parallel
        mode = "qkv" if hidden_size is None else fewer_bytes(plan, hidden_size, *sizes)
    return with_linear_layout(plan, mode)


def _fastest(plans: list[Plan], topology: Topology, layer: LayerCost) -> Plan:
    """The one of which a layer takes the least simulated time; the first of equals."""
    from mindspeed_cp.cost.choose import MOST_SPANS  # these import plans
    from mindspeed_cp.cost.simulate import simulate

    seconds = [simulate(plan, cluster_of(topology), layer, MOST_SPANS).total for plan in plans]
    return plans[seconds.index(min(seconds))]


def choose(
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
) -> Choice:
    """The placement that `build_hierarchical` builds, and what it was compared with."""
    if max_seqlen_per_dp_cp_rank is not None:
        check_count("max_seqlen_per_dp_cp_rank", max_seqlen_per_dp_cp_rank, what="a whole number of tokens")
    for name, value in (("hidden_size", hidden_size), ("ffn_hidden_size", ffn_hidden_size)):
        if value is not None:
            check_count(name, value)
    check_count("tensor_model_parallel_size", tensor_model_parallel_size)
    layer = _layer(attention, hidden_size, ffn_hidden_size, tensor_model_parallel_size)
    wanted = {"off": "off", "auto": "auto"}.get(remap, "on")
    return _searched(queries, keys, topology, attention, layer, routing, max_seqlen_per_dp_cp_rank, wanted, head_split)


@lru_cache(maxsize=8)
def _searched(
    queries: Documents,
    keys: Documents,
    topology: Topology,
    attention: AttentionConfig,
    layer: LayerCost,
    routing: bool,
    bound: int | None,
    remap: str,
    head_split: bool,
) -> Choice:
    """The search, once for what differs in other options alone, and for a batch that is estimated and then planned."""
    estimate = Estimate(queries, keys, topology, attention, cluster_of(topology), layer, routing)
    return search(estimate, bound, remap, head_split)


def _named(topology: Topology) -> str:
    return DEFAULT_CLUSTER if topology.cluster is None else topology.cluster


@lru_cache(maxsize=64)
def cluster_of(topology: Topology) -> Cluster:
    """The cluster that a topology runs on, nodes cut to its ranks. A file is read once in a process, so that all
    plans of a run are made by the same figures.

    Raises:
        ConfigError: there is no such cluster, or its nodes have fewer ranks.
    """
    found, here = load_cluster(_named(topology)), topology.ranks_per_node
    if here <= found.ranks_per_node:
        return found.with_ranks(here)
    if topology.cluster is None:  # nothing is known of such nodes: the same links and NICs for each rank
        links = found.pair_bandwidth * (here - 1)
        return found.with_(ranks_per_node=here, rank_bandwidth=links, nics_per_node=here)
    raise ConfigError(
        f"cluster is {topology.cluster!r}, whose nodes have {found.ranks_per_node} ranks, but the topology has "
        f"{here} on a "
        "node; valid: at most as many, or a file with ranks_per_node and links of your own"
    )


def plan_of(
    placement: Placement,
    queries: Documents,
    keys: Documents,
    topology: Topology,
    attention: AttentionConfig,
    routing: bool = True,
    prefetch: int = 1,
    most_tokens: int | None = None,
) -> Plan:
    """The plan of a placement; no rank holds more than `most_tokens`, to which chunks are rounded."""
    split = np.zeros(len(queries), bool)
    split[placement.split_documents] = True
    by_heads = []
    for width, members in placement.split.items():
        here = np.zeros(len(queries), bool)
        here[members.doc] = True
        own = [documents_of(x, here) for x in (queries, keys)]
        held, held_kv = _layouts(own[0], own[1], topology.nodes // width, members, attention)
        by_heads.append(node_split_part(held, held_kv, topology, attention))
    parts = []
    if not split.all() or not len(split):
        own = [documents_of(x, ~split) for x in (queries, keys)]
        held, held_kv = _layouts(own[0], own[1], topology.ranks, placement.whole, attention)
        if most_tokens is not None:
            others = sum((part.layout.token_counts for part in by_heads), np.zeros(topology.ranks, np.int64))
            same, held = held_kv is held, within(held, most_tokens - others, topology.ranks_per_node)
            held_kv = held if same else held_kv
        beside = _pairs_of_split(placement, queries, keys, topology, attention) if split.any() else None
        programs = staged(held, held_kv, attention, topology, routing, prefetch, beside)
        parts.append(Plan("hierarchical", attention, topology, held, held_kv, held, held_kv, *programs))
    parts += by_heads
    if len(parts) == 1:
        return replace(parts[0], algorithm="hierarchical")
    exchange = not split.all()
    return combine("hierarchical", parts, *(_order(parts, exchange, name) for name in ("forward", "backward")))


def _layouts(
    queries: Documents, keys: Documents, ranks: int, members: Members, attention: AttentionConfig
) -> tuple[Layout, Layout]:
    mirrored = attention.mask == "causal" and attention.window is None
    held = weighted(queries, ranks, members.doc, members.rank, members.share, mirrored)
    if keys == queries:
        return held, held
    return held, weighted(keys, ranks, members.doc, members.rank, members.share, mirrored)


def _pairs_of_split(
    placement: Placement, queries: Documents, keys: Documents, topology: Topology, attention: AttentionConfig
) -> np.ndarray:
    """Visible pairs of the documents whose heads are split, of each rank, for all heads."""
    pairs = visible_pairs(queries, keys, attention)
    out = np.zeros(topology.ranks)
    for width, members in placement.split.items():
        groups, per = topology.nodes // width, topology.ranks_per_node * width
        out += np.repeat(np.bincount(members.rank, pairs[members.doc] * members.share, groups), per) / per
    return out


def _order(parts: list[Plan], exchange: bool, direction: str) -> Order:
    """Steps of all parts in turns; those of the exchange, the first part, that only compute own blocks, after all.

    Ranks with fewer tokens come to the backward earlier. Until the last ones that share a split document are there,
    they compute what they have with their node alone: own blocks and the rounds in the node.
    """
    programs: list[Program] = [getattr(part, direction) for part in parts]
    steps = [program.steps for program in programs]
    before = list(steps)
    alone = 0  # steps of the exchange before those of the others
    if exchange:
        talks = len(programs[0].fetch) > 0
        before[0] = min(parts[0].forward.steps, steps[0]) if talks else steps[0] - 1
        alone = min(IN_NODE if direction == "backward" else 1, before[0])
    turns = [(0, step) for step in range(alone)]
    for step in range(max(before)):
        turns += [(part, step) for part in range(int(exchange), len(parts)) if step < before[part]]
        turns += [(0, alone + step)] if exchange and alone + step < before[0] else []
    return (*turns, *((0, step) for step in range(before[0], steps[0])))


def _layer(
    attention: AttentionConfig,
    hidden_size: int | None,
    ffn_hidden_size: int | None,
    tensor_model_parallel_size: int,
    sequence_parallel: bool = False,
) -> LayerCost:
    """The linear part of a layer."""
    if hidden_size is None:
        return LayerCost.like(attention, tensor_model_parallel_size)
    width = round(hidden_size * 8 / 3) if ffn_hidden_size is None else ffn_hidden_size
    heads, kv_heads = attention.heads * tensor_model_parallel_size, attention.kv_heads * tensor_model_parallel_size
    return LayerCost.of(
        hidden_size, width, heads, kv_heads, attention.head_dim, attention.head_dim_v,
        tensor_parallel=tensor_model_parallel_size, sequence_parallel=sequence_parallel,
    )  # fmt: skip
