"""Random plans that no algorithm would make: every block travels along a random tree of relays, several share a slot.

They exercise what the ring does not need: relays, slots filled by several messages of many runs, messages that take several
steps, steps without work, and the derived backward.
"""

from __future__ import annotations

import numpy as np

from mindspeed_cp import AttentionConfig, Documents, Plan, Topology
from mindspeed_cp.algorithms.derived_backward import derive_backward
from mindspeed_cp.layout import TOKEN_SPAN, zigzag
from mindspeed_cp.plan import CONTENT, MessageBuilder, Messages, Program


def forest_plan(lengths: list[int], ranks: int, attention: AttentionConfig, seed: int) -> Plan:
    """A plan for zig-zag shards; the same seed gives the same plan."""
    rng = np.random.default_rng(seed)
    documents = Documents(lengths)
    layout = zigzag(documents, ranks)
    share = rng.integers(0, max(1, ranks // 2), ranks)  # slot 1 + share[b] carries block b
    contents: list[tuple[int, ...]] = []
    spans: list[np.ndarray] = [layout.spans]
    count = len(layout.spans)
    held: dict[tuple[int, int], np.ndarray] = {}  # (rank, slot) -> its spans in token order
    for rank in range(ranks):
        held[rank, 0] = layout.rank_spans(rank)
        for s in np.unique(share):
            blocks = [layout.rank_spans(b) for b in range(ranks) if share[b] == s and b != rank]
            held_spans = np.concatenate([*blocks, np.empty(0, TOKEN_SPAN)])
            held[rank, 1 + int(s)] = held_spans[np.argsort(held_spans["start"], kind="stable")]

    messages = MessageBuilder()
    landed: dict[tuple[int, int], int] = {}  # (rank, slot) -> last step in which something lands
    for block in range(ranks):
        slot = 1 + int(share[block])
        done = {block: -1}
        for rank in rng.permutation([r for r in range(ranks) if r != block]).tolist():
            parent = int(rng.choice(list(done)))
            start = done[parent] + 1 + int(rng.integers(0, 2))
            done[rank] = start + int(rng.integers(0, 3))
            src_slot = 0 if parent == block else slot
            moved = layout.rank_spans(block)
            rows = moved["stop"] - moved["start"]
            messages.add(
                start=start, done=done[rank], src=parent, dst=rank, src_slot=src_slot, dst_slot=slot,
                src_row=rows_of(held[parent, src_slot], moved), dst_row=rows_of(held[rank, slot], moved), rows=rows,
            )  # fmt: skip
            if rows.sum():
                landed[rank, slot] = max(landed.get((rank, slot), 0), done[rank])
    capacity = np.zeros((ranks, 1 + max(1, ranks // 2)), np.int64)
    for (rank, slot), own in held.items():
        capacity[rank, slot] = (own["stop"] - own["start"]).sum()
        if not len(own):
            continue
        step = int(rng.integers(0, 4)) if slot == 0 else landed[rank, slot] + 1 + int(rng.integers(0, 2))
        contents.append((step, rank, slot, 0, count, len(own)))
        spans.append(own)
        count += len(own)
    table = np.array(contents, CONTENT)
    table = table[np.lexsort((table["slot"], table["step"], table["rank"]))]
    fetch = messages.messages()
    last = max([0, *table["step"].tolist(), *fetch.items["done"].tolist()])
    forward = Program(
        last + 1, capacity, layout, documents, attention, table, np.concatenate(spans), fetch, Messages.empty()
    )
    return Plan("forest", attention, Topology(1, ranks), *(layout,) * 4, forward, derive_backward(forward))


def rows_of(held: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """First row, in a slot that holds the spans `held`, of each of `spans`."""
    length = held["stop"] - held["start"]
    return (np.cumsum(length) - length)[np.searchsorted(held["start"], spans["start"])]
