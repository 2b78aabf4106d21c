"""Ranks that are about to run different plans are told, and named, on every rank."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from mindspeed_cp import AttentionConfig, ConfigError, Documents, PeerError, Topology, build_plan, check_agreement
from mindspeed_cp.engine import agreement
from mindspeed_cp.layout import contiguous
from mindspeed_cp.plan import combine
from tests.engine.cases import Case
from tests.limits import HANG
from tests.plan.head_split import head_split_part
from tests.plan.parts import mixed_plan
from tests.workers import GlooPool

CASE = Case((30, 7, 120), 3)


def differing(rank: int, group: Any, changes: dict[int, dict[str, Any]]) -> str | None:
    """What a rank is told when some ranks changed their case."""
    case = replace(CASE, **changes.get(rank, {}))
    try:
        check_agreement(case.plan(), case.dtype, group, timeout=HANG)
    except ConfigError as error:
        return str(error)
    return None


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "documents": (
        {"lengths": (30, 7, 121)},
        "documents: rank 1 has Documents([30, 7, 121], tokens=158); ranks 0, 2 have "
        "Documents([30, 7, 120], tokens=157);",
    ),
    "window": ({"window": (5, 0)}, "attention.window: rank 1 has (5, 0); ranks 0, 2 have None;"),
    "slopes": ({"alibi": (0.5, 0.25, 0.125, 0.1)}, "attention.alibi: rank 1 has (0.5, 0.25, 0.125, 0.1); ranks"),
    "scale": ({"scale": 0.5}, "attention.scale: rank 1 has 0.5; ranks 0, 2 have None;"),
    "first head": ({"dropout": 0.1, "first_head": 4}, "attention.first_head: rank 1 has 4; ranks 0, 2 have 0;"),
    "algorithm": ({"algorithm": "direct"}, "algorithm: rank 1 has direct; ranks 0, 2 have ring;"),
    "layout": ({"options": (("layout", "contiguous"),)}, "layout: rank 1 has rows [52, 52, 53]"),
    "dtype": ({"dtype": torch.bfloat16}, "dtype: rank 1 has torch.bfloat16; ranks 0, 2 have torch.float32;"),
    "keys": (
        {"mask": "full", "kv_lengths": (30, 8, 119)},
        "kv_documents: rank 1 has Documents([30, 8, 119], tokens=157); ranks",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_differs_and_who_is_told_on_every_rank(workers: GlooPool, change: str) -> None:
    changed, says = CHANGES[change]
    told = workers.run(3, differing, {1: changed})
    assert [text.split(":")[0] for text in told] == ["rank 0", "rank 1", "rank 2"]
    [text] = {text.partition(": ")[2] for text in told}
    assert text.startswith("the ranks of the group do not have the same plan: ") and says in text
    assert "program" not in text, "follows from what was given"
    assert ("layout:" in text) == (change == "layout")


def test_each_difference_is_told_and_lengths_beyond_those_shown_count(workers: GlooPool) -> None:
    lengths = (*[9] * 40, 5), (*[9] * 40, 5), (*[9] * 39, 8, 6)
    changes = {
        rank: {"lengths": rank_lengths, "dtype": torch.float16 if rank == 0 else torch.float32}
        for rank, rank_lengths in enumerate(lengths)
    }
    [text] = {text.partition(": ")[2] for text in workers.run(3, differing, changes)}
    assert "documents: rank 2 has Documents([9, 9, 9, 9, 9, 9, ... 41 in all], tokens=365) (#" in text
    assert "| dtype: rank 0 has torch.float16; ranks 1, 2 have torch.float32" in text


def test_the_same_plans_agree_however_they_were_made(workers: GlooPool) -> None:
    """Built anew on every rank; NumPy's numbers are Python's; one rank needs no group."""
    heads = {1: {"heads": np.int64(4), "alibi": np.array([0.5, 0.25, 0.125, 0.1])}}
    common = {"alibi": (0.5, 0.25, 0.125, 0.1)}
    assert workers.run(3, differing, {0: common, 1: heads[1], 2: common}) == [None] * 3
    assert workers.run(3, differing, {}) == [None] * 3
    check_agreement(Case((9,), 1).plan(), torch.float32)


def other_release(rank: int, group: Any) -> str:
    """The other release also describes plans by another number of names."""
    plan = CASE.plan()
    with patch.object(agreement, "RELEASE", "9.9" if rank == 1 else "1.0"), pytest.raises(ConfigError) as caught:
        agreement.compare_plans(plan, {"more": "1"} if rank == 1 else {}, group, "cpu", HANG)
    return str(caught.value)


def test_another_release_is_told_before_its_plan(workers: GlooPool) -> None:
    for text in workers.run(3, other_release):
        assert "run different releases of mindspeed-cp: release: rank 1 has 9.9; ranks 0, 2 have 1.0; install" in text


def other_programs(rank: int, group: Any) -> str:
    """The same options and layout; another order of messages, as by another version of the code."""
    plan = build_plan(Documents([64, 3]), Topology(1, 3), AttentionConfig(2, head_dim=8), "direct")
    if rank == 2:
        items = plan.forward.fetch.items.copy()
        items["dst_slot"] += 1
        fetch = replace(plan.forward.fetch, items=items)
        plan = replace(plan, forward=replace(plan.forward, fetch=fetch))
    with pytest.raises(ConfigError) as caught:
        check_agreement(plan, torch.float32, group)
    return str(caught.value)


def test_programs_are_compared_message_by_message(workers: GlooPool) -> None:
    for text in workers.run(3, other_programs):
        assert "program: rank 2 has 3 steps forward" in text and "(#" in text


def other_parts(rank: int, group: Any, kind: str) -> str:
    """The same documents on the same ranks; another order of steps, or one document with its heads split more or less."""
    attention = AttentionConfig(2, head_dim=8)
    plan = mixed_plan(Documents([64, 30, 20, 9]), 3, attention)
    check_agreement(plan, torch.float32, group)
    if rank == 2 and kind == "order":
        plan = replace(plan, forward_order=((1, 0), *(turn for turn in plan.forward_order if turn != (1, 0))))
    elif rank == 2 and kind == "groups":
        documents, first = plan.documents, plan.parts[1]
        other = head_split_part(first.documents, plan.topology, attention, [[1]] * 4, first.layout)
        plan = combine("mixed", (plan.parts[0], other, plan.parts[2]))
        assert plan.documents == documents
    elif rank == 2:
        plan = replace(plan, linear_layout=contiguous(plan.documents, 3))
    with pytest.raises(ConfigError) as caught:
        check_agreement(plan, torch.float32, group)
    return str(caught.value)


@pytest.mark.parametrize(("kind", "says"), [("order", "program: "), ("groups", "layout: "), ("linear", "layout: ")])
def test_parts_and_their_order_are_compared(workers: GlooPool, kind: str, says: str) -> None:
    for text in workers.run(3, other_parts, kind):
        assert f"the same plan: {says}rank 2 has" in text and "(#" in text


def absent(rank: int, group: Any) -> str:
    """The last rank does not call; it lives on until the others have given up."""
    store = _get_default_store()
    if rank == 2:
        store.wait(["rank 0 gave up", "rank 1 gave up"], timedelta(seconds=HANG))
        return ""
    with pytest.raises(PeerError) as caught:
        check_agreement(CASE.plan(), torch.float32, group, timeout=1)
    store.set(f"rank {rank} gave up", "")
    return str(caught.value)


def test_a_rank_that_does_not_call_is_given_up() -> None:
    workers = GlooPool(3)  # of its own: a failed group cannot be used again
    try:
        results = workers.run(3, absent)
    finally:
        workers.close()
    for text in results[:2]:
        assert "a rank died, or did not take part: no answer within 1 s" in text


def outside(rank: int, everybody: Any) -> str | None:
    """A group of the first two ranks of three."""
    group = dist.new_group([0, 1])
    if rank < 2:
        return None
    with pytest.raises(ConfigError) as caught:
        check_agreement(CASE.plan(), torch.float32, group)
    return str(caught.value)


def test_what_is_no_plan_type_or_group_is_refused(workers: GlooPool) -> None:
    plan: Any = CASE.plan()
    for arguments, says in (
        ((None, torch.float32), "plan is None; valid: a Plan"),
        ((plan, "float32"), "dtype is 'float32'; valid: a torch.dtype"),
        ((plan, torch.float32, "x"), "group is 'x'; valid: a torch.distributed.ProcessGroup, or None"),
        ((plan, torch.float32, None, "cpu", "5"), "timeout is '5' seconds; valid: more than 0"),
    ):
        with pytest.raises(ConfigError, match=says):
            check_agreement(*arguments)
    assert "not in the group" in workers.run(8, outside)[2]


def test_what_is_said_of_a_plan_is_derived_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = CASE.plan()
    first = agreement.plan_fingerprints(plan)
    monkeypatch.setattr(agreement, "_with_digest", None)
    assert agreement.plan_fingerprints(plan) is first
