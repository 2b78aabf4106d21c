"""A plan as tables and as JSON values: what ranks hold, send and compute, how even it is, and its modelled time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mindspeed_cp.cluster import ComputeCost, LayerCost, cluster_of, load_cluster
from mindspeed_cp.cluster.compute import balanced_lower_bound
from mindspeed_cp.plan import AttentionConfig, Plan, peak_bytes, traffic
from mindspeed_cp.plan.program import DIRECTIONS
from mindspeed_cp.report.text import (
    Table,
    describe_attention,
    describe_blocks,
    describe_trees,
    format_bytes,
    format_count,
    format_lengths,
)
from mindspeed_cp.simulate.simulator import simulate_plan
from mindspeed_cp.simulate.tile_work import representative_ranks

TABLE_RANK_LIMIT = 64  # a larger table has the extremes
COUNTED_SPANS = 2**22  # key spans up to which the tiles of all ranks are counted


@dataclass(frozen=True, eq=False)
class PlanSummary:
    """Counts of ranks and forward steps of one plan; the steps of a plan of parts are those of `Plan.step_order`.

    Counting derives the tiles of ranks: with a thousand documents, milliseconds for 8 ranks and seconds for 64.

    Attributes:
        plan: any plan.
        bytes_per_element: of q, k, v and out.
    """

    plan: Plan
    bytes_per_element: int = 2

    @cached_property
    def heads(self) -> np.ndarray:
        """First and last-plus-one query head and kv head of each rank, int64 [ranks, 4]; all heads in a plan of parts,
        whose parts have their own."""
        plan, attention = self.plan, self.plan.attention
        if plan.parts:
            return np.tile([0, attention.heads, 0, attention.kv_heads], (plan.ranks, 1))
        bounds = plan.q_layout_compute.head_bounds(attention.heads)
        return np.hstack([bounds, plan.kv_layout_compute.head_bounds(attention.kv_heads)])

    @cached_property
    def work(self) -> np.ndarray:
        """Visible (query, key) pairs times the rank's query heads, fp64 [ranks, steps]; of very large plans those of
        `counted_ranks`, which stand for their neighbours."""
        counted, row = np.unique(self._representative, return_inverse=True)
        return np.stack([self.plan.work_of(rank) for rank in counted.tolist()])[row]

    @cached_property
    def _representative(self) -> np.ndarray:
        return representative_ranks(self.plan, COUNTED_SPANS)

    @property
    def counted_ranks(self) -> int:
        """Number of ranks whose tiles are counted."""
        return len(np.unique(self._representative))

    @cached_property
    def traffic(self) -> np.ndarray:
        """Bytes that each rank sends (`mindspeed_cp.plan.traffic`)."""
        return traffic(self.plan, self.bytes_per_element)

    @cached_property
    def buffers(self) -> np.ndarray:
        """Peak bytes of communication buffers, forward and backward, int64 [ranks, 2]."""
        return np.stack([peak_bytes(self.plan, way, self.bytes_per_element)["total"] for way in DIRECTIONS], 1)

    @cached_property
    def parts(self) -> tuple[PlanSummary, ...]:
        """Summaries of the parts of a plan of parts."""
        return tuple(PlanSummary(part, self.bytes_per_element) for part in self.plan.parts)

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the steps: "3", or "1.3" for step 3 of part 1."""
        return tuple(f"{part}.{step}" if self.parts else str(step) for part, step in self.plan.step_order())

    @property
    def splits_heads(self) -> bool:
        """True if ranks compute different heads in any part."""
        if self.parts:
            return any(part.splits_heads for part in self.parts)
        return bool((self.heads != self.heads[0]).any() or self.heads[0, 1] < self.plan.attention.heads)

    @property
    def sent_forward(self) -> np.ndarray:
        """Bytes that each rank sends in the forward, int64 [ranks]."""
        return self.traffic["fetch_forward"] + self.traffic["redistribution_forward"]

    @property
    def sent_backward(self) -> np.ndarray:
        """Bytes that each rank sends in the backward, int64 [ranks]."""
        return self.traffic["fetch_backward"] + self.traffic["reduce"] + self.traffic["redistribution_backward"]

    @property
    def imbalance(self) -> float:
        """Attention work of the slowest rank over the mean; 1 is even, also for no work."""
        return _over_mean(self.work.sum(1))

    @property
    def token_imbalance(self) -> float:
        """Tokens of the fullest rank over the mean: the imbalance of everything but attention."""
        return _over_mean(self.plan.layout.token_counts)

    @property
    def step_imbalance(self) -> float:
        """Imbalance if all ranks wait for the slowest after each step: sum of the largest work of each step over the
        mean."""
        mean = self.work.sum() / self.plan.ranks
        return float(self.work.max(0).sum() / mean) if mean else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Return all counts as numbers and lists, for JSON."""
        plan = self.plan
        counts = {
            "tokens": plan.layout.token_counts,
            "documents": _documents_of_ranks(plan),
            "spans": np.diff(plan.layout.span_offsets),
            "bytes_sent_forward": self.sent_forward,
            "bytes_sent_backward": self.sent_backward,
            "peak_buffer_bytes_forward": self.buffers[:, 0],
            "peak_buffer_bytes_backward": self.buffers[:, 1],
        }
        per_rank = [
            {
                "rank": rank,
                "heads": self.heads[rank, :2].tolist(),
                "kv_heads": self.heads[rank, 2:].tolist(),
                "work": list(map(int, self.work[rank])),
                "bytes_sent": {name: int(self.traffic[name][rank]) for name in self.traffic.dtype.names or ()},
                **{name: int(values[rank]) for name, values in counts.items()},
            }
            for rank in range(plan.ranks)
        ]
        parts = {"step_labels": list(self.labels), "parts": [part.as_dict() for part in self.parts]}
        return {
            "algorithm": plan.algorithm,
            "documents": len(plan.documents),
            "tokens": plan.documents.tokens,
            "kv_tokens": plan.kv_documents.tokens,
            "nodes": plan.topology.nodes,
            "ranks": plan.ranks,
            "steps": len(self.labels),
            "imbalance": self.imbalance,
            "step_imbalance": self.step_imbalance,
            "token_imbalance": self.token_imbalance,
            "ranks_counted": self.counted_ranks,
            "bytes_per_element": self.bytes_per_element,
            "bytes_sent_forward": int(self.sent_forward.sum()),
            "bytes_sent_backward": int(self.sent_backward.sum()),
            "per_rank": per_rank,
            **(parts if self.parts else {}),
        }


def _documents_of_ranks(plan: Plan) -> np.ndarray:
    """Return the number of documents of which each rank holds at least one token."""
    return np.array([len(np.unique(plan.layout.rank_spans(rank)["doc"])) for rank in range(plan.ranks)], np.int64)


def _over_mean(values: np.ndarray) -> float:
    return float(values.max() / values.mean()) if values.any() else 1.0


def modelled_time(plan: Plan, attention: AttentionConfig, layer: LayerCost, left_out: str = "") -> dict[str, Any]:
    """Simulate a plan on the cluster of its topology: one layer, forward and backward, linear layers too.

    Args:
        plan: any plan.
        attention: attention for which it was built.
        layer: linear part of the layer.
        left_out: why it is not simulated, and the cluster is only named; empty: simulate it.

    Returns:
        JSON values: {"cluster": its name, "modelled": {"cluster_remark": how it differs from a named one, "seconds":
        until the last rank is done, "bound": seconds that no plan of the batch can beat, "fraction_of_bound",
        "left_out"}}; None: does not apply.
    """
    topology, cluster, remark = plan.topology, cluster_of(plan.topology), None
    if topology.cluster is None:
        remark = "no cluster is named"
        if topology.ranks_per_node > load_cluster(cluster.name).ranks_per_node:
            remark += f"; nodes of {topology.ranks_per_node} ranks are imagined"
    if not left_out and not plan.documents.tokens:
        left_out = "the batch has no tokens"
    seconds = bound = fraction = None
    if not left_out:
        seconds = simulate_plan(plan, cluster, layer).total
        cost = ComputeCost(cluster, attention, layer)
        bound = balanced_lower_bound(plan.documents, plan.ranks, cost, plan.kv_documents)
        fraction = bound / seconds
    modelled = {"cluster_remark": remark, "seconds": seconds, "bound": bound, "fraction_of_bound": fraction}
    return {"cluster": cluster.name, "modelled": {**modelled, "left_out": left_out or None}}


def modelled_rows(time: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of :func:`modelled_time` in the table of a plan."""
    modelled = time["modelled"]
    rows = [("cluster", time["cluster"] + (f" ({modelled['cluster_remark']})" if modelled["cluster_remark"] else ""))]
    if modelled["seconds"] is None:
        return [*rows, ("a layer, modelled", f"left out: {modelled['left_out']}")]
    digits = 2 if modelled["bound"] >= 1e-3 else 4
    whole, bound = (f"{modelled[name] * 1e3:,.{digits}f} ms" for name in ("seconds", "bound"))
    return [
        *rows,
        ("a layer, modelled", f"{whole}, forward and backward, linear layers too"),
        ("... lower bound", f"{bound}, {100 * modelled['fraction_of_bound']:.1f} % of it"),
    ]


def plan_tables(summary: PlanSummary, more: Sequence[tuple[str, str]] = ()) -> list[Table]:
    """Return the tables of `mindspeed-cp plan`: the plan and `more` rows, its parts, and what ranks hold and
    send."""
    return [
        _plan_table(summary, more),
        *([_part_table(summary)] if summary.parts else []),
        _rank_table(summary),
    ]


def describe_heads(summary: PlanSummary, rank: int) -> str:
    """Return the heads of a rank: "0-1 (kv 0)", or "none"."""
    first, last, kv_first, kv_last = summary.heads[rank].tolist()
    heads, kv_heads = (str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in ((first, last), (kv_first, kv_last)))
    return "none" if last == first else f"{heads} (kv {kv_heads})"


def _plan_table(summary: PlanSummary, more: Sequence[tuple[str, str]]) -> Table:
    plan, sent = summary.plan, summary.traffic
    attention, topology = plan.attention, plan.topology
    lengths, kv_lengths = plan.documents.lengths, plan.kv_documents.lengths
    width = f"{attention.head_dim}" + (f"/{attention.head_dim_v}" * (attention.head_dim != attention.head_dim_v))
    element = "bf16" if summary.bytes_per_element == 2 else "fp32"
    backward = sent["fetch_backward"].sum() + sent["reduce"].sum()
    rows = [
        ("algorithm", plan.algorithm),
        ("ranks", f"{plan.ranks}" + (f" ({topology.nodes} nodes)" if topology.nodes > 1 else "")),
        ("steps", str(len(summary.labels))),
        ("documents", format_lengths(lengths)),
        ("tokens", format_count(lengths.sum())),
        ("attention", describe_attention(attention)),
        ("heads", f"{attention.heads}, key/value heads {attention.kv_heads}, of width {width}, {element}"),
        ("attention work", f"{format_count(summary.work.sum())} (query, key) pairs, all heads counted"),
        (
            "sent in the forward",
            _traffic_text(sent["fetch_forward"].sum(), "K/V", sent["redistribution_forward"].sum()),
        ),
        ("sent in the backward", _traffic_text(backward, "K/V, dK and dV", sent["redistribution_backward"].sum())),
        ("imbalance of attention", f"{summary.imbalance:.3f} (slowest rank / mean)"),
        ("... if ranks wait at every step", f"{summary.step_imbalance:.3f}"),
        ("imbalance of tokens", f"{summary.token_imbalance:.3f}"),
        *more,
    ]
    if kv_lengths is not lengths:
        rows.insert(5, ("keys of the documents", format_lengths(kv_lengths)))
    if plan.documents.trees is not None:
        rows.insert(5, ("trees", describe_trees(plan.documents)))
    if plan.documents.blocks is not None:
        rows.insert(5, ("blocks", describe_blocks(plan.documents)))
    return Table("Plan", ("", ""), tuple(rows))


def _traffic_text(between_steps: int, content: str, by_redistribution: int) -> str:
    """Return the bytes that all ranks send, between steps and by redistributions."""
    parts = [(between_steps, f"of {content}"), (by_redistribution, "by all-to-all")]
    texts = [f"{format_bytes(number)} {how}" for number, how in parts if number]
    return (
        f"{format_bytes(between_steps + by_redistribution)}: {', '.join(texts)}"
        if len(texts) == 2
        else (texts or ["nothing"])[0]
    )


def _part_table(summary: PlanSummary) -> Table:
    """Return each part's share of the documents and of the work."""
    columns = ("part", "by", "documents", "tokens", "steps", "heads", "sent forward", "sent backward", "work", "of all")
    everything = summary.work.sum()
    rows = [
        (
            str(number),
            part.plan.algorithm,
            f"{int((part.plan.documents.lengths > 0).sum()):,}",
            format_count(part.plan.documents.tokens),
            str(len(part.labels)),
            "split" if part.splits_heads else "all",
            format_bytes(part.sent_forward.sum()),
            format_bytes(part.sent_backward.sum()),
            format_count(part.work.sum()),
            f"{100 * part.work.sum() / everything:.0f} %" if everything else "-",
        )
        for number, part in enumerate(summary.parts)
    ]
    return Table("Parts (steps are named part.step below)", columns, tuple(rows))


def _rank_table(summary: PlanSummary) -> Table:
    split = summary.splits_heads and not summary.parts
    columns = (
        *("rank", *["heads"] * split, "tokens", "documents", "spans"),
        *("sent forward", "sent backward", "buffers forward", "buffers backward", "work", "of mean"),
    )
    work = summary.work.sum(1)
    mean = work.mean()
    ranks, omitted = list(range(len(work))), ""
    if len(work) > TABLE_RANK_LIMIT:
        order = np.argsort(work, kind="stable")
        ranks = sorted(np.concatenate([order[:4], order[-4:]]).tolist())
        omitted = f" (the 4 with the least and the 4 with the most work of {len(work)})"
    counts = (
        summary.plan.layout.token_counts,
        _documents_of_ranks(summary.plan),
        np.diff(summary.plan.layout.span_offsets),
    )
    rows = [
        (
            str(rank),
            *[describe_heads(summary, rank)] * split,
            *(f"{int(part[rank]):,}" for part in counts),
            *(format_bytes(part[rank]) for part in (summary.sent_forward, summary.sent_backward, *summary.buffers.T)),
            format_count(work[rank]),
            f"{work[rank] / mean:.3f}" if mean else "-",
        )
        for rank in ranks
    ]
    title = f"Ranks, bytes of {summary.bytes_per_element}-byte elements"
    return Table(title + omitted, columns, tuple(rows))
