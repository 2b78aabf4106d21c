"""The documents of a simulated layer: who computes the tiles of the longest one, and how far all are spread."""

from __future__ import annotations

import colorsys
from typing import TYPE_CHECKING, Any

from mindspeed_cp.cost.timeline import Timeline
from mindspeed_cp.plan import Topology
from mindspeed_cp.report.areas import clipped
from mindspeed_cp.report.shares import shares, spread
from mindspeed_cp.report.sheet import COLOURS, Sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Tiles of documents in more runs than this have no lines between them, which would cover them.
MOST_LINED = 160


def rank_colour(rank: int, topology: Topology) -> tuple[float, float, float]:
    """A hue for each node and a lightness for each of its ranks; in one node a hue for each rank."""
    local, per = rank % topology.ranks_per_node, topology.ranks_per_node
    if topology.nodes == 1:
        return colorsys.hls_to_rgb(local / per, (0.42, 0.56)[local % 2], 0.58)
    hue = (205 / 360 + rank // per / topology.nodes) % 1
    return colorsys.hls_to_rgb(hue, 0.34 + 0.4 * local / max(per - 1, 1), 0.58)


def draw_tiles(page: Sheet, axes: Axes, timeline: Timeline, left: float, begin: float) -> None:
    """The longest document's part of the attention matrix, by the ranks that compute it."""
    from matplotlib.patches import Polygon, Rectangle

    plan, topology = timeline.plan, timeline.plan.topology
    share, tokens = shares(plan, 1)[0], plan.documents.tokens
    length = int(plan.documents.lengths[share.doc])
    reach_left, reach_right = plan.attention.reach
    seen = clipped((0, 0, length, length), -reach_left - 0.5, reach_right + 0.5)
    outline = Polygon(seen, closed=True, transform=axes.transData, facecolor="none")
    axes.set(xlim=(0, length), ylim=(length, 0))
    axes.set_axis_off()
    axes.add_patch(outline)
    row, line = 0, 0.4 if len(share.queries) <= MOST_LINED else 0.0
    for ranks, rows in share.queries:
        nodes = {rank // topology.ranks_per_node for rank in ranks}
        middle = ranks[0] - ranks[0] % topology.ranks_per_node + topology.ranks_per_node // 2
        colour: Any = rank_colour(ranks[0] if len(ranks) == 1 else middle, topology)
        if len(ranks) > 1 and (len(nodes) > 1 or topology.nodes == 1):
            colour = COLOURS["shared"]
        box = Rectangle((0, row), length, rows, facecolor=colour, edgecolor="white", linewidth=line)
        axes.add_patch(box)
        box.set_clip_path(outline)
        row += rows
    key = 0
    for _, rows in share.keys[:-1] if line else ():
        key += rows
        (border,) = axes.plot([key, key], [0, length], color="white", linewidth=line)
        border.set_clip_path(outline)
    on = share.ranks
    where = f"rank {on[0]}" if len(on) == 1 else f"{len(on)} ranks"
    nodes_of = len({rank // topology.ranks_per_node for rank in on})
    where += f" of {nodes_of} nodes" if nodes_of > 1 else ""
    split = ", heads split" if any(len(ranks) > 1 for ranks, _ in share.queries) else ""
    shades = "colour: node, shade: rank" if topology.nodes > 1 else "colour: rank"
    page.text(left, begin - 0.25, f"the longest document: {length:,} of {tokens:,} tokens", 8, color="0.3")
    page.text(left, begin - 0.09, f"on {where}{split}", 8, color="0.3")
    page.text(left, begin + 0.07, f"who computes which tile; {shades}", 8, color="0.3")


def draw_spread(page: Sheet, timeline: Timeline, left: float, top: float, width: float) -> None:
    """How many tokens are of documents that one rank has alone, of a node, of several."""
    found, shades = spread(timeline.plan), ("forward", "near", "far")
    axes = page.axes(left, top, width, 0.16)
    axes.set_axis_off()
    axes.set(xlim=(0, max(timeline.plan.documents.tokens, 1)), ylim=(0, 1))
    begin = 0
    for row, ((name, (documents, tokens)), shade) in enumerate(zip(found.items(), shades, strict=True)):
        axes.barh(0.5, tokens, 1, begin, color=COLOURS[shade])
        begin += tokens
        words = f"\u25a0 {documents:,} document{'s' * (documents != 1)}, {tokens:,} tokens, {name}"
        page.text(left, top + 0.29 + 0.16 * row, words, 8, color=COLOURS[shade] if documents else "0.7")
