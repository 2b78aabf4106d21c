"""What stands beside the tables: assumptions, and what papers report."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.data import real_lengths_folder
from benchmarks.published.bases import TOKENS
from benchmarks.published.reported import REPORTED, for_cluster
from benchmarks.published.systems import BASE
from benchmarks.published.table import Row
from mindspeed_cp.cluster import load_cluster


def assumptions(clusters: Sequence[str], lengths: Sequence[str], bf16: bool, placements: int | None) -> list[str]:
    """Return the text that stands beside the tables."""
    out = [
        "All times are modelled: one layer of 32 heads of 128 channels (gqa8: 8 key/value heads), hidden size 4,096, a",
        f"gated FFN 8/3 as wide, causal, bf16, forward and backward, {TOKENS:,} tokens a rank, no tensor parallelism.",
        "Gradients of keys and values travel in " + ("bf16 in all systems but ours." if bf16 else "fp32."),
        "Ours: the one plan of `algorithm: hierarchical` by the preset, "
        + ("without options;" if placements is None else f"with simulated_placements {placements};"),
        "others: the fastest of their ways in each batch.",
    ]
    for name in clusters:
        c = load_cluster(name)
        out.append(
            f"{name}: {c.ranks_per_node} ranks a node, {c.peak_flops / 1e12:.0f} TFLOP/s, of which attention reaches "
            f"{c.attention_efficiency:g} (tiles of n rows n / (n + {c.tile_rows:g}) of that) and linear layers "
            f"{c.linear_efficiency:g}; {c.fabric}, {c.rank_bandwidth / 1e9:g} GB/s a rank, {c.pair_bandwidth / 1e9:g} "
            f"a pair, {c.nics_per_node} NICs of {c.nic_bandwidth / 1e9:g} GB/s a node, transfers reach "
            f"{c.communication_efficiency:g}; {1e6 * c.launch:g} us a call"
        )
        figures = [
            f"{reported.system} {reported.figure} over {reported.over} ({reported.where}; {reported.source})"
            for reported in for_cluster(name)
        ]
        out += [f"  [reported] {text}" for text in figures] or ["  [reported] nothing for this cluster"]
    for reported in REPORTED:
        if not reported.presets:
            out.append(
                f"[reported] elsewhere: {reported.system} {reported.figure} over {reported.over} ({reported.source})"
            )
    for name in lengths:
        out.append(f"{name}: {'real lengths' if real_lengths_folder(name) else 'bins of configs/lengths'}")
    out.append(f"speeds are those over the {BASE}; '-': the system cannot run it (fewer heads than ranks)")
    return out


def beside_reported(rows: Sequence[Row]) -> list[str]:
    """Return the modelled speeds of systems of the tables beside reported ones, a line for each system and cluster."""
    out = []
    known = dict.fromkeys(
        (reported.column, cluster) for reported in REPORTED if reported.column for cluster in reported.presets
    )
    for column, cluster in known:
        by_row = [row.speed(column) for row in rows if row.cluster == cluster]
        speeds = np.concatenate([np.zeros(0), *(speed for speed in by_row if speed is not None)])
        if len(speeds):
            figures = "; ".join(
                f"{reported.figure} over {reported.over}" for reported in REPORTED if reported.column == column
            )
            out.append(
                f"{column} on {cluster}: modelled {speeds.mean():.2f}x the {BASE} on average, up to "
                f"{speeds.max():.2f}x; [reported] {figures}"
            )
    return out
