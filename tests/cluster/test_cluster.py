"""Presets: they load, they say where their numbers are from, and what is wrong in one is named."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from mindspeed_cp.cluster import Cluster, cluster_names, load_cluster
from mindspeed_cp.cluster.cluster import DEFAULT_POSTING
from mindspeed_cp.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent.parent
CLUSTERS = ROOT / "configs" / "clusters"
NAMES = ("a2", "a3", "a3_superpod", "a800", "a950", "atlas350", "h200", "h800", "laptop_cpu")
CALIBRATED = ("device", "kernel_times")
KEYS = [key for key in Cluster.model_fields if key not in (*CALIBRATED, "ranges")]


def changed(tmp_path: Path, pattern: str, into: str, preset: str = "a2") -> Path:
    """A preset with one line changed."""
    text, count = re.subn(pattern, into, (CLUSTERS / f"{preset}.yaml").read_text("utf-8"), flags=re.MULTILINE)
    assert count == 1
    path = tmp_path / "changed.yaml"
    path.write_text(text, "utf-8")
    return path


def test_the_presets_are_those_of_the_folder() -> None:
    assert tuple(cluster_names()) == NAMES == tuple(sorted(path.stem for path in CLUSTERS.glob("*.yaml")))


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_loads_and_each_of_its_numbers_has_a_source(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name and cluster == load_cluster(CLUSTERS / f"{name}.yaml")
    lines = [line for line in (CLUSTERS / f"{name}.yaml").read_text("utf-8").splitlines() if line[0] != "#"]
    ranges = [line.strip() for line in lines if line[0] == " "]
    lines = [line for line in lines if line[0] != " " and not line.startswith("ranges:")]
    assert [line.split(":")[0] for line in ranges] == list(cluster.ranges) and all("  # " in line for line in ranges)
    assert all(least <= getattr(cluster, key) <= most for key, (least, most) in cluster.ranges.items())
    assert [line.split(":")[0] for line in lines] == KEYS
    told = [line.split(":")[0] for line in lines if "#" in line]
    assert set(KEYS) - set(told) <= {"name", "ranks_per_node", "rank_bandwidth"}, "a number without its source"
    nics = [cluster.nic_of(rank) for rank in range(cluster.ranks_per_node)]
    assert sorted(set(nics)) == list(range(cluster.nics_per_node)) and nics == sorted(nics)
    assert cluster.effective_nic == cluster.nic_bandwidth * cluster.communication_efficiency
    if cluster.fabric == "mesh":
        assert cluster.rank_bandwidth == cluster.pair_bandwidth * (cluster.ranks_per_node - 1)
    else:
        assert cluster.rank_bandwidth == cluster.pair_bandwidth


@pytest.mark.parametrize("key", [key for key in KEYS if key != "posting"])
def test_the_error_of_a_cluster_file_has_the_missing_key(key: str, tmp_path: Path) -> None:
    path = changed(tmp_path, rf"^{key}:.*\n", "")
    with pytest.raises(ConfigError, match=rf"changed\.yaml: {key}: is missing"):
        load_cluster(path)


def test_everything_takes_longer_at_the_slow_end_of_the_ranges() -> None:
    cluster = load_cluster("a2")
    slow, fast = cluster.at_range_end(True), cluster.at_range_end(False)
    for key in cluster.ranges:
        order = [getattr(each, key) for each in (fast, cluster, slow)]
        assert order == sorted(order, reverse=key.endswith("efficiency")) and order[0] != order[2]
    only = cluster.at_range_end(True, ["launch", "network_latency"])  # the second has no range
    assert only == cluster.with_values(launch=cluster.ranges["launch"][1]) and "launch" not in only.ranges
    assert hash(cluster) == hash(load_cluster("a2")) and only.ranges.keys() == cluster.ranges.keys() - {"launch"}


def test_a_file_without_posting_has_the_launch_overhead_of_the_presets(tmp_path: Path) -> None:
    assert (
        load_cluster(changed(tmp_path, r"^posting:.*\n", "")).posting == load_cluster("a2").posting == DEFAULT_POSTING
    )


@pytest.mark.parametrize(
    ("pattern", "into", "message"),
    [
        (r"^launch:", "lunch:", r"changed\.yaml:\d+: lunch: unknown key; did you mean launch\?"),
        (r"^nic_bandwidth: \S+", "nic_bandwidth: -1", r"nic_bandwidth = -1: must be a number > 0"),
        (r"^nic_bandwidth: \S+", "nic_bandwidth: 25 GB", r'nic_bandwidth = "25 GB": must be a number'),
        (r"^nic_bandwidth: \S+", "nic_bandwidth: null", r"nic_bandwidth = null: must be a number"),
        (r"^memory: \S+", "memory: .inf", r"memory = Infinity: must be a number"),
        (r"^ranks_per_node: 8", "ranks_per_node: 0", r"ranks_per_node = 0: must be an integer >= 1"),
        (r"^fabric: mesh", "fabric: torus", r'fabric = "torus": must be one of mesh, switch'),
        (r"^linear_efficiency: 0.7", "linear_efficiency: 1.7", r"linear_efficiency = 1.7: must be a number > 0 and <= 1"),
        (r"^  launch: \S+ \S+", "  launch: [7e-5, 5e-6]", r"ranges.launch = .*: must be the least and the most that"),
        (r"^  launch: \S+ \S+", "  launch: [0, 5e-6]", r"the most that launch = 1e-05 may be, from 0 to 1"),
        (r"^  launch: \S+ \S+", "  launch: [0, 5]", r"ranges.launch = .*5.0\]: must be .* from 0 to 1"),
        (r"^  launch: \S+ \S+", "  launch: 5e-6", r"ranges.launch = 5e-06: must be two numbers"),
        (r"^  launch: \S+ \S+", "  memory: [1, 2]", r"ranges = .*: must be a mapping of attention_efficiency, .* to the least and the most"),
        (r"^rank_bandwidth: \S+", "rank_bandwidth: 300e9", r"rank_bandwidth = 3.*must be from pair_bandwidth to .*1.96e\+11"),
        (r"^rank_bandwidth: \S+", "rank_bandwidth: 1e9", r"rank_bandwidth = 1.*must be from pair_bandwidth to"),
        (r"^fabric: mesh", "fabric: switch", r"rank_bandwidth = 196.*: must be pair_bandwidth, 2.8e\+10: with fabric: switch"),
        (r"^launch: \S+", "launch: 10", r"launch = 10: must be a number >= 0 and <= 1"),
    ],
)  # fmt: skip
def test_the_error_of_a_bad_cluster_file_has_key_and_line(
    pattern: str, into: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load_cluster(changed(tmp_path, pattern, into))
    assert "\n" not in str(error.value) and "changed.yaml:" in str(error.value)


def test_an_unknown_preset_is_answered_with_the_known() -> None:
    with pytest.raises(
        ConfigError, match=r"cluster 'h20x': no such preset; did you mean h200\? valid: a2, a3, a3_superpod"
    ):
        load_cluster("h20x")
    for name, nearest in (("atlas_a2", "a2"), ("Ascend910B3", "a2"), ("a3-superpod", "a3_superpod or a3")):
        with pytest.raises(ConfigError, match=rf"no such preset; did you mean {nearest}\? valid: a2, a3, "):
            load_cluster(name)
    with pytest.raises(ConfigError, match=r"no/such\.yaml: no such file"):
        load_cluster("no/such.yaml")


def test_a_change_is_checked_and_a_wrong_name_is_refused() -> None:
    a2 = load_cluster("a2")
    assert a2.with_values(nic_bandwidth=50e9).nic_bandwidth == 50e9 and a2.nic_bandwidth == 25e9
    with pytest.raises(ConfigError, match=r"nic_speed: unknown key; .*valid: name"):
        a2.with_values(nic_speed=1.0)
    with pytest.raises(ConfigError, match="peak_flops = 0"):
        a2.with_values(peak_flops=0.0)
    assert a2.nic_of(8) == a2.nics_per_node  # the first of the next node


@pytest.mark.parametrize("name", NAMES)
def test_a_part_of_a_node_has_its_own_links_and_nics(name: str) -> None:
    whole = load_cluster(name)
    all_ranks = np.arange(whole.ranks_per_node)
    nics = whole.nic_of(all_ranks)
    assert nics.tolist() == [whole.nic_of(rank) for rank in range(whole.ranks_per_node)]
    for ranks in range(1, whole.ranks_per_node + 1):
        part = whole.with_ranks(ranks)
        assert (part.nic_of(all_ranks[:ranks]) == nics[:ranks]).all()
        if whole.fabric == "mesh":
            assert part.rank_bandwidth == part.pair_bandwidth * max(1, ranks - 1)
    with pytest.raises(ConfigError, match=f"a node of cluster {name} has {whole.ranks_per_node} ranks"):
        whole.with_ranks(whole.ranks_per_node + 1)
