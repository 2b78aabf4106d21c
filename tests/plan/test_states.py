"""Plans of states: what they send, their proof, and broken plans, which it refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_cp import (
    ConfigError,
    Documents,
    PlanError,
    StateConfig,
    StatePlan,
    Topology,
    build_state_plan,
    verify_state_plan,
)
from mindspeed_cp.engine import linear_attention_in_process
from mindspeed_cp.layout import TOKEN_SPAN, Layout, contiguous, zigzag
from mindspeed_cp.plan.states import MAP, STATE, segments_of
from mindspeed_cp.simulate.states import simulate_states
from tests.engine.linear_attention import draw_rows, largest_error, token_by_token
from tests.layout.layouts import equal_tokens
from tests.plan.states import SCHEDULES, random_layout, random_plan

GDN = StateConfig("gated_delta", 32, 128)


@settings(max_examples=280, deadline=None)
@given(st.randoms(use_true_random=False))
def test_random_plans_are_proved(rng: Random) -> None:
    layout = random_layout(rng)
    kind = rng.choice(("gated_delta", "kda", "lightning", "mamba2"))
    state = StateConfig(kind, rng.randint(1, 9), rng.choice((4, 128)))
    for schedule in ("auto", *SCHEDULES):
        verify_state_plan(build_state_plan(layout, state, schedule=schedule))


def test_documents_whole_on_a_rank_send_nothing() -> None:
    documents = Documents([40, 7, 0, 300, 5], [-1, 0, 0, -1, 3])
    spans = [(0, 0, 0, 40), (0, 1, 40, 47), (1, 3, 47, 347), (1, 4, 347, 352)]
    layout = Layout(documents, 3, np.array(spans, TOKEN_SPAN))
    for schedule in ("auto", "relay", "gather", "scan"):
        plan = build_state_plan(layout, GDN, schedule=schedule)
        verify_state_plan(plan)
        assert (plan.borders, len(plan.forward.messages), len(plan.backward.messages)) == (0, 0, 0)
        assert plan.segments["before"].tolist() == [-1, 0, -1, 2]


@pytest.mark.parametrize(
    ("ranks", "make", "schedule", "forward", "backward", "steps"),
    [
        # MiB of the busiest rank: a state has 2, a map 2 more (facts of one document, 32 heads of 128 x 128)
        (8, contiguous, "relay", 2, 2, 8),
        (8, contiguous, "gather", 26, 26, 1),
        (8, contiguous, "scan", 14, 8, 4),
        (8, zigzag, "relay", 4, 4, 15),
        (64, contiguous, "scan", 26, 14, 7),
        (64, zigzag, "scan", 56, 30, 8),
    ],
)
def test_bytes_and_rounds_of_one_document(ranks, make, schedule, forward, backward, steps) -> None:
    plan = build_state_plan(make(Documents([ranks * 8]), ranks), GDN, schedule=schedule)
    verify_state_plan(plan)
    assert plan.received_bytes("forward").max() == forward * 2**20
    assert plan.received_bytes("backward").max() == backward * 2**20
    assert plan.forward.steps == steps


def test_a_prefix_is_computed_and_sent_once_to_a_rank() -> None:
    documents = Documents([8, 4, 4, 4], [-1, 0, 0, 0])
    spans = [(0, 0, 0, 8), (1, 1, 8, 12), (1, 2, 12, 16), (2, 3, 16, 20)]
    layout = Layout(documents, 3, np.array(spans, TOKEN_SPAN))
    for schedule in ("relay", "gather", "scan"):
        plan = build_state_plan(layout, GDN, schedule=schedule)
        assert plan.forward.messages[["src", "dst", "parts"]].tolist() == [(0, 1, STATE), (0, 2, STATE)]
        assert sorted(plan.backward.messages[["src", "dst"]].tolist())[-1] == (2, 0)


def test_no_schedule_is_slower_than_the_chosen_one_by_the_model() -> None:
    chosen = set()
    for lengths, ranks, make in (
        ([2**20], 8, contiguous),
        ([2**20], 32, zigzag),
        ([4096] * 50, 8, zigzag),
        ([2**14] * 20, 8, equal_tokens),
        ([2000] * 64, 16, zigzag),
    ):
        topology = Topology(ranks // 8, 8)
        layout = make(Documents(lengths), ranks)
        auto = build_state_plan(layout, GDN, topology)
        seconds = {
            name: simulate_states(build_state_plan(layout, GDN, topology, name), "a2").total for name in SCHEDULES
        }
        assert simulate_states(auto, "a2").total == min(seconds.values()), seconds
        chosen.add(auto.schedule)
    assert len(chosen) >= 3 and "heads" in chosen  # many short documents under zig-zag


# Broken plans: every field of every table, changed in every way that it can be.


def changes(plan: StatePlan, rng: Random) -> Iterator[tuple[str, StatePlan]]:
    """Yield one change of each kind that the plan has: its name, and the changed plan."""
    for direction in ("forward", "backward"):
        program = getattr(plan, direction)
        for name in ("messages", "operations"):
            table = getattr(program, name)
            if not len(table):
                continue
            number = rng.randrange(len(table))
            changed = [("lost", np.delete(table, number)), ("twice", np.insert(table, number, table[number]))]
            if name == "operations":
                swapped = table.copy()
                swapped["a"][number], swapped["b"][number] = table["b"][number], table["a"][number]
                changed.append(("operands exchanged", swapped))
            for field in table.dtype.names:
                for what, value in (
                    ("one more", table[field][number] + 1),
                    ("one less", table[field][number] - 1),
                    ("of another", table[field][rng.randrange(len(table))]),
                    ("far", 2**40),
                ):
                    other = table.copy()
                    other[field][number] = value
                    changed.append((f"{field} {what}", other[np.argsort(other["step"], kind="stable")]))
            yield from (
                (f"{direction} {name} {what}", replace(plan, **{direction: replace(program, **{name: value})}))
                for what, value in changed
            )
        results = program.results
        if (results >= 0).any():
            number = rng.choice(np.flatnonzero(results >= 0).tolist())
            for what, value in (
                ("none", -1),
                ("of another", rng.choice(results.tolist())),
                ("one more", results[number] + 1),
            ):
                other = results.copy()
                other[number] = value
                yield f"{direction} results {what}", replace(plan, **{direction: replace(program, results=other)})
        yield f"{direction} no results", replace(plan, **{direction: replace(program, results=results[:-1])})
        few = replace(program, registers=int(max([0, *program.messages["target"], *program.operations["out"]])))
        yield f"{direction} registers", replace(plan, **{direction: few})
        yield (
            f"{direction} of another direction",
            replace(plan, **{direction: getattr(plan, "backward" if direction == "forward" else "forward")}),
        )
    number = rng.randrange(len(plan.segments))
    for field in plan.segments.dtype.names:
        for what, step in (("one more", 1), ("one less", -1)):
            other = plan.segments.copy()
            other[field][number] += step
            yield f"segments {field} {what}", replace(plan, segments=other)
    yield "segments lost", replace(plan, segments=np.delete(plan.segments, number))
    yield "segments type", replace(plan, segments=plan.segments.tolist())
    yield "layout", replace(plan, layout=plan.layout.with_heads(np.zeros((plan.ranks, 2))))
    yield "topology", replace(plan, topology=Topology(1, plan.ranks + 1))
    other_documents = Documents(np.append(plan.documents.lengths, 1))
    yield "compute_layout", replace(plan, compute_layout=contiguous(other_documents, plan.ranks))
    yield "state", replace(plan, state=None)


def same_plan(a: StatePlan, b: StatePlan) -> bool:
    """Return True if a change changed nothing."""
    return a.layout is b.layout and a.compute_layout is b.compute_layout and a.state is b.state and all(
        np.array_equal(x, y)
        for x, y in [
            (a.segments, b.segments),
            (a.topology.ranks, b.topology.ranks),
            *(
                (getattr(getattr(a, direction), name), getattr(getattr(b, direction), name))
                for direction in ("forward", "backward")
                for name in ("registers", "messages", "operations", "results")
            ),
        ]
    )  # fmt: skip


def is_exact(plan: StatePlan, rng: Random) -> bool:
    """Run a plan on all ranks and compare out and gradients with the definition."""
    rows, dout = draw_rows(plan.state, plan.documents.tokens, rng.randrange(1000))
    wanted = token_by_token(rows, dout, plan.documents, plan.state)
    return largest_error(linear_attention_in_process(plan, *rows, dout), wanted) <= 1e-10


def refused_of(seeds: range) -> tuple[Counter[str], int]:
    """Break plans in every way; return how often each kind was refused, and how many changed plans are right."""
    refused: Counter[str] = Counter()
    accepted = 0
    for seed in seeds:
        rng = Random(seed)
        plan = random_plan(rng, SCHEDULES[seed % 4], ranks=2 + seed % 4, tokens=20, has_trees=seed % 3 == 0)
        if not plan.segments.size:
            continue
        for name, broken in changes(plan, rng):
            if same_plan(plan, broken):
                continue
            try:
                verify_state_plan(broken)
            except PlanError as error:
                assert "\n" not in str(error)
                refused[f"{plan.schedule}: {name}"] += 1
            else:
                assert is_exact(broken, rng), f"seed {seed}, {plan}: {name}"
                accepted += 1
    return refused, accepted


def test_broken_plans_are_refused_and_what_is_accepted_is_exact() -> None:
    refused, _ = refused_of(range(10))
    assert len(refused) >= 200, len(refused)


@pytest.mark.thorough
def test_more_broken_plans_are_refused_and_what_is_accepted_is_exact() -> None:
    refused, accepted = refused_of(range(100, 220))
    assert len(refused) >= 300 and sum(refused.values()) >= 5_000 and accepted


def test_a_lost_map_is_named() -> None:
    plan = build_state_plan(contiguous(Documents([40]), 4), GDN, schedule="gather")
    messages = plan.forward.messages.copy()
    messages["parts"][messages["parts"] == STATE | MAP] = STATE
    with pytest.raises(
        PlanError, match=r"forward, step 0, rank 2: compose into register \d+ reads the map of register 1"
    ):
        verify_state_plan(replace(plan, forward=replace(plan.forward, messages=messages)))


def test_a_layout_that_does_not_fit_is_refused() -> None:
    layout = contiguous(Documents([40, 3]), 2)
    arguments: list[tuple[tuple[Any, ...], str]] = [
        ((layout.documents, GDN), "layout is"),
        ((layout, "gated_delta"), "state is"),
        ((layout, GDN, Topology(1, 3)), "the layout is for 2 ranks, the topology has 3"),
        ((layout, GDN, None, "chain"), "schedule is 'chain'; valid: auto, relay, gather, scan, heads"),
        ((layout.with_heads(np.array([[0, 16], [16, 32]])), GDN), "layout splits heads"),
    ]
    for given_arguments, words in arguments:
        with pytest.raises(ConfigError, match=words):
            build_state_plan(*given_arguments)
    with pytest.raises(ConfigError, match="valid: a StatePlan"):
        verify_state_plan(layout)  # type: ignore[arg-type]
    for values, words in (
        (("delta", 4, 8), "kind is 'delta'; valid: gated_delta, kda, lightning, mamba2"),
        (("kda", 0, 8), "state.heads is 0"),
        (("kda", 4, 8, None, 3), "state.key_heads is 3; valid: a divisor of state.heads, which is 4"),
        (("kda", 4, 8, None, None, -1.0), "state.scale is -1.0"),
    ):
        with pytest.raises(ConfigError, match=words):
            StateConfig(*values)


def test_segments_join_spans_and_follow_the_path() -> None:
    documents = Documents([6, 0, 4], [-1, 0, 1])
    spans = [(0, 0, 0, 2), (0, 0, 2, 4), (0, 2, 6, 8), (1, 0, 4, 6), (1, 2, 8, 10)]
    segments = segments_of(Layout(documents, 2, np.array(spans, TOKEN_SPAN)))
    assert segments[["rank", "start", "stop", "before"]].tolist() == [
        (0, 0, 4, -1), (0, 6, 8, 2), (1, 4, 6, 0), (1, 8, 10, 1)
    ]  # fmt: skip


def test_seconds_grow_with_tokens_by_heads_only() -> None:
    bytes_of = {}
    for tokens in (2**16, 2**17):
        layout = equal_tokens(Documents([tokens]), 8)
        for schedule in ("relay", "heads"):
            times = simulate_states(build_state_plan(layout, GDN, Topology(1, 8), schedule), "a2")
            bytes_of[schedule, tokens] = times.received.max()
            assert times.total > 0 and times.compute.min() > 0
    assert bytes_of["relay", 2**16] == bytes_of["relay", 2**17] < bytes_of["heads", 2**16] / 10
    assert bytes_of["heads", 2**17] == pytest.approx(2 * bytes_of["heads", 2**16], rel=1e-3)
