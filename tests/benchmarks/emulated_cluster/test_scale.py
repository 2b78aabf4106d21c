"""The one factor between real and emulated time."""

import pytest

from benchmarks.cluster.scale import PAYLOAD, Scale
from mindspeed_cp import AttentionConfig
from mindspeed_cp.cluster import cluster_names
from mindspeed_cp.errors import ConfigError

ATTENTION = AttentionConfig(32, 8, 128)


def scale(preset: str = "a800", ranks: int = 4, wire_dim: int = 2, rate: int = 100_000_000, **attention: int) -> Scale:
    return Scale(preset, ranks, AttentionConfig(32, 8, **{"head_dim": 128} | attention), wire_dim, rate)


@pytest.mark.parametrize("preset", cluster_names())
@pytest.mark.parametrize("wire_dim, rate", [(2, 100_000_000), (8, 50_000_000)])
def test_a_transfer_over_a_nic_takes_the_factor_times_its_real_time(preset, wire_dim, rate):
    scaled, tokens = scale(preset, wire_dim=wire_dim, rate=rate), 4096
    real = tokens * 8 * (128 + 128) * 2 / scaled.cluster.effective_nic
    emulated = tokens * 8 * (wire_dim + wire_dim) * 2 / (rate / 8 * PAYLOAD)
    assert emulated / real == pytest.approx(scaled.seconds)


@pytest.mark.parametrize("preset", cluster_names())
def test_links_in_a_node_keep_their_ratio_to_the_nic(preset):
    scaled = scale(preset)
    shape = scaled.shape(2, "preset")
    ratio = scaled.cluster.pair_bandwidth / scaled.cluster.nic_bandwidth
    assert shape.fabric == scaled.cluster.fabric
    assert shape.link_rate / shape.nic_rate == pytest.approx(ratio, rel=1e-6)
    assert scaled.shape(2, "free").link_rate is None
    assert scaled.shape(2, "mesh").fabric == "mesh"


def test_rows_get_narrower_and_scores_keep_their_scale():
    wire = scale(head_dim=192, head_dim_v=128, wire_dim=6).wire
    assert (wire.heads, wire.kv_heads, wire.head_dim, wire.head_dim_v) == (32, 8, 6, 4)
    assert wire.softmax_scale == AttentionConfig(32, 8, 192).softmax_scale


@pytest.mark.parametrize(
    "change, names",
    [
        (dict(wire_dim=3), "--wire-dim is 3"),
        (dict(wire_dim=0), "--wire-dim is 0"),
        (dict(wire_dim=1, head_dim=192, head_dim_v=128), "head_dim_v = 128"),
        (dict(rate=1000), "--rate is 0.001 Mbit/s"),
    ],
)
def test_bad_settings_are_named(change, names):
    with pytest.raises(ConfigError, match=names):
        scale(**change)
