"""Arguments of wrong types are one line, in cluster, simulate, choose, data and layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mindspeed_cp import AttentionConfig, ConfigError, Documents, Topology, build_plan, load_cluster, simulate_plan
from mindspeed_cp.choose import choose_algorithm, parse_candidate
from mindspeed_cp.cluster import ComputeCost, LayerCost, cluster_of
from mindspeed_cp.data.lengths import load_lengths, sample_batch, sample_lengths

DOCUMENTS, TOPOLOGY, ATTENTION = Documents([30]), Topology(1, 2), AttentionConfig(4)
PLAN, CLUSTER = build_plan(DOCUMENTS, TOPOLOGY, ATTENTION), load_cluster("a2")


@pytest.mark.parametrize(
    ("call", "named"),
    [
        *((lambda value=value: load_cluster(value), "cluster is") for value in (3, None, [], b"a2")),
        *((lambda value=value: load_lengths(value), "lengths is") for value in (3, None, [])),
        (lambda: load_lengths("wikipedia", 3), "folder is 3"),
        (lambda: sample_lengths("wikipedia", 10**12), "count is"),
        (lambda: sample_batch("wikipedia", 16**9000), "tokens is"),
        (lambda: cluster_of(3), "topology is 3"),
        (lambda: cluster_of(Topology(1, 2, [])), "Topology.cluster is"),
        (lambda: ComputeCost(3, ATTENTION), "cluster is 3"),
        (lambda: ComputeCost(CLUSTER, 3), "attention is 3"),
        (lambda: ComputeCost(CLUSTER, ATTENTION, 3), "layer is 3"),
        *((lambda value=value: LayerCost(value, 5), "LayerCost.flops_per_token is") for value in ("x", None, 16**9000)),
        (lambda: LayerCost.for_attention(3), "attention is 3"),
        (lambda: simulate_plan(3, CLUSTER), "plan is 3"),
        (lambda: simulate_plan(PLAN, 3), "cluster is 3"),
        (lambda: simulate_plan(PLAN, CLUSTER, 3), "layer is 3"),
        *((lambda value=value: choose_algorithm(value, TOPOLOGY, ATTENTION), "batches is") for value in (3, [3])),
        (lambda: choose_algorithm([DOCUMENTS], 3, ATTENTION), "topology is 3"),
        (lambda: choose_algorithm([DOCUMENTS], TOPOLOGY, 3), "attention is 3"),
        (lambda: choose_algorithm([DOCUMENTS], TOPOLOGY, ATTENTION, 3), "cluster is 3"),
        (lambda: choose_algorithm([DOCUMENTS], TOPOLOGY, ATTENTION, options={"x": 3}), "no algorithm has 'x'"),
        (lambda: parse_candidate(3), "candidate is 3"),
        *((lambda value=value: Documents.from_trajectories(value), "trajectories is") for value in (3, None)),
        (lambda: build_plan(Documents([2**31 - 1]), TOPOLOGY, AttentionConfig(10**6, head_dim=10**6)), "channels of q"),
    ],
)
def test_a_wrong_type_is_one_line(call: Callable[[], object], named: str) -> None:
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")) as caught:
        call()
    assert "valid: " in str(caught.value) and "\n" not in str(caught.value)
