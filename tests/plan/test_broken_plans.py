"""Deliberately broken plans are refused, each with an error that names the rank and the step."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from mindspeed_cp import AttentionConfig, ConfigError, Documents, Plan, PlanError, Topology, build_plan, verify_plan
from mindspeed_cp.algorithms import ALGORITHMS
from mindspeed_cp.layout import contiguous, row_zigzag, zigzag
from mindspeed_cp.plan import Messages, Program, combine, peak_bytes, traffic
from tests.plan.forests import forest_plan

LENGTHS = [50, 3, 64]


def ring() -> Plan:
    return build_plan(Documents(LENGTHS), Topology(1, 4), AttentionConfig(4, 2))


def change(plan: Plan, direction: str, **fields: Any) -> Plan:
    return replace(plan, **{direction: replace(getattr(plan, direction), **fields)})


def edit(plan: Plan, direction: str, kind: str, index: int, **columns: int) -> Plan:
    """Add to columns of one message."""
    messages: Messages = getattr(getattr(plan, direction), kind)
    items = shifted(messages.items.copy(), index, **columns)
    return change(plan, direction, **{kind: Messages(items, messages.runs)})


def without(plan: Plan, direction: str, kind: str, index: int) -> Plan:
    messages: Messages = getattr(getattr(plan, direction), kind)
    return change(plan, direction, **{kind: Messages(np.delete(messages.items, index), messages.runs)})


def twice(plan: Plan, direction: str, kind: str, index: int) -> Plan:
    messages: Messages = getattr(getattr(plan, direction), kind)
    return change(
        plan, direction, **{kind: Messages(np.insert(messages.items, index, messages.items[index]), messages.runs)}
    )


@dataclass(frozen=True, eq=False)
class OtherTiles(Program):
    """A program whose tiles at one rank are not what its contents give."""

    changed_rank: int = 0
    change: Any = None

    def tiles(self, rank: int) -> np.ndarray:
        tiles = super().tiles(rank)
        return self.change(tiles) if rank == self.changed_rank else tiles


def with_tiles(plan: Plan, direction: str, rank: int, change: Any) -> Plan:
    program = getattr(plan, direction)
    values = {name: getattr(program, name) for name in Program.__dataclass_fields__}
    return replace(plan, **{direction: OtherTiles(**values, changed_rank=rank, change=change)})


def shifted(table: np.ndarray, index: int, **columns: int) -> np.ndarray:
    """The table with more in some columns of one record."""
    for name, by in columns.items():
        table[name][index] += by
    return table


def tiles(plan: Plan, direction: str, rank: int, index: int, **columns: int) -> Plan:
    """Add to columns of one tile."""
    return with_tiles(plan, direction, rank, lambda tiles: shifted(tiles, index, **columns))


def contents(plan: Plan, direction: str, index: int, **columns: int) -> Plan:
    return change(plan, direction, contents=shifted(getattr(plan, direction).contents.copy(), index, **columns))


def late(plan: Plan) -> Plan:
    """A block lands one step after it is computed."""
    return edit(plan, "forward", "fetch", 0, done=1)


def runs_past_the_slot(plan: Plan) -> Plan:
    runs = plan.forward.fetch.runs.copy()
    runs["dst_row"][2] += 1
    return change(plan, "forward", fetch=Messages(plan.forward.fetch.items, runs))


def permuted_rows(plan: Plan) -> Plan:
    """One message puts its rows in another order: the sums of the slot stay what they were, their places do not."""
    fetch = plan.forward.fetch
    items, runs = fetch.items.copy(), fetch.runs
    half = int(items["rows"][0]) // 2
    rest = int(items["rows"][0]) - half
    extra = np.array([(0, rest, half), (half, 0, rest)], runs.dtype)
    items["first"][0], items["count"][0] = len(runs), 2
    return change(plan, "forward", fetch=Messages(items, np.concatenate([runs, extra])))


def swapped_home(plan: Plan) -> Plan:
    """Two rows of the last gradient that comes home change places: keys that the same queries see."""
    reduce = plan.backward.reduce
    items, runs = reduce.items.copy(), reduce.runs
    last = len(items) - 1
    src, dst = reduce.rows_of(last)
    dst = dst.copy()
    dst[[0, 1]] = dst[[1, 0]]
    extra = np.zeros(len(src), runs.dtype)
    extra["src_row"], extra["dst_row"], extra["rows"] = src, dst, 1
    items["first"][last], items["count"][last] = len(runs), len(src)
    return change(plan, "backward", reduce=Messages(items, np.concatenate([runs, extra])))


def other_documents(plan: Plan) -> Plan:
    """The caller's layout has one more document than the layouts that are computed."""
    return replace(plan, layout=build_plan(Documents([*LENGTHS, 5]), Topology(1, 4), AttentionConfig(4, 2)).layout)


def other_queries(plan: Plan) -> Plan:
    """The backward's queries lie elsewhere than the plan says."""
    layout = build_plan(plan.documents, Topology(1, 4), AttentionConfig(4, 2), layout="contiguous").layout
    return change(plan, "backward", q_layout_compute=layout)


BROKEN = {
    # tiles
    "a tile leaves out a key": (lambda p: tiles(p, "forward", 1, 3, k_rows=-1), r"rank 1: query .* does not see key .* step 1"),
    "a tile leaves out a query": (lambda p: tiles(p, "forward", 2, 4, q_rows=-1), r"rank 2: query .* does not see key .* in step 1"),
    "a tile sees the future": (lambda p: tiles(p, "forward", 0, 0, mask=-1), r"rank 0: query .* sees key .* which its mask hides: step 0"),
    "a tile reads other keys": (lambda p: tiles(p, "forward", 3, 4, k_row=1), r"rank 3, step 2: .* its k_pos is \d+ in document"),
    "a tile of another document": (lambda p: tiles(p, "forward", 3, 4, doc=1), r"rank 3, step 2: .* but its document 1 has 3 tokens"),
    "a tile of a document that does not exist": (lambda p: tiles(p, "forward", 3, 4, doc=9), r"rank 3, step 2: .* documents go from 0 to 2"),
    "a tile is missing": (lambda p: with_tiles(p, "forward", 2, lambda t: np.delete(t, 1)), r"rank 2: query .* does not see key .* step 0"),
    "a tile is computed twice": (lambda p: with_tiles(p, "backward", 1, lambda t: np.insert(t, 2, t[2])), r"backward: rank 1: query .* 2 times: step \d.*; step \d"),
    "a tile leaves its slot": (lambda p: tiles(p, "forward", 1, 2, k_rows=99), r"rank 1, step 1: full tile of q rows .* and rows 0..104 of slot 1"),
    "a tile of a slot that holds nothing": (lambda p: tiles(p, "forward", 1, 4, slot=1), r"rank 1, step 2: .* the slot holds rows up to 0"),
    "a causal tile with fewer keys than queries": (lambda p: tiles(p, "forward", 1, 2, mask=1), r"rank 1, step 1: .* a causal tile has at least as many"),
    "tiles out of order": (lambda p: tiles(p, "forward", 1, 2, step=2), r"rank 1, step \d"),
    # fetches
    "a fetch is missing": (lambda p: without(p, "forward", "fetch", 2), r"rank 3, step 1: slot 1, row 0: the plan says token \d+, but the messages leave nothing"),
    "a fetch goes to another rank": (lambda p: edit(p, "forward", "fetch", 1, dst=1), r"rank \d, step 0"),
    "a fetch comes from another rank": (lambda p: edit(p, "forward", "fetch", 5, src=1), r"rank \d, step 1"),
    "a fetch goes to its own rank": (lambda p: edit(p, "forward", "fetch", 1, dst=-1), r"rank 1, step 0: .* does not send to itself"),
    "a fetch lands too late": (late, r"rank 1, step 1: row 0 of slot 1 is received while"),
    "a fetch lands where a tile reads": (lambda p: edit(p, "forward", "fetch", 4, dst_slot=-1), r"rank \d, step 1: row 0 of slot 1 is received while"),
    "a fetch lands in the rank's own rows": (lambda p: edit(p, "forward", "fetch", 1, dst_slot=-1), r"rank 2, step 0: .* writes to slot 0"),
    "rows are received twice at once": (lambda p: twice(p, "forward", "fetch", 3), r"rank 0, step 0: row 0 of slot 1 is received by two messages"),
    "rows are sent before they have come": (lambda p: edit(p, "forward", "fetch", 4, start=-1, done=-1), r"rank \d, step 0"),
    "rows land in another order": (permuted_rows, r"rank 1, step 1: slot 1, row 0: the plan says token"),
    "a message is not in global order": (lambda p: edit(p, "forward", "fetch", 1, start=1, done=1), r"rank \d, step 0: .* comes after a message of a later step"),
    "a message ends before it starts": (lambda p: edit(p, "forward", "fetch", 5, done=-1), r"rank \d, step 1: .* before it starts"),
    "a message ends after the program": (lambda p: edit(p, "forward", "fetch", 11, done=5), r"rank \d, step 2: .* steps go from 0 to 3"),
    "a message counts other rows than its runs": (lambda p: edit(p, "forward", "fetch", 1, rows=1), r"rank 1, step 0: .* has another number of rows than its runs"),
    "runs leave the slot": (runs_past_the_slot, r"rank \d, step \d: .* leaves the \d+ rows of slot"),
    "runs that do not exist": (lambda p: edit(p, "forward", "fetch", 1, first=99), r"rank 1, step 0: .* runs do not exist"),
    # reduces
    "a reduce is missing": (lambda p: without(p, "backward", "reduce", 5), r"backward: rank \d, step \d: the gradient of its key \d+ of document \d .* is not the sum"),
    "a reduce is sent twice": (lambda p: twice(p, "backward", "reduce", 9), r"backward: rank \d, step \d: the gradient of its key .* a reduce on the way to slot 0 is"),
    "a reduce comes from another slot": (lambda p: edit(p, "backward", "reduce", 0, src_slot=-1), r"backward: rank \d, step \d: the gradient of its key"),
    "a reduce leaves while it is summed": (lambda p: edit(p, "backward", "reduce", 0, start=-1, done=-1), r"backward: rank 0, step 1: row 0 of slot 1 has its gradient sent while a tile still adds"),
    "a reduce leaves too late": (lambda p: edit(p, "backward", "reduce", 3, start=1, done=1), r"backward: rank \d, step \d"),
    "a forward with gradients": (lambda p: change(p, "forward", reduce=p.backward.reduce), r"forward: rank \d, step 2: a forward has no gradients"),
    "a reduce adds rows in another order": (swapped_home, r"backward: rank \d, step \d: the gradient of its key"),
    # contents, slots, layouts
    "contents of another block": (lambda p: contents(p, "forward", 6, first=1), r"rank 1, step 2: contents of slot 2 do not ascend"),
    "contents that do not exist": (lambda p: contents(p, "forward", 5, count=99), r"rank 1, step 1: contents of slot \d refer"),
    "contents given twice": (lambda p: contents(p, "forward", 5, step=-1, slot=-1), r"rank 1, step 0: contents of slot 0 .* overlap"),
    "a slot that is too small": (lambda p: change(p, "forward", capacity=p.forward.capacity - np.array([0, 1, 0])), r"rank \d, step \d: .* leaves the \d+ rows of slot 1"),
    "slot 0 of another size": (lambda p: change(p, "forward", capacity=p.forward.capacity + np.array([1, 0, 0])), r"rank 0, step 0: slot 0 has"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_plans_are_refused(kind):
    breaking, says = BROKEN[kind]
    plan = ring()
    verify_plan(plan)
    with pytest.raises(PlanError) as error:
        verify_plan(breaking(plan))
    text = str(error.value)
    assert re.search(says, text), text
    assert re.search(r"rank \d", text) and "\n" not in text


@pytest.mark.parametrize(
    ("breaking", "says"),
    [
        (other_documents, "q_layout_compute: it is of Documents.*, the caller's layout of Documents"),
        (other_queries, "backward: the program's queries are laid out in another way"),
        (lambda p: replace(p, layout=p.layout.with_heads(np.tile([0, 4], (4, 1)))), "the caller holds all heads"),
        (lambda p: replace(p, topology=Topology(1, 5)), "layout: it has 4 ranks, the topology 5"),
        (lambda p: change(p, "forward", capacity=-p.forward.capacity), r"rank 0, step 0: slot 0 has -\d+ rows"),
    ],
)
def test_layouts_and_programs_that_do_not_belong_together_are_refused(breaking, says):
    with pytest.raises(PlanError, match=says):
        verify_plan(breaking(ring()))


def test_a_layout_that_holds_a_token_twice_is_refused():
    plan = ring()
    spans = plan.layout.spans.copy()
    spans["stop"][0] += 1
    with pytest.raises(PlanError, match="held by 2 ranks"):
        verify_plan(replace(plan, layout=replace(plan.layout, spans=spans)))


def test_kv_heads_that_do_not_serve_the_query_heads_are_refused():
    plan = build_plan(Documents([10]), Topology(1, 2), AttentionConfig(4, 2))
    everything = np.array([(0, 0, 0, 10), (1, 0, 0, 10)], plan.layout.spans.dtype)
    held = replace(plan.layout, spans=everything)
    q_layout_compute, kv_layout_compute = (
        held.with_heads(np.array([[0, 2], [2, 4]])),
        held.with_heads(np.array([[1, 2], [0, 1]])),
    )
    with pytest.raises(PlanError, match="rank 0: kv heads 1 to 1 are not exactly those that query heads 0 to 1 read"):
        verify_plan(replace(plan, q_layout_compute=q_layout_compute, kv_layout_compute=kv_layout_compute))


def test_a_mask_that_differs_between_plan_and_program_is_refused():
    with pytest.raises(PlanError, match=r"forward: the program is for AttentionConfig.*mask='full'.*, the plan for"):
        verify_plan(change(ring(), "forward", attention=AttentionConfig(4, 2, mask="full")))
    with pytest.raises(PlanError, match=r"backward: its keys are of Documents.*\[1"):
        verify_plan(change(ring(), "backward", kv_documents=Documents([1, 2, 3])))


def test_a_relay_that_sends_before_it_has_summed_is_refused():
    plan = forest_plan(LENGTHS, 5, AttentionConfig(4), seed=3)
    verify_plan(plan)
    refused = 0
    for index in range(len(plan.backward.reduce)):
        items = plan.backward.reduce.items.copy()
        items["start"][index] -= 1
        items["done"][index] -= 1
        order = np.argsort(items["start"], kind="stable")
        with pytest.raises(PlanError, match=r"rank \d, step \d"):
            verify_plan(change(plan, "backward", reduce=Messages(items[order], plan.backward.reduce.runs)))
        refused += 1
    assert refused >= 10


def test_keys_that_land_while_their_slots_gradient_is_sent_are_refused():
    plan = build_plan(Documents([600]), Topology(1, 6), AttentionConfig(4, 2), "direct", prefetch=2)
    with pytest.raises(PlanError, match="has its gradient sent while a fetch that lands sets it to zero"):
        verify_plan(edit(plan, "backward", "reduce", 0, done=1))


def test_rows_that_are_received_in_any_step_of_their_sending_are_refused():
    """Blocks travel between windows over three steps; in the second one a block of the window lands on one of them."""
    plan = build_plan(Documents([900]), Topology(3, 3), AttentionConfig(4, 2, mask="full"), "double_ring")
    items = plan.forward.fetch.items
    sent = items[np.flatnonzero((items["start"] == 3) & (items["done"] == 5))[0]]
    landing = np.flatnonzero((items["start"] == 4) & (items["dst"] == sent["src"]))[0]
    with pytest.raises(PlanError, match="step 4: row 0 of slot 2 is received while it is being sent"):
        verify_plan(edit(plan, "forward", "fetch", landing, dst_slot=sent["src_slot"] - items["dst_slot"][landing]))


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name not in ("ulysses", "hierarchical")])
def test_ranks_that_do_not_exist_are_refused(algorithm):
    plan = build_plan(Documents([40]), Topology(1, 4), AttentionConfig(4, 1), algorithm)
    with pytest.raises(PlanError, match="ranks go from 0 to 3"):
        verify_plan(edit(plan, "forward", "fetch", 0, dst=9))


def test_contents_that_name_another_document_are_refused():
    plan = ring()
    spans = plan.forward.spans.copy()
    spans["doc"][0] = 2
    with pytest.raises(PlanError, match="rank 0, step 0: contents of slot 0 leave their documents"):
        verify_plan(change(plan, "forward", spans=spans))


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    ("attention", "lengths"), [(AttentionConfig(4, 2), [50, 3, 64]), (AttentionConfig(4, alibi=True), [20, 90])]
)
@pytest.mark.parametrize("shift", [-1, 1])
def test_tiles_that_name_another_document_are_refused(direction, attention, lengths, shift):
    """Positions are shifted so that the tile still names the same tokens, outside of the document that it names."""
    plan = build_plan(Documents(lengths), Topology(1, 4), attention)
    offsets, mutants = plan.documents.offsets, 0
    for rank in range(4):
        for index, tile in enumerate(getattr(plan, direction).tiles(rank)):
            if not 0 <= tile["doc"] + shift < len(lengths):
                continue
            moved = int(offsets[tile["doc"]] - offsets[tile["doc"] + shift])
            with pytest.raises(
                PlanError, match=rf"{direction}: rank {rank}, step \d+: .*but its document \d has \d+ tokens"
            ):
                verify_plan(tiles(plan, direction, rank, index, doc=shift, q_pos=moved, k_pos=moved))
            mutants += 1
    assert mutants


def test_tiles_whose_keys_are_beyond_their_document_are_refused():
    plan = build_plan(Documents([40]), Topology(1, 2), AttentionConfig(4, mask="full"), kv_documents=Documents([10]))
    with pytest.raises(PlanError, match=r"its k_pos is 1\d with .* rows, but its document 0 has 10 tokens"):
        verify_plan(tiles(plan, "forward", 0, 0, k_pos=10))


def documents_everywhere(plan: Plan, queries: Documents, keys: Documents) -> Plan:
    """A plan without parts, with other documents of the same lengths."""
    layouts = {name: replace(getattr(plan, name), documents=keys if "kv" in name else queries) for name in LAYOUTS}
    programs = {
        name: replace(getattr(plan, name), q_layout_compute=layouts["q_layout_compute"], kv_documents=keys)
        for name in ("forward", "backward")
    }
    return replace(plan, **layouts, **programs)


LAYOUTS = ("layout", "kv_layout_in", "q_layout_compute", "kv_layout_compute")
PLAIN, TREE, BLOCK = Documents([5, 9]), Documents([5, 9], [-1, 0]), Documents([5, 9], None, [(6, 10)])


@pytest.mark.parametrize(
    ("attention", "queries", "keys"),
    [
        (AttentionConfig(4, mask="full", alibi=True), PLAIN, TREE),
        (AttentionConfig(4), TREE, PLAIN),
        (AttentionConfig(4), PLAIN, BLOCK),
        (AttentionConfig(4, alibi=True), BLOCK, BLOCK),
        (AttentionConfig(4, mask="full"), BLOCK, BLOCK),
        (AttentionConfig(4, mask="full"), TREE, TREE),
        (AttentionConfig(4), PLAIN, Documents([5, 8])),
        (AttentionConfig(4), PLAIN, Documents([14])),
    ],
)
def test_documents_that_build_plan_refuses_are_refused_in_a_plan_with_the_same_words(attention, queries, keys):
    with pytest.raises(ConfigError) as wanted:
        build_plan(queries, Topology(1, 2), attention, "ring", keys)
    plan = build_plan(PLAIN, Topology(1, 2), attention, "ring")
    with pytest.raises(PlanError) as error:
        verify_plan(documents_everywhere(plan, queries, keys))
    assert str(error.value) == str(wanted.value)


TEXT = AttentionConfig(4)
BANDS = AttentionConfig(4, window=(5, 0))


@pytest.mark.parametrize(
    ("attention", "changed", "says"),
    [
        (BANDS, lambda t: shifted(t, -1, q_rows=1), "a query sees no key of it"),
        (BANDS, lambda t: shifted(t, -1, q_row=1, q_pos=1, q_rows=-1), "no query sees a key of it"),
        (TEXT, lambda t: t[::-1], "comes after a tile of a later step or slot"),
        (AttentionConfig(4, alibi=True), lambda t: full_as_causal(t), "its last query and its last key are at different"),
        (AttentionConfig(4, mask="full"), lambda t: full_as_causal(t), "queries see keys behind themselves"),
        (TEXT, lambda t: shifted(t, 0, slot=7, step=-1), "rank 2, step -1: .* the slot holds rows up to 0"),
        (TEXT, lambda t: t[:, None], "its tiles are no array of records of step, slot"),
    ],
)  # fmt: skip
def test_tiles_that_no_operator_takes_are_refused(attention, changed, says):
    """Most have the right pairs, which the sums of the proof do not tell from right tiles."""
    plan = build_plan(Documents([40]), Topology(1, 4), attention, "all_gather", layout="contiguous")
    verify_plan(plan)
    with pytest.raises(PlanError, match=says):
        verify_plan(with_tiles(plan, "forward", 2, changed))


def full_as_causal(tiles: np.ndarray) -> np.ndarray:
    """A full tile as a causal one, and the keys that it hides from each row as full ones."""
    index = int(np.argmax((tiles["mask"] == 0) & (tiles["k_rows"] >= tiles["q_rows"]) & (tiles["q_rows"] > 1)))
    n, m = int(tiles["q_rows"][index]), int(tiles["k_rows"][index])
    rest = np.repeat(tiles[index : index + 1], n - 1)
    hidden = np.arange(m - n + 1, m)
    rest["q_row"] += np.arange(n - 1)
    rest["q_pos"] += np.arange(n - 1)
    rest["q_rows"], rest["k_rows"] = 1, m - hidden
    rest["k_row"] += hidden
    rest["k_pos"] += hidden
    tiles["mask"][index] = 1
    return np.concatenate([tiles[: index + 1], rest, tiles[index + 1 :]])


def test_numbers_that_overflow_are_refused():
    plan = ring()
    for name in ("first", "count", "rows", "src", "start", "done", "dst_slot"):
        with pytest.raises(PlanError):
            verify_plan(edit(plan, "forward", "fetch", 0, **{name: 2**63 - 1 - int(plan.forward.fetch.items[name][0])}))
    for name in ("row", "first", "count", "step"):
        with pytest.raises(PlanError):
            verify_plan(contents(plan, "forward", 0, **{name: 2**63 - 1 - int(plan.forward.contents[name][0])}))
    with pytest.raises(PlanError, match="forward: it has 1000000000000 steps; valid: 1 to 1000000"):
        verify_plan(change(plan, "forward", steps=10**12))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: verify_plan(None), "plan is None; valid: a Plan, from build_plan"),
        (lambda: verify_plan(ring(), max_bytes="x"), "max_bytes is 'x'; valid: a whole number"),
        (lambda: verify_plan(ring(), bytes_per_element=0), "bytes_per_element is 0; valid: a whole number, 1 or more"),
        (lambda: peak_bytes(3, "forward"), "plan is 3; valid: Plan"),
        (lambda: traffic("x"), "plan is 'x'; valid: Plan"),
        (lambda: combine("x", 3), "parts are .*; valid: one Plan or more"),
        (lambda: Documents.from_trajectories(3), "trajectories is 3; valid: a list with the token numbers of each trajectory"),
        (lambda: Documents.from_trajectories([[1, 2], [1]]).targets.weights(3), "weights is 3; valid: one entry for each"),
        (lambda: Topology.from_mesh(3), "mesh is 3; valid: torch's DeviceMesh"),
        (lambda: zigzag([4], 2), r"documents is \[4\]; valid: Documents"),
        (lambda: contiguous(None, 2), "documents is None; valid: Documents"),
        (lambda: row_zigzag(None, 2), "documents is None; valid: Documents"),
    ],
)  # fmt: skip
def test_arguments_of_another_type_are_refused_in_one_line(call, says):
    with pytest.raises(ConfigError, match=says) as error:
        call()
    assert "\n" not in str(error.value)
