"""The ring: blocks of keys and values travel one rank per step, through two receive buffers in turn.

Rank r of n, step s: computes against the block of rank (r - s) mod n, sends that block on to r + 1 and receives the
next one from r - 1 at the same time. In the backward the gradient of a block follows it one step behind, collecting
every rank's part on its way, and so ends at its owner::

    step           0        1        2        3        4
    rank r holds   r        r-1      r-2      r-3                   (4 ranks)
    sends on       K,V      K,V      K,V
    and            .        .        dK,dV    dK,dV    dK,dV        of the block computed one step before

What no other rank sees stays at home: under a causal mask the second chunks of rank 0, which is half of its block. A
block stops travelling after the last rank that sees any of it; its gradient then goes to the owner in one message.

In the backward, half of a rank's own block is computed in step 0, while the first block comes in, and half in the last
step, in which the last gradients travel home.
"""

from __future__ import annotations

import numpy as np

from mindspeed_cp.layout import Documents, Layout, contiguous, zigzag
from mindspeed_cp.plan.config import AttentionConfig, Topology
from mindspeed_cp.plan.halves import own_block_in_two_halves
from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.plan.records import CONTENT, MESSAGE, RUN, Messages, sorted_contents
from mindspeed_cp.plan.visibility import last_hop, seen_elsewhere

LAYOUTS = {"zigzag": zigzag, "contiguous": contiguous}

#: A block is trimmed to what others see when that spares at least this share of it: rows that leave from many places
#: have to be gathered first, which a few rows less are not worth.
TRIM = 1 / 8


def build_ring(documents: Documents, topology: Topology, attention: AttentionConfig, layout: str = "zigzag") -> Plan:
    """The ring over all ranks, for any number of ranks (odd ones too) and any documents.

    Args:
        documents: the batch.
        topology: where it runs.
        attention: what is computed.
        layout: "zigzag" (balanced under a causal mask) or "contiguous" (balanced under a full mask), per document.
    """
    held = LAYOUTS[layout](documents, topology.ranks)
    n, mask = topology.ranks, attention.mask
    spans, first, count, rows, leaving = _travelling(held, mask)
    last = last_hop(held, mask)  # [block]: hops after which no rank sees the block

    hop, block = np.divmod(np.arange(n * n), n)  # block b is at rank b + hop in step `hop`
    at, after = (block + hop) % n, (block + hop + 1) % n
    slot, next_slot = np.where(hop == 0, 0, 1 + (hop - 1) % 2), 1 + hop % 2
    present = (hop <= last[block]) & (held.token_counts[block] > 0)

    contents = np.zeros(int(present.sum()), CONTENT)
    b, own = block[present], hop[present] == 0
    contents["step"], contents["rank"], contents["slot"] = hop[present], at[present], slot[present]
    contents["first"] = np.where(own, held.bounds[b], first[b])
    contents["count"] = np.where(own, np.diff(held.bounds)[b], count[b])
    contents = sorted_contents(contents)

    capacity = np.zeros((n, 3), np.int64)
    np.maximum.at(capacity, (at[present], slot[present]), rows[block[present]])
    capacity[:, 0] = held.token_counts

    travels = present & (hop < last[block])
    fetch = _messages(hop, at, after, slot, next_slot, block, travels, rows, leaving, sends_home=np.zeros(n * n, bool))
    home, moved = hop == last[block], present & (hop > 0)
    to, to_slot = np.where(home, block, after), np.where(home, 0, next_slot)
    reduce = _messages(hop + 1, at, to, slot, to_slot, block, moved, rows, leaving, sends_home=home)

    forward_steps = int(contents["step"].max()) + 1 if len(contents) else 1
    backward_steps = max(forward_steps, int(reduce.items["done"].max()) + 1 if len(reduce) else 0)
    forward = Program(forward_steps, capacity, held, mask, contents, spans, fetch, Messages.none())
    if len(reduce):
        contents, spans = own_block_in_two_halves(held, mask, contents, spans, backward_steps - 1)
    backward = Program(backward_steps, capacity, held, mask, contents, spans, fetch, reduce)
    return Plan("ring", attention, topology, held, held, held, forward, backward)


def _travelling(
    held: Layout, mask: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[int, np.ndarray]]:
    """What of each block travels.

    Returns:
        A table of spans that begins with the layout's; for every block the first span, the number of spans and the rows
        that travel; and for the trimmed blocks the runs of those rows: in slot 0 (src_row) and while travelling
        (dst_row).
    """
    spans, bounds = held.spans, held.bounds
    length = spans["stop"] - spans["start"]
    seen = seen_elsewhere(held, mask)
    rows = held.token_counts.copy()
    kept = np.zeros(held.ranks, np.int64)
    np.add.at(kept, spans["rank"], np.where(seen, length, 0))
    first, count = bounds[:-1].copy(), np.diff(bounds)
    tables, size, leaving = [spans], len(spans), {}
    row = np.cumsum(length) - length
    for block in np.flatnonzero((kept > 0) & (rows - kept >= TRIM * rows)).tolist():
        lo, hi = bounds[block], bounds[block + 1]
        mine = np.flatnonzero(seen[lo:hi]) + lo
        first[block], count[block], rows[block] = size, len(mine), kept[block]
        tables.append(spans[mine])
        size += len(mine)
        runs = np.zeros(len(mine), RUN)
        runs["src_row"], runs["rows"] = row[mine] - row[lo], length[mine]
        runs["dst_row"] = np.cumsum(length[mine]) - length[mine]
        leaving[block] = _joined(runs)
    return np.concatenate(tables), first, count, rows, leaving


def _joined(runs: np.ndarray) -> np.ndarray:
    """Runs that continue each other on both sides become one."""
    follows = (runs["src_row"][1:] == runs["src_row"][:-1] + runs["rows"][:-1]) & (
        runs["dst_row"][1:] == runs["dst_row"][:-1] + runs["rows"][:-1]
    )
    start = np.flatnonzero(np.append(True, ~follows))
    out = runs[start]
    out["rows"] = np.add.reduceat(runs["rows"], start)
    return out


def _messages(
    step: np.ndarray,
    src: np.ndarray,
    dst: np.ndarray,
    src_slot: np.ndarray,
    dst_slot: np.ndarray,
    block: np.ndarray,
    keep: np.ndarray,
    rows: np.ndarray,
    leaving: dict[int, np.ndarray],
    sends_home: np.ndarray,
) -> Messages:
    """What travels of a block, posted and finished in one step: one run, except where a trimmed block leaves slot 0 of
    its owner, and where its gradient comes back there."""
    items, runs = np.zeros(int(keep.sum()), MESSAGE), np.zeros(int(keep.sum()), RUN)
    columns = {"start": step, "done": step, "src": src, "dst": dst, "src_slot": src_slot, "dst_slot": dst_slot}
    for name, column in columns.items():
        items[name] = column[keep]
    items["rows"] = runs["rows"] = rows[block[keep]]
    items["first"], items["count"] = np.arange(len(items)), 1
    total, extra = len(runs), [runs]
    at_owner = (items["src_slot"] == 0) | sends_home[keep]
    for index in np.flatnonzero(at_owner & np.isin(block[keep], list(leaving))).tolist():
        own = leaving[int(block[keep][index])]
        if items["src_slot"][index]:  # back home: the same runs, the other way
            own = own.copy()
            own["src_row"], own["dst_row"] = own["dst_row"].copy(), own["src_row"].copy()
        items["first"][index], items["count"][index] = total, len(own)
        extra.append(own)
        total += len(own)
    order = np.lexsort((items["src"], items["start"]))
    return Messages(items[order], np.concatenate(extra))
