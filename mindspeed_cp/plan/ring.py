"""The ring: blocks of keys and values travel one rank per step, through two receive buffers in turn.

Rank r of n, step s: computes against the block of rank (r - s) mod n, sends that block on to r + 1 and receives the
next one from r - 1 at the same time. In the backward the gradient of a block follows it one step behind, collecting
every rank's part on its way, and so ends at its owner::

    step           0        1        2        3        4
    rank r holds   r        r-1      r-2      r-3                   (4 ranks)
    sends on       K,V      K,V      K,V
    and            .        .        dK,dV    dK,dV    dK,dV        of the block computed one step before

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

    contents = np.empty(int(present.sum()), CONTENT)
    contents["step"], contents["rank"], contents["slot"] = hop[present], at[present], slot[present]
    contents["first"], contents["count"] = held.bounds[block[present]], np.diff(held.bounds)[block[present]]
    contents = contents[np.lexsort((contents["slot"], contents["step"], contents["rank"]))]

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
    shared = (held, attention.mask, contents, held.spans, fetch)
    forward = Program(forward_steps, capacity, *shared, Messages.none())
    backward = Program(backward_steps, capacity, *shared, reduce)
    return Plan("ring", attention, topology, held, held, held, forward, backward)


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
