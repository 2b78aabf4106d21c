"""What travels in multi-head latent attention: the targets in bytes, and the modelled layer with and without."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mindspeed_cp import AttentionConfig, ConfigError, Documents, Plan, Topology, build_plan, simulate_plan, verify_plan
from mindspeed_cp.algorithms.plan_cache import build_layer_plans
from mindspeed_cp.cluster.cluster import load_cluster
from mindspeed_cp.cluster.compute import ComputeCost
from mindspeed_cp.config import load_settings
from mindspeed_cp.config.derived import rank_attention
from mindspeed_cp.plan.transfers import traffic

#: Two nodes of A2 and one of A3: there links are the limit, here they are not.
CLUSTERS = (Topology(2, 8, "a2"), Topology(1, 16, "a3"))

BATCHES = {"one": Documents([65536]), "packed": Documents([30000, 517, 8000, 1, 0, 12000, 2048, 64])}


def deepseek(tensor_parallel: int = 1) -> AttentionConfig:
    """DeepSeek-V3's attention on one tensor-parallel rank."""
    return AttentionConfig(128 // tensor_parallel, head_dim=192, head_dim_v=128, latent=(512, 64))


def build(documents: Documents, topology: Topology, attention: AttentionConfig, algorithm: str, latents: str) -> Plan:
    return build_plan(documents, topology, attention, algorithm, latents=latents)


def seconds(plan: Plan) -> float:
    return simulate_plan(plan, load_cluster(str(plan.topology.cluster))).total


def sent_bytes(plan: Plan) -> float:
    return float(traffic(plan)["total"].sum())


@pytest.mark.parametrize("algorithm", ["ring", "direct"])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("tensor_parallel", "share"), [(1, 0.1), (8, 0.25)])
def test_bytes_on_the_wire(tensor_parallel: int, share: float, batch: str, algorithm: str) -> None:
    """The model lets latents travel over two nodes, and then these are the bytes."""
    attention = deepseek(tensor_parallel)
    plan = build(BATCHES[batch], CLUSTERS[0], attention, algorithm, "auto")
    assert plan.attention.latent == (512, 64)
    without = build(BATCHES[batch], CLUSTERS[0], attention, algorithm, "off")
    assert without.attention == attention.expanded
    assert sent_bytes(plan) <= share * sent_bytes(without)
    verify_plan(plan)


@pytest.mark.parametrize("topology", CLUSTERS, ids=["a2", "a3"])
@pytest.mark.parametrize("algorithm", ["ring", "direct", "all_gather", "hierarchical", "ulysses"])
def test_the_modelled_layer_is_never_slower(topology: Topology, algorithm: str) -> None:
    for tensor_parallel in (1, 8):
        for batch in BATCHES.values():
            plans = {
                name: build(batch, topology, deepseek(tensor_parallel), algorithm, name)
                for name in ("auto", "on", "off")
            }
            modelled = {name: seconds(plan) for name, plan in plans.items()}
            assert modelled["auto"] == pytest.approx(min(modelled["on"], modelled["off"]), rel=1e-3)


def test_both_answers_occur() -> None:
    """Over fast links readers' work costs more than the bytes that it saves."""
    answers = [build(BATCHES["one"], topology, deepseek(), "ring", "auto").attention.latent for topology in CLUSTERS]
    assert answers == [(512, 64), None]


def test_readers_work_is_charged() -> None:
    """One rank of eight reads 7/8 of all rows of other owners, in three products of the backward and one before."""
    documents, attention, topology = Documents([65536]), deepseek(), Topology(1, 8, "a2")
    plan = build(documents, topology, attention, "all_gather", "on")
    free = replace(plan, attention=attention.expanded)
    cluster = load_cluster("a2").with_values(
        in_node_latency=0.0, pair_bandwidth=1e18, rank_bandwidth=1e18, nic_bandwidth=1e18
    )
    compute, free_compute = (simulate_plan(x, cluster).compute for x in (plan, free))
    row = ComputeCost(cluster, attention).expansion_seconds(1.0)
    others = documents.tokens * 7 / 8
    own = documents.tokens / 8
    largest = (1 + 3) * others + own  # zig-zag: the rank with the last chunk reads all rows
    assert float((compute - free_compute).max()) == pytest.approx(largest * row, rel=1e-6)
    assert ComputeCost(cluster, attention.expanded).expansion_seconds(np.ones(3)).tolist() == [0.0] * 3


def test_attention_without_latents_has_no_choice() -> None:
    attention = deepseek().expanded
    plan = build(BATCHES["packed"], CLUSTERS[0], attention, "ring", "auto")
    assert plan.attention == attention
    with pytest.raises(ConfigError, match=r"latents is 'on', but attention.latent is None; valid: 'auto' or 'off'"):
        build(BATCHES["packed"], CLUSTERS[0], attention, "ring", "on")
    with pytest.raises(ConfigError, match="latents is 'yes'; valid: one of auto, on, off"):
        build(BATCHES["packed"], CLUSTERS[0], attention, "ring", "yes")


def test_where_nothing_travels_nothing_is_expanded_twice() -> None:
    assert build(Documents([100]), Topology(1, 1), deepseek(), "ring", "auto").attention.latent is None
    assert build(Documents([100]), Topology(1, 1), deepseek(), "ring", "on").attention.latent == (512, 64)


def test_layers_of_other_masks_share_the_rows() -> None:
    attention = deepseek(16)
    windowed = replace(attention, window=(100, 0))
    plans = build_layer_plans(
        Documents([5000, 300]), Topology(2, 2), (attention, windowed), "hierarchical", latents="on", head_split=False
    )
    for plan in plans:
        verify_plan(plan)
        assert plan.attention.latent == (512, 64)
    assert plans[0].layout.same_as(plans[1].layout)


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"latent": (512,)}, r"attention.latent is \(512,\); valid: \(channels of the latent, channels of k that all"),
     ({"latent": (0, 64)}, r"attention.latent is \(0, 64\); valid"), ({"latent": 512}, "attention.latent is 512; valid"),
     ({"latent": (512, 192)}, "with 192 channels of k that all heads share; valid: fewer than attention.head_dim"),
     ({"latent": (512, 64), "kv_heads": 2}, r"attention.latent is \(512, 64\) with kv_heads = 2; valid: kv_heads")],
)  # fmt: skip
def test_latents_that_no_attention_has_are_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        AttentionConfig(**{"heads": 4, "head_dim": 192, **changes})  # type: ignore[arg-type]


def test_settings_of_a_training_know_the_latents() -> None:
    settings = load_settings("configs/mla.yaml", ["train.tensor_model_parallel_size=2"])
    assert rank_attention(settings).latent == (64, 16) and rank_attention(settings).heads == 2
    assert rank_attention(load_settings("configs/ring.yaml")).latent is None
