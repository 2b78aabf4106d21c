"""Remap: attention runs where its work is balanced, linear layers where tokens are.  The move between the two.

Linear layers cost by the token, so their layout gives every rank the same number of tokens, up to one. It is made from
the attention's layout by moving rows, as few across nodes as can be. With two levels of cost no linear program is
needed: greedy is optimal (the tests compare with one). Of a node's surpluses and deficits the smaller sum stays inside
the node, and the rest crosses. Two nodes of four ranks::

    rank        0   1   2   3 | 4   5   6   7
    holds      18   4   4   2 | 8   3   1   0
    wants       5   5   5   5 | 5   5   5   5
    "sum"       rank 0 sends 8 rows across and 5 inside: 16 rows move in all
    "minmax"    ranks 0 to 3 send 2 rows each across, and rank 0 sends 11 inside: 24 rows move

Who of a node sends the rows that cross is free. "sum" moves the fewest rows: those above a rank's share, once each.
"minmax" makes the largest number of rows that one rank sends, or receives, across nodes as small as can be, found by
bisection, and then moves the fewest rows: where one rank has the surplus of its node, the others send rows of their own
across and get as many from it inside the node, so that every NIC has its share, at the same time and without a relay.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout.build import from_spans
from mindspeed_cp.layout.layout import SPAN, Layout, is_whole
from mindspeed_cp.layout.runs import overlaps

OBJECTIVES = ("sum", "minmax")

#: `rows` rows go from rank `src` to rank `dst`.
FLOW = np.dtype([(name, np.int64) for name in ("src", "dst", "rows")])


@dataclass(frozen=True, eq=False)
class Flows:
    """How many rows each rank gives to each other.

    Attributes:
        ranks_per_node: ranks are numbered node by node.
        counts: rows of each rank before, int64 [ranks].
        targets: rows of each rank after, int64 [ranks].
        flows: records of dtype FLOW sorted by (src, dst), one at most for each pair of ranks.
    """

    ranks_per_node: int
    counts: np.ndarray
    targets: np.ndarray
    flows: np.ndarray

    @cached_property
    def crosses(self) -> np.ndarray:
        """True for each flow between two nodes."""
        return self.flows["src"] // self.ranks_per_node != self.flows["dst"] // self.ranks_per_node

    def rows(self, side: str, across: bool) -> np.ndarray:
        """Rows that each rank sends (`side` "src") or receives ("dst"), across or inside nodes, int64 [ranks]."""
        mine = self.flows[self.crosses == across]
        return np.bincount(mine[side], weights=mine["rows"], minlength=len(self.counts)).astype(np.int64)


def equal_token_flows(counts: np.ndarray, ranks_per_node: int, objective: str = "sum") -> Flows:
    """The cheapest way to equal token counts.  O(ranks log ranks); pure and deterministic.

    Counts that are equal up to one token already stay as they are. Both objectives move the fewest rows across nodes.
    "sum" is optimal for any price of a row across nodes that is at least twice that of a row inside; below that, it may
    cost up to `ranks` rows more than the optimum, since which ranks get the odd token is decided by rows across first.

    Args:
        counts: rows of each rank, [ranks].
        ranks_per_node: a divisor of the number of ranks.
        objective: "sum", the fewest rows in all, or "minmax", the fewest across nodes for the rank with most.

    Raises:
        ConfigError: the objective is unknown or ranks do not fill nodes.
    """
    counts = np.asarray(counts, np.int64)
    _check(len(counts), ranks_per_node, objective)
    held = counts.reshape(-1, ranks_per_node)
    targets = _targets(held)
    over, under = np.maximum(held - targets, 0), np.maximum(targets - held, 0)
    surplus = over.sum(1) - under.sum(1)
    leaving, coming = np.maximum(surplus, 0), np.maximum(-surplus, 0)
    if objective == "sum":
        sent, received = _from_largest(over, leaving), _from_largest(under, coming)
    else:
        bound = max(_bound(held, leaving), _bound(targets, coming))
        sent, received = _under(bound, over, held, leaving), _under(bound, under, targets, coming)
    left = held - sent + received - targets
    flows = np.concatenate([_matched(np.maximum(left, 0), np.maximum(-left, 0)), _matched(sent, received)])
    order = np.lexsort((flows["dst"], flows["src"]))
    return Flows(ranks_per_node, counts, targets.reshape(-1), flows[order])


def equal_token_layout(attention_layout: Layout, ranks_per_node: int, objective: str = "sum") -> Layout:
    """The layout of the linear layers: token counts equal up to one, every rank keeps as many of its rows as it can.

    A rank gives away the tail of its rows, in runs: every receiver's run cuts one document at most at either end.

    Args:
        attention_layout: all heads on every rank.
        ranks_per_node, objective: as for :func:`equal_token_flows`.

    Raises:
        ConfigError: the layout splits heads, the objective is unknown or ranks do not fill nodes.
    """
    if attention_layout.heads is not None:
        raise ConfigError("attention_layout splits heads; valid: the layout of whole tokens (plan.layout)")
    found = equal_token_flows(attention_layout.token_counts, ranks_per_node, objective)
    if not len(found.flows):
        return attention_layout
    return moved(attention_layout, found)


def moved(layout: Layout, flows: Flows) -> Layout:
    """The layout after the flows: each rank keeps its first rows and gives the others away in the order of `dst`."""
    ranks = np.arange(layout.ranks)
    kept = flows.counts - np.bincount(flows.flows["src"], flows.flows["rows"], layout.ranks).astype(np.int64)
    src = np.concatenate([ranks, flows.flows["src"]])
    order = np.argsort(src, kind="stable")  # what a rank keeps, then what it gives: its rows in order
    dst, rows = np.concatenate([ranks, flows.flows["dst"]]), np.concatenate([kept, flows.flows["rows"]])
    return _dealt(layout, layout.ranks, dst[order], rows[order])


def in_shares(layout: Layout, shares: int, multiple: int) -> Layout:
    """Every rank's rows in equal shares, one after the other: rank r's i-th share is what rank r * shares + i holds.

    It is what tensor-parallel ranks hold of hidden states under sequence parallelism. A rank's rows are padded at their
    end (:func:`padding_rows`) before they are cut; rows of padding are in no layout, so the last shares may be shorter.

    Args:
        layout: all heads on every rank.
        shares: a divisor of `multiple`.
        multiple: what padded rows are a multiple of.
    """
    counts = layout.token_counts
    size = (counts + padding_rows(counts, multiple)) // shares
    rows = np.clip(counts[:, None] - np.arange(shares) * size[:, None], 0, size[:, None])
    return _dealt(layout, layout.ranks * shares, np.arange(layout.ranks * shares), rows.reshape(-1))


def padding_rows(rows: np.ndarray, multiple: int) -> np.ndarray:
    """Rows to add to so many so that they are a multiple of a number, and not none."""
    return np.where(rows > 0, -rows % multiple, multiple)


def _dealt(layout: Layout, ranks: int, to: np.ndarray, rows: np.ndarray) -> Layout:
    """All rows, rank by rank, dealt out: the first rows[0] to rank to[0] of the new layout, and so on."""
    s = layout.spans
    size = s["stop"] - s["start"]
    ends, span_ends = np.cumsum(rows), np.cumsum(size)
    piece, span, first, last = overlaps(ends - rows, ends, span_ends - size, span_ends)
    out = np.empty(len(piece), SPAN)
    shift = s["start"][span] - (span_ends - size)[span]
    out["rank"], out["doc"] = to[piece], s["doc"][span]
    out["start"], out["stop"] = first + shift, last + shift
    return from_spans(layout.documents, ranks, out)


def _check(ranks: int, ranks_per_node: int, objective: str) -> None:
    if objective not in OBJECTIVES:
        raise ConfigError(f"objective is {objective!r}; valid: {', '.join(OBJECTIVES)}")
    if not is_whole(ranks_per_node) or ranks_per_node < 1 or ranks % ranks_per_node:
        raise ConfigError(f"ranks_per_node is {ranks_per_node!r}; valid: a divisor of the {ranks} ranks")


def _targets(held: np.ndarray) -> np.ndarray:
    """Tokens of each rank afterwards, [nodes, ranks per node]: total // ranks, and one more where it saves most.

    A node's k-th extra token saves a row across while the node has a surplus, and a row at all while it has ranks above
    their share. Both gains only fall with k, so taking the best first is optimal.
    """
    nodes, per = held.shape
    share, extra = divmod(int(held.sum()), nodes * per)
    above = held - share
    k = np.arange(per)[:, None]  # of the extra token, [ranks per node, nodes] below
    gain = 2 * (k < above.sum(1)) + (k < (above > 0).sum(1))
    best = np.argsort(-gain, axis=None, kind="stable")[:extra]
    extras = np.bincount(best % nodes, minlength=nodes)
    # Ranks one above the share then move nothing; ranks at the share would have to receive that one row.
    rank = np.select([above == 1, above > 1, above < 0], [0, 1, 2], 3)
    turn = np.argsort(np.argsort(rank, axis=1, kind="stable"), axis=1, kind="stable")
    found: np.ndarray = share + (turn < extras[:, None])
    return found


def _from_largest(rows: np.ndarray, total: np.ndarray) -> np.ndarray:
    """`total` [nodes] of the `rows` [nodes, ranks per node], from the ranks that have most."""
    order = np.argsort(-rows, axis=1, kind="stable")
    ranked = np.take_along_axis(rows, order, 1)
    before = np.cumsum(ranked, 1) - ranked
    out = np.empty_like(rows)
    np.put_along_axis(out, order, np.clip(total[:, None] - before, 0, ranked), 1)
    return out


def _bound(most: np.ndarray, total: np.ndarray) -> int:
    """The smallest number of rows such that every node can do its `total` [nodes] with no rank doing more, nor more
    than its `most` [nodes, ranks per node]: by bisection."""
    low, high = -1, int(total.max(initial=0))
    while high - low > 1:
        middle = (low + high) // 2
        enough = (np.minimum(most, middle).sum(1) >= total).all()
        low, high = (low, middle) if enough else (middle, high)
    return high


def _under(bound: int, first: np.ndarray, most: np.ndarray, total: np.ndarray) -> np.ndarray:
    """`total` [nodes] with no rank above the bound: as much as can be of `first`, the rest of `most`, both evenly."""
    out = _level(np.minimum(first, bound), total)
    return out + _level(np.minimum(most, bound) - out, total - out.sum(1))


def _level(rows: np.ndarray, total: np.ndarray) -> np.ndarray:
    """`total` [nodes] of the `rows` [nodes, ranks per node], or all of them where they are fewer: equal parts as far as
    they reach, so that nobody's part could be smaller without a larger one elsewhere."""
    total = np.minimum(total, rows.sum(1))
    low, high = np.full_like(total, -1), rows.max(1, initial=0)  # low is too little; high is enough
    while (high - low > 1).any():
        level = (low + high) // 2
        enough = np.minimum(rows, level[:, None]).sum(1) >= total
        low, high = np.where(enough, low, level), np.where(enough, level, high)
    out = np.minimum(rows, high[:, None])
    at_level = (out == high[:, None]) & (out > 0)
    spare = out.sum(1) - total  # fewer than there are ranks at the level
    return out - (at_level & (np.cumsum(at_level, 1) <= spare[:, None]))


def _matched(given: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """Givers and takers paired in the order of ranks, records of dtype FLOW; both sides have the same total, and where
    every node has, pairs stay inside nodes. Fewer flows than givers and takers."""
    give, take = given.reshape(-1), taken.reshape(-1)
    src, dst = np.flatnonzero(give), np.flatnonzero(take)
    ends, other = np.cumsum(give[src]), np.cumsum(take[dst])
    i, j, first, last = overlaps(ends - give[src], ends, other - take[dst], other)
    out = np.empty(len(i), FLOW)
    out["src"], out["dst"], out["rows"] = src[i], dst[j], last - first
    return out
