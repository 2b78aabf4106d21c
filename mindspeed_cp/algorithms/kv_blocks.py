"""Blocks of keys and values that travel from rank to rank in a ring: which part of each travels, and to which ranks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mindspeed_cp.algorithms.kv_fetch.needs import NeededTokens, needed_tokens
from mindspeed_cp.layout import Layout, intersect_runs, join_runs, union_of_runs
from mindspeed_cp.plan.problem import AttentionConfig
from mindspeed_cp.plan.records import CONTENT, MESSAGE, ROW_RUN, Messages

#: A block is trimmed if that removes at least this share of its rows. The owner gathers the rows of a trimmed block
#: from several runs before it sends them, which costs more than sending a few unneeded rows.
MIN_TRIM_SHARE = 1 / 8


@dataclass(frozen=True, eq=False)
class KvBlocks:
    """The KV block of every rank: the keys and values that the rank owns.

    Attributes:
        kv_layout: layout of keys and values.
        spans: table of token spans; begins with the spans of `kv_layout`.
        first_span, span_count: spans of each travelling block in the table, int64 [ranks].
        rows: rows of each travelling block, int64 [ranks].
        gather_runs: for each trimmed block, the runs of its rows in the owner's slot 0 (src_row) and in the travelling
            block (dst_row).
    """

    kv_layout: Layout
    spans: np.ndarray
    first_span: np.ndarray
    span_count: np.ndarray
    rows: np.ndarray
    gather_runs: dict[int, np.ndarray]

    @staticmethod
    def trimmed(q_layout: Layout, kv_layout: Layout, attention: AttentionConfig) -> KvBlocks:
        """Return the blocks without the rows that no other rank sees; a block that no other rank sees has no rows."""
        spans, offsets = kv_layout.spans, kv_layout.span_offsets
        kept_spans, source = spans_seen_elsewhere(q_layout, kv_layout, attention)
        length = kept_spans["stop"] - kept_spans["start"]
        owner = spans["rank"][source]
        rows, kept_rows = kv_layout.token_counts.copy(), np.zeros(kv_layout.ranks, np.int64)
        np.add.at(kept_rows, owner, length)
        first_span, span_count = offsets[:-1].copy(), np.diff(offsets)
        tables, size, gather_runs = [spans], len(spans), {}
        slot_row = kv_layout.span_first_rows[source] + kept_spans["start"] - spans["start"][source]
        for block in np.flatnonzero((rows - kept_rows >= MIN_TRIM_SHARE * rows) & (rows > kept_rows)).tolist():
            kept = np.flatnonzero(owner == block)
            first_span[block], span_count[block], rows[block] = size, len(kept), kept_rows[block]
            tables.append(kept_spans[kept])
            size += len(kept)
            runs = np.zeros(len(kept), ROW_RUN)
            runs["src_row"], runs["rows"] = slot_row[kept], length[kept]
            runs["dst_row"] = np.cumsum(length[kept]) - length[kept]
            gather_runs[block] = join_runs(runs, ("src_row", "dst_row"))[0]
        return KvBlocks(kv_layout, np.concatenate(tables), first_span, span_count, rows, gather_runs)

    def contents(self, step: np.ndarray, rank: np.ndarray, slot: np.ndarray, block: np.ndarray) -> np.ndarray:
        """Return unsorted CONTENT records: in `step`, `rank` computes with the block in `slot`. Slot 0 is the rank's
        whole local block. Blocks without rows are left out."""
        local = slot == 0
        out = np.zeros(len(step), CONTENT)
        out["step"], out["rank"], out["slot"] = step, rank, slot
        out["first"] = np.where(local, self.kv_layout.span_offsets[block], self.first_span[block])
        out["count"] = np.where(local, np.diff(self.kv_layout.span_offsets)[block], self.span_count[block])
        return out[out["count"] > 0]

    def messages(self, records: np.ndarray, block: np.ndarray) -> Messages:
        """Return messages that each carry one travelling block. A message has one run, except where a trimmed block
        leaves slot 0 of its owner or its gradient returns there.

        Args:
            records: from :func:`message_records`; those of blocks without rows are left out.
            block: block of each record.
        """
        keep = self.rows[block] > 0
        items, block = records[keep], block[keep]
        runs = np.zeros(len(items), ROW_RUN)
        items["rows"] = runs["rows"] = self.rows[block]
        items["first"], items["count"] = np.arange(len(items)), 1
        total, run_lists = len(runs), [runs]
        at_owner = (items["src_slot"] == 0) | (items["dst_slot"] == 0)
        for index in np.flatnonzero(at_owner & np.isin(block, list(self.gather_runs))).tolist():
            runs = self.gather_runs[int(block[index])]
            if items["src_slot"][index]:  # a gradient returns: the same runs in the opposite direction
                runs = runs.copy()
                runs["src_row"], runs["dst_row"] = runs["dst_row"].copy(), runs["src_row"].copy()
            items["first"][index], items["count"][index] = total, len(runs)
            run_lists.append(runs)
            total += len(runs)
        order = np.lexsort((items["src"], items["start"]))
        return Messages(items[order], np.concatenate(run_lists))


def message_records(
    start: np.ndarray, done: np.ndarray, src: np.ndarray, dst: np.ndarray, src_slot: np.ndarray, dst_slot: np.ndarray
) -> np.ndarray:
    """Return MESSAGE records without rows, for :meth:`KvBlocks.messages`."""
    out = np.zeros(len(start), MESSAGE)
    out["start"], out["done"], out["src"], out["dst"] = start, done, src, dst
    out["src_slot"], out["dst_slot"] = src_slot, dst_slot
    return out


def visible_blocks(q_layout: Layout, kv_layout: Layout, attention: AttentionConfig) -> np.ndarray:
    """Return whether any query of a rank sees any key of a block, bool [rank, block].

    The longest document is tried first and alone: if it is on all ranks, it often decides every pair.
    """
    out = np.zeros((q_layout.ranks, kv_layout.ranks), bool)
    if not len(kv_layout.spans):
        return out
    spans = kv_layout.spans[np.argsort(kv_layout.spans["start"], kind="stable")]
    longest = spans[spans["doc"] == int(np.argmax(kv_layout.documents.lengths))]
    needs = needed_tokens(q_layout, kv_layout, attention)
    bounds = np.searchsorted(needs.taker, np.arange(kv_layout.ranks + 1)).tolist()
    for candidates in (longest, spans):
        for rank, (begin, end) in enumerate(pairwise(bounds)):
            runs_begun = np.searchsorted(needs.first[begin:end], candidates["stop"], "left")
            runs_ended = np.searchsorted(needs.last[begin:end], candidates["start"], "right")
            out[rank, candidates["rank"][runs_begun > runs_ended]] = True
        if out.all():
            break
    return out


def spans_seen_elsewhere(
    q_layout: Layout, kv_layout: Layout, attention: AttentionConfig
) -> tuple[np.ndarray, np.ndarray]:
    """Return the part of every block that the queries of some other rank see: what two ranks see, or one sees and
    another owns.

    Returns:
        Token spans (records of dtype TOKEN_SPAN, in the order of the layout's spans), and for each the index of the
        layout's span that contains it.
    """
    needs, spans, tokens = needed_tokens(q_layout, kv_layout, attention), kv_layout.spans, kv_layout.documents.tokens
    rank = np.concatenate([needs.taker, spans["rank"]])
    first, last = np.concatenate([needs.first, spans["start"]]), np.concatenate([needs.last, spans["stop"]])
    runs = NeededTokens.union(rank, first, last, tokens)  # seen or owned by each rank
    edges = np.concatenate([runs.first, runs.last])
    order = np.argsort(edges, kind="stable")
    edges, depth = edges[order], np.cumsum(np.repeat([1, -1], len(runs.first))[order])
    inside = np.flatnonzero((depth[:-1] >= 2) & (edges[1:] > edges[:-1]))
    seen = union_of_runs(np.stack([edges[inside], edges[inside + 1]], 1))
    index, _, start, stop = intersect_runs(spans["start"], spans["stop"], seen[:, 0], seen[:, 1])
    out = spans[index]
    out["start"], out["stop"] = start, stop
    return out, index
