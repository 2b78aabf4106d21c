"""Layout of the linear layers: equal token counts, reached from the attention layout by moving few rows across nodes.

The cost of linear layers is proportional to tokens, so every rank gets the same number of tokens, up to one. In each
node the smaller of total surplus and total deficit stays inside the node and the rest crosses, which is the fewest rows
across nodes. Which ranks of a node send the crossing rows is free: the largest number of rows that one rank sends or
receives across nodes is minimized first, by bisection, and then the number of rows moved. If one rank has the whole
surplus of its node, the others send rows of their own across and get as many from it inside the node, so that all NICs
work at the same time and without relays. Two nodes of four ranks::

    rank        0   1   2   3 | 4   5   6   7
    holds      18   4   4   2 | 8   3   1   0
    wants       5   5   5   5 | 5   5   5   5
    flows      ranks 0 to 3 send 2 rows each across, and rank 0 sends 11 inside its node

Two levels of cost (inside and across nodes) make a greedy choice optimal; the tests compare with linear programs.
"""

from __future__ import annotations

import numpy as np

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout.layout import TOKEN_SPAN, Layout, from_spans
from mindspeed_cp.layout.runs import intersect_runs
from mindspeed_cp.schema.numbers import check_divisor

#: `rows` rows move from rank `src` to rank `dst`.
FLOW = np.dtype([(name, np.int64) for name in ("src", "dst", "rows")])


def equal_token_flows(counts: np.ndarray, ranks_per_node: int) -> np.ndarray:
    """Find the cheapest flows that equalize token counts; deterministic.

    Counts that already differ by at most one stay as they are.

    Args:
        counts: rows of each rank, [ranks].
        ranks_per_node: a divisor of the number of ranks, which are numbered node by node.

    Returns:
        Records of dtype FLOW sorted by (src, dst), at most one for each pair of ranks.

    Raises:
        ConfigError: ranks_per_node does not divide the ranks.
    """
    counts = np.asarray(counts, np.int64)
    check_divisor("ranks_per_node", ranks_per_node, len(counts))
    held = counts.reshape(-1, ranks_per_node)
    targets = _targets(held)
    over, under = np.maximum(held - targets, 0), np.maximum(targets - held, 0)
    surplus = over.sum(1) - under.sum(1)
    leaving, coming = np.maximum(surplus, 0), np.maximum(-surplus, 0)
    bound = max(_smallest_bound(held, leaving), _smallest_bound(targets, coming))
    sent = _fill_below(bound, over, held, leaving)
    received = _fill_below(bound, under, targets, coming)
    inside = held - sent + received - targets
    flows = np.concatenate([_pair_up(np.maximum(inside, 0), np.maximum(-inside, 0)), _pair_up(sent, received)])
    return flows[np.lexsort((flows["dst"], flows["src"]))]


def equal_token_layout(attention_layout: Layout, ranks_per_node: int) -> Layout:
    """Return the layout of the linear layers: equal token counts, up to one, with few rows moved.

    A rank keeps its first rows and gives the others away in runs, in the order of the receivers: each run cuts at most
    one document at either end.

    Args:
        attention_layout: layout with all heads on every rank.
        ranks_per_node: a divisor of the number of ranks.

    Raises:
        ConfigError: the layout splits heads, or ranks_per_node does not divide the ranks.
    """
    if attention_layout.heads is not None:
        raise ConfigError("attention_layout splits heads; valid: the layout of whole tokens (plan.layout)")
    counts = attention_layout.token_counts
    flows = equal_token_flows(counts, ranks_per_node)
    if not len(flows):
        return attention_layout
    ranks = np.arange(len(counts))
    kept = counts - np.bincount(flows["src"], flows["rows"], len(counts)).astype(np.int64)
    src = np.concatenate([ranks, flows["src"]])
    order = np.argsort(src, kind="stable")  # each rank's rows in order: those that it keeps, then those that it gives
    dst, rows = np.concatenate([ranks, flows["dst"]]), np.concatenate([kept, flows["rows"]])
    return _reassigned(attention_layout, len(counts), dst[order], rows[order])


def sequence_parallel_layout(layout: Layout, shares: int, multiple: int) -> Layout:
    """Cut each rank's rows into equal consecutive shares; share i of rank r goes to rank r * shares + i.

    Tensor-parallel ranks hold hidden states like this under sequence parallelism. A rank's rows are padded at the end
    (:func:`padding_rows`) before they are cut; a layout has no padding, so the last shares may be shorter.

    Args:
        layout: layout with all heads on every rank.
        shares: number of tensor-parallel ranks, a divisor of `multiple`.
        multiple: the padded number of rows is a multiple of this.
    """
    counts = layout.token_counts
    size = (counts + padding_rows(counts, multiple)) // shares
    rows = np.clip(counts[:, None] - np.arange(shares) * size[:, None], 0, size[:, None])
    return _reassigned(layout, layout.ranks * shares, np.arange(layout.ranks * shares), rows.reshape(-1))


def padding_rows(rows: np.ndarray, multiple: int) -> np.ndarray:
    """Return the padding that makes rows + padding the next positive multiple of `multiple`: -rows mod multiple, and
    `multiple` where rows is 0."""
    return np.where(rows > 0, -rows % multiple, multiple)


def _reassigned(layout: Layout, ranks: int, dst: np.ndarray, rows: np.ndarray) -> Layout:
    """Reassign all rows, taken rank by rank: the first rows[0] go to rank dst[0] of the new layout, and so on."""
    spans = layout.spans
    size = spans["stop"] - spans["start"]
    ends, span_ends = np.cumsum(rows), np.cumsum(size)
    run, span, first, last = intersect_runs(ends - rows, ends, span_ends - size, span_ends)
    out = np.empty(len(run), TOKEN_SPAN)
    shift = spans["start"][span] - (span_ends - size)[span]
    out["rank"], out["doc"] = dst[run], spans["doc"][span]
    out["start"], out["stop"] = first + shift, last + shift
    return from_spans(layout.documents, ranks, out)


def _targets(held: np.ndarray) -> np.ndarray:
    """Return the target rows of each rank, [nodes, ranks per node]: total // ranks, plus one where that saves most.

    The k-th extra token of a node saves a row across nodes while the node has a surplus, and a moved row while it has
    ranks above their share. Both gains only decrease with k, so taking the best first is optimal.
    """
    nodes, per_node = held.shape
    share, extra = divmod(int(held.sum()), nodes * per_node)
    above = held - share
    k = np.arange(per_node)[:, None]  # index of the extra token; gain is [ranks per node, nodes]
    gain = 2 * (k < above.sum(1)) + (k < (above > 0).sum(1))
    taken = np.argsort(-gain, axis=None, kind="stable")[:extra]
    node_extras = np.bincount(taken % nodes, minlength=nodes)
    # A rank that is one above the share then moves nothing; a rank at the share would have to receive that one row.
    preference = np.select([above == 1, above > 1, above < 0], [0, 1, 2], 3)
    priority = np.argsort(np.argsort(preference, axis=1, kind="stable"), axis=1, kind="stable")
    targets: np.ndarray = share + (priority < node_extras[:, None])
    return targets


def _smallest_bound(limit: np.ndarray, total: np.ndarray) -> int:
    """Return the smallest bound such that every node reaches its `total` [nodes] while each rank takes at most the
    bound and at most its `limit` [nodes, ranks per node]; by bisection."""
    low, high = -1, int(total.max(initial=0))
    while high - low > 1:
        middle = (low + high) // 2
        enough = (np.minimum(limit, middle).sum(1) >= total).all()
        low, high = (low, middle) if enough else (middle, high)
    return high


def _fill_below(bound: int, preferred: np.ndarray, limit: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Take `total` [nodes] with no rank above the bound: from `preferred` as far as possible, then from `limit`, both
    by water filling."""
    out = _water_fill(np.minimum(preferred, bound), total)
    return out + _water_fill(np.minimum(limit, bound) - out, total - out.sum(1))


def _water_fill(rows: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Take `total` [nodes] of `rows` [nodes, ranks per node] as min(rows, level), with one level for each node; take
    all rows of a node that has fewer than its total."""
    total = np.minimum(total, rows.sum(1))
    low, high = np.full_like(total, -1), rows.max(1, initial=0)  # low is too little; high is enough
    while (high - low > 1).any():
        level = (low + high) // 2
        enough = np.minimum(rows, level[:, None]).sum(1) >= total
        low, high = np.where(enough, low, level), np.where(enough, level, high)
    out = np.minimum(rows, high[:, None])
    at_level = (out == high[:, None]) & (out > 0)
    spare = out.sum(1) - total  # less than the number of ranks at the level
    return out - (at_level & (np.cumsum(at_level, 1) <= spare[:, None]))


def _pair_up(given: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """Pair givers and takers in rank order; return records of dtype FLOW, fewer than givers plus takers.

    Both sides have the same total. Where they have the same total in every node, pairs stay inside nodes.
    """
    given, taken = given.reshape(-1), taken.reshape(-1)
    src, dst = np.flatnonzero(given), np.flatnonzero(taken)
    src_end, dst_end = np.cumsum(given[src]), np.cumsum(taken[dst])
    s, d, first, last = intersect_runs(src_end - given[src], src_end, dst_end - taken[dst], dst_end)
    flows = np.empty(len(s), FLOW)
    flows["src"], flows["dst"], flows["rows"] = src[s], dst[d], last - first
    return flows
