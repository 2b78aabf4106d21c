"""The ring: blocks of keys and values travel one rank per step, through two receive buffers in turn.

Rank r of n, step s: computes against the block of rank (r - s) mod n, sends that block on to r + 1 and receives the
next one from r - 1 at the same time. In the backward the gradient of a block follows it one step behind, collecting
every rank's part on its way, and so ends at its owner::

    step           0        1        2        3        4
    rank r holds   r        r-1      r-2      r-3                   (4 ranks)
    sends on       K,V      K,V      K,V
    and            .        .        dK,dV    dK,dV    dK,dV        of the block computed one step before

Half of a rank's own block is computed in step 0, while the first block comes in; in the backward the other half is kept
for the last step, in which the last gradients travel home.

A block stops travelling after the last rank that sees any of it; its gradient then goes to the owner in one message.
"""

from __future__ import annotations

import numpy as np

from mindspeed_cp.layout import Documents, Layout, contiguous, zigzag
from mindspeed_cp.plan.config import AttentionConfig, Topology
from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.plan.records import CONTENT, MESSAGE, RUN, Messages

LAYOUTS = {"zigzag": zigzag, "contiguous": contiguous}


def build_ring(documents: Documents, topology: Topology, attention: AttentionConfig, layout: str = "zigzag") -> Plan:
    """The ring over all ranks, for any number of ranks (odd ones too) and any documents.

    Args:
        documents: the batch.
        topology: where it runs.
        attention: what is computed.
        layout: "zigzag" (balanced under a causal mask) or "contiguous" (balanced under a full mask), per document.
    """
    held = LAYOUTS[layout](documents, topology.ranks)
    n, rows = topology.ranks, held.token_counts
    last = _last_hop(held, attention.mask)  # [block]: hops after which no rank sees the block

    hop, block = np.divmod(np.arange(n * n), n)  # block b is at rank b + hop in step `hop`
    at = (block + hop) % n
    slot = np.where(hop == 0, 0, 1 + (hop - 1) % 2)
    present = (hop <= last[block]) & (rows[block] > 0)

    contents = np.zeros(int(present.sum()), CONTENT)
    contents["step"], contents["rank"], contents["slot"] = hop[present], at[present], slot[present]
    contents["first"], contents["count"] = held.bounds[block[present]], np.diff(held.bounds)[block[present]]
    contents = _sorted(contents)

    capacity = np.zeros((n, 3), np.int64)
    np.maximum.at(capacity, (at[present], slot[present]), rows[block[present]])
    capacity[:, 0] = rows

    travels = present & (hop < last[block])
    fetch = _messages(hop, at, (at + 1) % n, slot, 1 + hop % 2, rows[block], travels)
    home = hop == last[block]
    reduce = _messages(
        hop + 1,
        at,
        np.where(home, block, (at + 1) % n),
        slot,
        np.where(home, 0, 1 + hop % 2),
        rows[block],
        present & (hop > 0),
    )
    forward_steps = int(contents["step"].max()) + 1 if len(contents) else 1
    backward_steps = max(forward_steps, int(reduce.items["done"].max()) + 1 if len(reduce) else 0)
    forward = Program(forward_steps, capacity, held, attention.mask, contents, held.spans, fetch, Messages.none())
    computed = contents, held.spans
    if len(reduce):
        computed = _own_block_in_two_halves(held, attention.mask, contents, backward_steps - 1)
    backward = Program(backward_steps, capacity, held, attention.mask, *computed, fetch, reduce)
    return Plan("ring", attention, topology, held, held, held, forward, backward)


def _own_block_in_two_halves(
    held: Layout, mask: str, contents: np.ndarray, last_step: int
) -> tuple[np.ndarray, np.ndarray]:
    """Contents, and the spans they refer to, in which every rank computes about half of its own block in the last step.

    The last gradients travel home in that step, and would otherwise have no work to hide behind. The own block is cut
    in one place, at the row where its work is halved; the half point lies inside a span when the rank has few of them.
    """
    rows, spans = held.spans["stop"] - held.spans["start"], held.spans
    group = np.flatnonzero(np.append(True, (np.diff(spans["rank"]) != 0) | (np.diff(spans["doc"]) != 0)))
    size = np.diff(np.append(group, len(spans)))  # spans of one rank and document
    own = np.repeat(np.add.reduceat(rows, group), size)  # rows of the rank in the span's document
    before = np.cumsum(rows) - rows
    after = own - (before - np.repeat(before[group], size))  # queries at or after the first key of the span
    work = rows * after - rows * (rows - 1) // 2 if mask == "causal" else rows * own
    done = np.concatenate([[0], np.cumsum(work)])

    cut_spans, cut_tokens, parts = [], [], []
    for rank in range(held.ranks):
        lo, hi = int(held.bounds[rank]), int(held.bounds[rank + 1])
        if lo == hi:
            continue
        half = (int(done[lo]) + int(done[hi])) // 2
        at = min(int(np.searchsorted(done, half, "right")) - 1, hi - 1)
        missing, n = half - int(done[at]), int(rows[at])
        if mask == "causal":  # x keys of the span are seen x * after - x * (x - 1) / 2 times
            row = int(after[at] - np.sqrt(max(0, int(after[at]) ** 2 - 2 * missing)))
        else:
            row = missing // int(own[at])
        row = 0 if row < n // 8 else n if row > n - n // 8 else row
        if 0 < row < n:
            cut_spans.append(at)
            cut_tokens.append(int(spans["start"][at]) + row)
        spans_before = at - lo + (row > 0)
        first = lo + len(cut_spans) - (0 < row < n)
        count = hi - lo + (0 < row < n)
        rows_before = int(before[at] - before[lo]) + row
        parts += [
            (0, rank, 0, 0, first, spans_before),
            (last_step, rank, 0, rows_before, first + spans_before, count - spans_before),
        ]

    table = np.insert(spans, np.array(cut_spans, np.int64) + 1, spans[cut_spans])
    where = np.array(cut_spans, np.int64) + np.arange(len(cut_spans))
    table["stop"][where], table["start"][where + 1] = cut_tokens, cut_tokens
    shifted = contents[contents["slot"] > 0].copy()
    shifted["count"] += np.searchsorted(cut_spans, shifted["first"] + shifted["count"]) - np.searchsorted(
        cut_spans, shifted["first"]
    )
    shifted["first"] += np.searchsorted(cut_spans, shifted["first"])
    halves = np.array(parts, CONTENT)
    return _sorted(np.concatenate([halves[halves["count"] > 0], shifted])), table


def _sorted(contents: np.ndarray) -> np.ndarray:
    return contents[np.lexsort([contents[name] for name in ("row", "slot", "step", "rank")])]


def _messages(
    step: np.ndarray,
    src: np.ndarray,
    dst: np.ndarray,
    src_slot: np.ndarray,
    dst_slot: np.ndarray,
    rows: np.ndarray,
    keep: np.ndarray,
) -> Messages:
    """Whole blocks, each one run from row 0 to row 0, posted and finished in one step."""
    items, runs = np.zeros(int(keep.sum()), MESSAGE), np.zeros(int(keep.sum()), RUN)
    for name, column in zip(
        ("start", "src", "dst", "src_slot", "dst_slot", "rows"), (step, src, dst, src_slot, dst_slot, rows), strict=True
    ):
        items[name] = column[keep]
    items["done"], items["first"], items["count"], runs["rows"] = (
        items["start"],
        np.arange(len(items)),
        1,
        items["rows"],
    )
    order = np.lexsort((items["src"], items["start"]))
    return Messages(items[order], runs)


def _last_hop(layout: Layout, mask: str) -> np.ndarray:
    """For every block the number of hops to the last rank whose queries see any of it, int64 [ranks].

    A causal query sees a block of its document when the block starts before the query's last token. Long documents
    settle nearly every pair, so documents are taken longest first until all pairs are settled.
    """
    n, documents = layout.ranks, layout.documents
    sees = np.eye(n, dtype=bool)  # [rank, block]
    spans = layout.spans
    first = np.full((len(documents), n), documents.tokens)
    final = np.full((len(documents), n), -1)
    np.minimum.at(first, (spans["doc"], spans["rank"]), spans["start"])
    np.maximum.at(final, (spans["doc"], spans["rank"]), spans["stop"])
    for doc in np.argsort(-documents.lengths, kind="stable"):
        if documents.lengths[doc] == 0 or sees.all():
            break
        if mask == "causal":
            sees |= first[doc][None, :] < final[doc][:, None]
        else:
            held = final[doc] >= 0
            sees |= held[None, :] & held[:, None]
    hops = (np.arange(n)[:, None] - np.arange(n)[None, :]) % n
    return np.where(sees, hops, 0).max(axis=0)
