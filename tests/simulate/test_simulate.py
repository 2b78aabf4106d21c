"""The simulator against closed forms: transfers, rings, exchanges, head splits, relays, memory, posting."""

from __future__ import annotations

import numpy as np
import pytest

from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan, simulate_plan
from mindspeed_cp.cluster import Cluster, ComputeCost, LayerCost, load_cluster
from mindspeed_cp.data.lengths import sample_batch
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan import program
from mindspeed_cp.plan.transfers import TRANSFER
from mindspeed_cp.plan.verify.memory import attention_peak_bytes
from mindspeed_cp.simulate.link_queues import LinkQueues
from mindspeed_cp.simulate.simulator import simulate_direction
from mindspeed_cp.simulate.tile_work import TileCounter
from mindspeed_cp.simulate.timeline import launch_overheads

MHA = AttentionConfig(heads=32, head_dim=128)
FULL = AttentionConfig(heads=32, head_dim=128, mask="full")
NO_LINEAR = LayerCost(0.0, 4096)
ROW = 32 * 256 * 2  # bytes of K and V of a token


def only_links(name: str, ranks: int = 8) -> Cluster:
    """Devices that compute in no time."""
    return load_cluster(name).with_ranks(ranks).with_values(peak_flops=1e21, launch=0.0, posting=0.0)


@pytest.mark.parametrize("inside", [True, False])
def test_a_single_transfer_takes_its_bytes_over_its_slowest_link_and_the_latency(inside: bool) -> None:
    cluster = load_cluster("a2").with_ranks(2)
    links = LinkQueues(cluster, 2)
    src, dst = np.array([0]), np.array([1 if inside else 2])
    begin, end = links.serve(src, dst, np.array([1e9]), np.array([0.25]))
    rate = cluster.effective_pair if inside else cluster.effective_nic
    latency = cluster.in_node_latency if inside else cluster.network_latency
    assert begin == pytest.approx([0.25]) and end == pytest.approx([0.25 + 1e9 / rate + latency], rel=1e-12)


def test_a_link_serves_in_order_of_posting_and_is_idle_until_then() -> None:
    cluster = load_cluster("a2").with_ranks(2)
    links = LinkQueues(cluster, 2)
    size = cluster.effective_nic  # one second each
    src, dst = np.array([0, 0, 0]), np.array([2, 3, 2])
    begin, end = links.serve(src, dst, np.full(3, size), np.array([5.0, 0.0, 1.5]))
    assert begin == pytest.approx([5, 0, 1.5])  # sorted by when they were posted
    assert end - cluster.network_latency == pytest.approx([6, 1, 2.5])
    begin, _ = links.serve(np.array([0]), np.array([2]), np.array([size]), np.array([0.0]))
    assert begin == pytest.approx([2.5])  # a message of a later turn, while the link was idle


def test_senders_that_begin_with_one_receiver_do_not_hold_each_other_up() -> None:
    """Two senders, two receivers, a second each; both begin with the first receiver."""
    cluster = load_cluster("a2").with_ranks(1)
    src, dst = np.array([0, 1, 0, 1]), np.array([2, 2, 3, 3])
    _, end = LinkQueues(cluster, 4).serve(src, dst, np.full(4, cluster.effective_nic), np.zeros(4))
    assert end.max() - cluster.network_latency == pytest.approx(2)


@pytest.mark.parametrize("name", ["a2", "a800"])
def test_all_gather_and_ulysses_of_equal_parts(name: str) -> None:
    """n - 1 blocks over a rank's links; and q, k, v of 1 / n of the heads, each way for out."""
    cluster, tokens, n = only_links(name), 8 * 4096, 8
    block = tokens / n * ROW
    timeline = simulate_plan(build_plan(Documents([tokens]), Topology(1, n), FULL, "all_gather"), cluster, NO_LINEAR)
    latency = cluster.in_node_latency
    if cluster.fabric == "mesh":
        expected = block / min(cluster.effective_pair, cluster.effective_rank / (n - 1))
    else:
        expected = (n - 1) * block / cluster.effective_rank
    assert timeline.steps_forward[:, -1, 2].max() == pytest.approx(expected + latency, rel=0.01)
    timeline = simulate_plan(build_plan(Documents([tokens]), Topology(1, n), FULL, "ulysses"), cluster, NO_LINEAR)
    part = tokens / n * 32 * 128 * 2 / n  # bytes of q that a rank gives to another
    rate = min(cluster.effective_pair, cluster.effective_rank / (n - 1))
    assert timeline.steps_forward[:, -1, 2].max() == pytest.approx(4 * part / rate + 2 * latency, rel=0.01)


def test_a_document_over_two_nodes_crosses_once_over_all_nics_with_routing() -> None:
    """Of equal halves each node gets the other's keys once: over 4 NICs with relays, and 4 times without."""
    cluster = only_links("a2", 4).with_values(in_node_latency=0.0, network_latency=0.0)
    documents, topology = Documents([8 * 4096]), Topology(2, 4)
    spent = {}
    for routing in (True, False):
        plan = build_plan(documents, topology, FULL, "hierarchical", routing=routing, head_split=False, remap="off")
        sent = simulate_plan(plan, cluster, NO_LINEAR).transfers_forward
        across = sent[sent["src"] // 4 != sent["dst"] // 4]
        spent[routing] = across["end"].max() - across["begin"].min()
        volume = 4 * 4096 * ROW * (1 if routing else 4)
        into = np.bincount(across["dst"] // 4, across["bytes"])
        assert into == pytest.approx([volume, volume], rel=1e-6)
        assert spent[routing] == pytest.approx(volume / 4 / cluster.effective_nic, rel=0.01)


def test_hidden_and_exposed_messages_of_a_ring() -> None:
    """Slow links: all is exposed but for the computing; fast ones: nothing is, but the first block's neighbours."""
    documents, topology = Documents([4 * 4096]), Topology(1, 4)
    plan = build_plan(documents, topology, FULL, "ring")
    slow = load_cluster("a2").with_ranks(4).with_values(communication_efficiency=0.01)
    fast = slow.with_values(communication_efficiency=1.0, peak_flops=1e12)
    made = simulate_plan(plan, fast, NO_LINEAR)
    assert made.exposed.max() <= 0.02 * made.total
    sent = made.transfers_forward
    travelling = (sent["end"] - sent["begin"])[sent["dst"] == 0].sum()
    assert 0 < travelling <= made.hidden[0] * 1.01
    made = simulate_plan(plan, slow, NO_LINEAR)
    assert made.exposed.min() >= 0.9 * (made.total - made.compute.max() - made.linear.max())


def test_linear_layers_come_between_the_directions_on_every_rank() -> None:
    documents = Documents(sample_batch("wikipedia", 8 * 4096, 3))
    plan = build_plan(documents, Topology(2, 4, "a2"), MHA, "hierarchical", remap="off")
    cluster = load_cluster("a2").with_ranks(4)
    made, cost = simulate_plan(plan, cluster), ComputeCost(cluster, MHA)
    expected = 3 * cost.linear_layer_seconds(plan.layout.token_counts)
    assert made.steps_backward[:, 0, 0] - made.steps_forward[:, -1, 2] == pytest.approx(expected)
    assert simulate_plan(plan, load_cluster("a2")).total == made.total  # nodes of 8, of which the plan has 4
    with pytest.raises(ConfigError, match="a node of cluster a2 has 2 ranks"):
        simulate_plan(plan, load_cluster("a2").with_ranks(2))


def test_ranks_that_stand_for_others_say_so_and_are_close() -> None:
    plan = build_plan(Documents([700] * 40), Topology(4, 8), MHA, "ring")
    cluster = load_cluster("a2")
    every = simulate_plan(plan, cluster)
    approximate = simulate_plan(plan, cluster, max_exact_spans=1000)
    assert every.ranks_counted == 32 and approximate.ranks_counted == 4
    assert approximate.total == pytest.approx(every.total, rel=0.02)


def test_memory_counts_what_ranks_hold_and_what_travels() -> None:
    plan = build_plan(Documents([8 * 1024]), Topology(1, 8), MHA, "ring")
    alone = build_plan(Documents([1024]), Topology(1, 1), MHA, "ring")
    rows = 1024 * 32
    assert attention_peak_bytes(alone).tolist() == [2 * (rows * 512 * 2) + rows * (4 * 128 + 4) + rows * 256 * 4]
    more = attention_peak_bytes(plan) - attention_peak_bytes(alone)
    assert (more >= 1024 * ROW).all()  # a block under way at least
    gathered = build_plan(Documents([8 * 1024]), Topology(1, 8), MHA, "all_gather")
    assert (attention_peak_bytes(gathered) > attention_peak_bytes(plan)).all()


@pytest.mark.parametrize("attention", [
    AttentionConfig(heads=6, kv_heads=2, head_dim=16),
    AttentionConfig(heads=6, head_dim=16, mask="full"),
    AttentionConfig(heads=6, head_dim=16, window=(70, 0)),
])  # fmt: skip
@pytest.mark.parametrize("algorithm", ["ring", "hybrid", "hierarchical"])
def test_tiles_of_all_ranks_are_counted_in_passes_as_one_by_one(
    attention: AttentionConfig, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = build_plan(Documents([700, 1, 90, 0, 333, 12]), Topology(2, 3), attention, algorithm)
    expected = plan.work() / attention.heads
    monkeypatch.setattr(program, "SPANS_PER_PASS", 40)
    monkeypatch.setattr(program, "WINDOW_TOKENS_PER_PASS", 2000)
    assert TileCounter(plan).work("forward").pairs == pytest.approx(expected)


# the timeline of a layer


def test_one_rank_computes_and_waits_for_nothing() -> None:
    cluster = load_cluster("a2").with_ranks(1)
    made = simulate_plan(build_plan(Documents([5000, 300]), Topology(1, 1), MHA), cluster)
    cost = ComputeCost(cluster, MHA)
    pairs, rows = np.array([5000 * 5001 / 2, 300 * 301 / 2]), np.array([5000, 300])
    expected = sum(float(cost.attention_seconds(pairs, rows, 0, back).sum()) for back in (False, True))
    linear = sum(float(cost.linear_layer_seconds(5300, back)) for back in (False, True))
    assert made.total == pytest.approx(expected + 2 * cluster.launch + linear)
    assert made.waiting == pytest.approx([0.0], abs=1e-12)


@pytest.mark.parametrize("name", ["a2", "a800"])
def test_a_ring_that_only_transfers_takes_its_messages_one_after_the_other(name: str) -> None:
    """Without compute, a full ring forward is (n - 1) hops of a block over one link."""
    cluster = only_links(name)
    made = simulate_plan(build_plan(Documents([8 * 4096]), Topology(1, 8), FULL, "ring"), cluster, NO_LINEAR)
    hop = 4096 * ROW / cluster.effective_pair + cluster.in_node_latency
    assert made.steps_forward[:, -1, 2].max() == pytest.approx(7 * hop, rel=0.01)


def test_nics_are_shared_by_their_ranks() -> None:
    """Two ranks of a node with one NIC take twice as long across as two with one each."""
    plan = build_plan(Documents([4 * 4096]), Topology(2, 2), FULL, "all_gather")
    own = only_links("a2", 2)
    shared = own.with_values(nics_per_node=1)
    for cluster, messages in ((own, 2), (shared, 4)):
        actual = simulate_plan(plan, cluster, NO_LINEAR).steps_forward[:, -1, 2].max()
        assert actual == pytest.approx(messages * 4096 * ROW / cluster.effective_nic, rel=0.01)


@pytest.mark.parametrize("algorithm", ["ring", "hybrid", "direct", "hierarchical"])
def test_time_is_compute_linear_layers_and_waiting(algorithm: str) -> None:
    documents = Documents(sample_batch("wikipedia", 8 * 4096, 3))
    topology = Topology(2, 4, "a2")
    plan = build_plan(documents, topology, MHA, algorithm)
    made = simulate_plan(plan, load_cluster("a2").with_ranks(4))
    assert made.waiting.min() >= -1e-9
    assert made.total >= (made.compute + made.linear).max() - 1e-12
    for turns in (made.steps_forward, made.steps_backward):
        assert (np.diff(turns, axis=2) >= -1e-12).all() and (turns[:, 1:, 0] >= turns[:, :-1, 2] - 1e-12).all()


# Posting: every rank pays for each message that it sends or receives.


def table(*rows: tuple[int, int, int, int, int]) -> np.ndarray:
    """Transfers of a byte by (src, dst, start, done, part)."""
    out = np.zeros(len(rows), TRANSFER)
    for i, (src, dst, start, done, part) in enumerate(rows):
        out[i] = (src, dst, start, done, 0, part, 1.0)
    return out


def test_both_ends_of_each_message_pay() -> None:
    rows = table((0, 1, 0, 1, 0), (0, 2, 0, 0, 0), (0, 2, 0, 0, 1), (2, 1, 1, 1, 0))
    assert launch_overheads(rows, 3, 2, 2.0).tolist() == [[6, 0], [2, 2], [4, 2]]
    assert not launch_overheads(rows, 3, 2, 0.0).any() and not launch_overheads(rows[:0], 3, 2, 2.0).any()


def test_launches_of_a_rank_are_in_order() -> None:
    """Rank 0 sends to 1 and, in the next step, to 2, over links of their own: one after the other on one stream, at once
    where each pair has a stream."""
    cluster = only_links("a2", 3).with_values(in_node_latency=0.0)
    rows = table((0, 1, 0, 2, 0), (0, 2, 1, 2, 0))
    rows["bytes"] = cluster.effective_pair  # a second each
    for in_order, end in ((True, [1.0, 2.0]), (False, [1.0, 1.0])):
        _, timed = simulate_direction(np.zeros((3, 3)), rows, LinkQueues(cluster, 1), np.zeros(3), in_order)
        assert timed["end"] == pytest.approx(end)
    rows["start"], rows["done"] = 0, (2, 1)  # what is due first is launched first
    _, timed = simulate_direction(np.zeros((3, 3)), rows, LinkQueues(cluster, 1), np.zeros(3))
    assert timed["end"] == pytest.approx([2.0, 1.0])


def test_a_plan_pays_for_its_messages_and_they_leave_when_all_are_posted() -> None:
    plan = build_plan(Documents([4 * 512]), Topology(1, 4), MHA, "direct")
    cluster, seconds = load_cluster("a2").with_ranks(4), 1e-3
    free, charged = (simulate_plan(plan, cluster.with_values(posting=post), NO_LINEAR) for post in (0.0, seconds))
    messages = np.zeros(4)
    for sent in (free.transfers_forward, free.transfers_backward):
        messages += np.bincount(sent["src"], minlength=4) + np.bincount(sent["dst"], minlength=4)
    assert messages.min() > 0
    assert charged.compute - free.compute == pytest.approx(messages * seconds)
    assert charged.total > free.total
    sent, steps = charged.transfers_forward, charged.steps_forward
    first = sent[sent["start"] == sent["start"].min()]
    posted = seconds * 2 * (first["src"] == first["src"][0]).sum()
    assert (first["begin"] >= steps[first["src"], first["start"], 0] + posted * (1 - 1e-9)).all()
