"""Ranks that run, or are about to run, different plans, types or dropout keys are told, and named, on every rank."""

from __future__ import annotations

import gc
import time
import weakref
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from mindspeed_cp import (
    AttentionConfig,
    ConfigError,
    Documents,
    PeerError,
    Topology,
    build_plan,
    check_agreement,
    context_parallel_attention,
)
from mindspeed_cp.engine import agreement
from mindspeed_cp.engine.agreement import CallAgreement
from mindspeed_cp.layout import contiguous
from tests.engine.cases import Case, local
from tests.limits import HANG
from tests.plan.parts import mixed_plan
from tests.workers import GlooPool

CASE = Case((30, 7, 120), 3)
FULL = replace(CASE, mask="full")
DROPOUT = replace(CASE, dropout=0.25)

#: By what differs: what all ranks but one run, what that one changes, and what all of them are told.
WAYS: dict[str, tuple[Case, dict[str, Any], str]] = {
    "lengths swapped": (CASE, {"lengths": (7, 30, 120)}, "documents: rank 1 has Documents([7, 30, 120]"),
    "documents reordered": (CASE, {"lengths": (120, 7, 30)}, "documents: rank 1 has Documents([120, 7, 30]"),
    "more tokens": (CASE, {"lengths": (30, 7, 150)}, "documents: rank 1 has Documents([30, 7, 150]"),
    "ulysses documents": (
        replace(CASE, algorithm="ulysses"), {"lengths": (30, 120, 7)}, "documents: rank 1 has Documents([30, 120, 7]",
    ),
    "latents": (
        replace(CASE, latent=(20, 8)), {"latent": None}, "attention.latent: rank 1 has None; ranks 0, 2 have (20, 8)",
    ),
    "parents": (CASE, {"parents": (-1, 0, 0)}, "documents: rank 1 has Documents([30, 7, 120], parents=[-1, 0, 0]"),
    "scale": (CASE, {"scale": 0.5}, "attention.scale: rank 1 has 0.5; ranks 0, 2 have None"),
    "heads": (replace(CASE, kv_heads=2), {"heads": 2}, "attention.heads: rank 1 has 2; ranks 0, 2 have 4"),
    "mask": (CASE, {"mask": "full"}, "attention.mask: rank 1 has 'full'; ranks 0, 2 have 'causal'"),
    "window": (CASE, {"window": (200, 0)}, "attention.window: rank 1 has (200, 0); ranks 0, 2 have None"),
    "alibi": (CASE, {"alibi": True}, "attention.alibi: rank 1 has"),
    "slopes": (CASE, {"alibi": (0.5, 0.25, 0.125, 0.1)}, "attention.alibi: rank 1 has (0.5, 0.25, 0.125, 0.1); ranks"),
    "first head": (DROPOUT, {"first_head": 4}, "attention.first_head: rank 1 has 4; ranks 0, 2 have 0;"),
    "algorithm": (CASE, {"algorithm": "direct"}, "algorithm: rank 1 has direct; ranks 0, 2 have ring"),
    "layout": (CASE, {"options": (("layout", "contiguous"),)}, "layout: rank 1 has rows"),
    "type": (CASE, {"dtype": torch.bfloat16}, "dtype: rank 1 has torch.bfloat16; ranks 0, 2 have torch.float32"),
    "dropout key": (DROPOUT, {"dropout_key": (11, 4)}, "dropout_key: rank 1 has (11, 4); ranks 0, 2 have (11, 3)"),
    "keys": (FULL, {"kv_lengths": (30, 8, 119)}, "kv_documents: rank 1 has Documents([30, 8, 119]"),
}  # fmt: skip


def attend_otherwise(rank: int, group: Any, case: Case, change: dict[str, Any]) -> tuple[str | None, float]:
    """What a rank is told when rank 1 changed its case, and the error of a call in which all agree."""
    results = None
    own = replace(case, **change) if rank == 1 else case
    plan, leaves, _ = local(rank, own)
    try:
        context_parallel_attention(*leaves, plan, group, dropout_key=own.dropout_key)
    except ConfigError as error:
        results = str(error)
    plan, leaves, _ = local(rank, CASE)
    out = context_parallel_attention(*leaves, plan, group)
    return results, float((out - plan.layout.shard(CASE.reference()[0], rank)).abs().max())


@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_disagree_are_told_before_a_message_travels(workers: GlooPool, way: str) -> None:
    """All of them, in the same words; the group can be used after that."""
    case, change, says = WAYS[way]
    results = workers.run(3, attend_otherwise, case, change)
    assert [text.split(":")[0] for text, _ in results] == ["rank 0", "rank 1", "rank 2"]
    [text] = {text.partition(": ")[2] for text, _ in results}
    assert text.startswith("the ranks of the group do not have the same plan: ") and says in text
    assert "program" not in text and ("layout:" in text) == (way == "layout"), "both follow from the rest"
    assert max(error for _, error in results) < 1e-5


def differing(rank: int, group: Any, changes: dict[int, dict[str, Any]]) -> str | None:
    """What a rank is told when some ranks changed their case."""
    case = replace(CASE, **changes.get(rank, {}))
    try:
        check_agreement(case.plan(), case.dtype, group, timeout=HANG)
    except ConfigError as error:
        return str(error)
    return None


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


def release_with_more_names(rank: int, group: Any) -> str:
    """The other release also describes plans by another number of names."""
    plan = CASE.plan()
    with patch.object(agreement, "RELEASE", "9.9" if rank == 1 else "1.0"), pytest.raises(ConfigError) as caught:
        agreement.compare_plans(plan, {"more": "1"} if rank == 1 else {}, group, "cpu", HANG)
    return str(caught.value)


def test_another_release_is_told_before_its_plan(workers: GlooPool) -> None:
    for text in workers.run(3, release_with_more_names):
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
        first, split, last = plan.parts
        plan = replace(plan, parts=(first, replace(split, q_layout_compute=split.layout), last))
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


def late_with_a_short_timeout(rank: int, group: Any) -> str:
    """Rank 1 comes half the time-out after the others."""
    plan, leaves, _ = local(rank, replace(CASE, lengths=(7, 30, 120)) if rank == 1 else CASE)
    torch.distributed.barrier(group=group)
    time.sleep(0.5 * (rank == 1))
    with pytest.raises(ConfigError) as caught:
        context_parallel_attention(*leaves, plan, group, timeout=1.0)
    return str(caught.value)


def test_a_short_timeout_does_not_shorten_the_comparison(workers: GlooPool) -> None:
    for text in workers.run(3, late_with_a_short_timeout):
        assert "documents: rank 1 has Documents([7, 30, 120]" in text


def other_release(rank: int, group: Any, announces: bool) -> str:
    plan, leaves, _ = local(rank, CASE)
    release = "9.9" if rank == 1 else "1.0"
    with patch.object(agreement, "RELEASE", release):
        if announces:
            CallAgreement(group, 600.0, torch.device("cpu")).announce([plan])
        with pytest.raises(ConfigError) as caught:
            context_parallel_attention(*leaves, plan, group)
    return str(caught.value)


@pytest.mark.parametrize("announces", [False, True])
def test_a_rank_with_another_release_is_told_though_the_plans_agree(workers: GlooPool, announces: bool) -> None:
    for text in workers.run(3, other_release, announces):
        assert "different releases of mindspeed-cp: release: rank 1 has 9.9; ranks 0, 2 have 1.0; install" in text


def training_differs(rank: int, group: Any) -> str:
    plan, leaves, _ = local(rank, DROPOUT)
    with pytest.raises(ConfigError) as caught:
        context_parallel_attention(*leaves, plan, group, dropout_key=(1, 2), training=rank != 1)
    return str(caught.value)


def test_a_rank_that_evaluates_while_others_train_is_told(workers: GlooPool) -> None:
    for text in workers.run(3, training_differs):
        assert "dropout_key: rank 1 has None; ranks 0, 2 have (1, 2)" in text


def two_known_plans(rank: int, group: Any) -> str:
    """Both plans have run on all ranks before; then one rank takes the other one."""
    first, second = (local(rank, replace(CASE, lengths=lengths)) for lengths in (CASE.lengths, (7, 30, 120)))
    for plan, leaves, _ in (first, second, first):
        context_parallel_attention(*leaves, plan, group)
    plan, leaves, _ = second if rank == 2 else first
    with pytest.raises(ConfigError) as caught:
        context_parallel_attention(*leaves, plan, group)
    return str(caught.value)


def test_plans_that_were_compared_before_are_compared_again(workers: GlooPool) -> None:
    for text in workers.run(3, two_known_plans):
        assert "documents: rank 2 has Documents([7, 30, 120]" in text


def read_late(rank: int, group: Any, reads: str) -> str:
    """On a device with gloo beside: a plan's second call does not wait; the next call or a backward reads it."""
    plan, other = CASE.plan(), replace(CASE, lengths=(7, 30, 120)).plan()
    comparison = CallAgreement(group, 600.0, torch.device("cuda"))
    comparison.check(plan, torch.float32)
    comparison.check(other if rank == 1 else plan, torch.float32)
    torch.distributed.barrier(group=group)
    unread = agreement._unread[group]
    while unread and not unread[0].is_finished():
        pass
    with pytest.raises(ConfigError) as caught:
        comparison.read_finished() if reads == "backward" else comparison.check(plan, torch.float32)
    assert not unread
    return str(caught.value)


@pytest.mark.parametrize("reads", ["backward", "next call"])
def test_a_comparison_that_is_read_late_names_the_ranks_and_the_plan_of_each(workers: GlooPool, reads: str) -> None:
    for rank, text in enumerate(workers.run(3, read_late, reads)):
        assert text.startswith(f"rank {rank}: ranks ran different plans in the same call of attention: ")
        assert "rank 1 has one; ranks 0, 2 have one" in text
        assert f"this rank ran ring over Documents({'[7, 30, 120]' if rank == 1 else '[30, 7, 120]'}" in text


def announced_otherwise(rank: int, group: Any) -> list[str]:
    """What ranks are told after announcements: of other plans, of another dropout key, of a plan not announced."""
    first, second = (local(rank, replace(DROPOUT, lengths=lengths)) for lengths in (CASE.lengths, (7, 30, 120)))
    comparison = CallAgreement(group, 600.0, torch.device("cpu"))
    texts = []

    def refused(case: Any, key: tuple[int, int]) -> None:
        plan, leaves, _ = case
        with pytest.raises(ConfigError) as caught:
            context_parallel_attention(*leaves, plan, group, dropout_key=key)
        texts.append(str(caught.value))

    comparison.announce([(second if rank == 1 else first)[0]])
    refused(second if rank == 1 else first, (1, 2))  # before a message travels
    comparison.announce([first[0]])
    plan, leaves, _ = first
    context_parallel_attention(*leaves, plan, group, dropout_key=(1, 2))
    comparison.check(plan, torch.float32, (1, rank))  # is told in the next micro-batch
    comparison.announce([first[0]])
    refused(first, (1, 3))
    refused(second if rank == 1 else (local(rank, FULL)), (1, 2))  # not announced
    return texts


def test_announced_plans_are_compared_before_the_first_call_and_the_calls_with_the_next(workers: GlooPool) -> None:
    for rank, texts in enumerate(workers.run(3, announced_otherwise)):
        assert "documents: rank 1 has Documents([7, 30, 120]" in texts[0]
        assert texts[1].startswith(
            f"rank {rank}: ranks ran different plans in the same micro-batch, or in the one before: rank"
        )
        assert "attention.mask: rank 1 has 'causal'; ranks 0, 2 have 'full'" in texts[2]


def waits_of_announced_calls(rank: int, group: Any) -> list[bool]:
    """Whether calls wait for ranks that come later: all but the first after an announcement do not."""
    plan = CASE.plan()
    comparison = CallAgreement(group, 600.0, torch.device("cpu"))
    waits = []
    for number in range(3):
        if number == 0:
            comparison.announce([plan])
        with patch.object(agreement, "profile_range", wraps=agreement.profile_range) as spans:
            comparison.check(plan, torch.float32)
        waits.append(spans.called)
    return waits


def test_only_the_first_call_after_an_announcement_waits(workers: GlooPool) -> None:
    assert workers.run(2, waits_of_announced_calls) == [[True, False, False]] * 2


def unread_comparisons(rank: int, group: Any) -> tuple[int, int]:
    """Comparisons of ranks that are far apart wait in a queue that does not grow without end."""
    plan = CASE.plan()
    comparison = CallAgreement(group, 600.0, torch.device("cuda"))
    comparison.check(plan, torch.float32)
    if rank == 2:
        for earlier in range(2):
            torch.distributed.recv(torch.zeros(1), earlier, group)
    for _ in range(10):
        comparison.check(plan, torch.float32)
    unread = len(agreement._unread[group])
    if rank != 2:
        torch.distributed.send(torch.zeros(1), 2, group)
    torch.distributed.barrier(group=group)
    for _ in range(agreement.MAX_UNREAD + 5):
        comparison.check(plan, torch.float32)
    bounded = len(agreement._unread[group])
    while agreement._unread[group]:
        comparison.read_finished()
    return unread, bounded


def test_ranks_far_apart_go_on_and_the_queue_is_bounded(workers: GlooPool) -> None:
    results = workers.run(3, unread_comparisons)
    assert results[0][0] == results[1][0] == 10
    assert all(bounded <= agreement.MAX_UNREAD + 1 for _, bounded in results)


def lost_peer(rank: int, group: Any) -> str | None:
    if rank == 1:
        return None
    comparison = CallAgreement(group, 1.0, torch.device("cpu"))
    agreement.MAX_UNREAD, agreement.WAIT_SECONDS = 0, 0.1
    comparison.check(CASE.plan(), torch.float32)
    with pytest.raises(PeerError) as caught:
        comparison.read_finished()
    return str(caught.value)


def test_a_comparison_that_never_ends_is_given_up() -> None:
    workers = GlooPool(2)  # of its own: a failed group cannot be used again
    try:
        text, _ = workers.run(2, lost_peer)
    finally:
        workers.close()
    assert "rank 0: comparing plans over the group: a rank died, or did not take part: no answer within 1 s" in text


def test_a_comparison_keeps_no_plan_alive(workers: GlooPool) -> None:
    assert all(workers.run(2, plans_are_freed))


def plans_are_freed(rank: int, group: Any) -> bool:
    plan, leaves, _ = local(rank, replace(CASE, ranks=2))
    context_parallel_attention(*leaves, plan, group)
    reference = weakref.ref(plan)
    del plan
    gc.collect()
    return reference() is None
