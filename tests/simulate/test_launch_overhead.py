"""Posting: every rank pays for each message that it sends or receives."""

from __future__ import annotations

import numpy as np
import pytest

from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan, simulate_plan
from mindspeed_cp.cluster import LayerCost, load_cluster
from mindspeed_cp.plan.transfers import TRANSFER
from mindspeed_cp.simulate.timeline import launch_overheads

MHA, NO_LINEAR, POST = AttentionConfig(heads=8, head_dim=128), LayerCost(0.0, 1024), 1e-3


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


def test_a_plan_pays_for_its_messages_and_they_leave_when_all_are_posted() -> None:
    plan = build_plan(Documents([4 * 512]), Topology(1, 4), MHA, "direct")
    cluster = load_cluster("a2").with_ranks(4)
    free, charged = (simulate_plan(plan, cluster.with_values(posting=post), NO_LINEAR) for post in (0.0, POST))
    messages = np.zeros(4)
    for sent in (free.transfers_forward, free.transfers_backward):
        messages += np.bincount(sent["src"], minlength=4) + np.bincount(sent["dst"], minlength=4)
    assert messages.min() > 0
    assert charged.compute - free.compute == pytest.approx(messages * POST)
    assert charged.total > free.total
    sent, steps = charged.transfers_forward, charged.steps_forward
    first = sent[sent["start"] == sent["start"].min()]
    posted = POST * 2 * (first["src"] == first["src"][0]).sum()
    assert (first["begin"] >= steps[first["src"], first["start"], 0] + posted * (1 - 1e-9)).all()
