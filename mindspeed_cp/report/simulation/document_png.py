"""Documents of a simulated layer: the ranks that compute the longest one, and the number of ranks that share each."""

from __future__ import annotations

import colorsys
from typing import TYPE_CHECKING, Any

from mindspeed_cp.plan import Topology
from mindspeed_cp.report.png_canvas import TIMELINE_COLOURS, Canvas
from mindspeed_cp.report.polygons import clip_to_band
from mindspeed_cp.report.simulation.details import count_documents_by_spread, document_shares
from mindspeed_cp.simulate.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Documents in more runs than this have no lines between tiles, since lines would cover them.
LINED_RUN_LIMIT = 160


def node_rank_colour(rank: int, topology: Topology) -> tuple[float, float, float]:
    """Return a hue for each node and a lightness for each of its ranks; in one node a hue for each rank."""
    local, ranks_per_node = rank % topology.ranks_per_node, topology.ranks_per_node
    if topology.nodes == 1:
        return colorsys.hls_to_rgb(local / ranks_per_node, (0.42, 0.56)[local % 2], 0.58)
    hue = (205 / 360 + rank // ranks_per_node / topology.nodes) % 1
    return colorsys.hls_to_rgb(hue, 0.34 + 0.4 * local / max(ranks_per_node - 1, 1), 0.58)


def draw_longest_document(canvas: Canvas, axes: Axes, timeline: Timeline, left: float, begin: float) -> None:
    """Draw the attention matrix of the longest document, coloured by the ranks that compute it."""
    from matplotlib.patches import Polygon, Rectangle

    plan, topology = timeline.plan, timeline.plan.topology
    share, tokens = document_shares(plan, 1)[0], plan.documents.tokens
    length = int(plan.documents.lengths[share.doc])
    reach_left, reach_right = plan.attention.reach
    visible = clip_to_band((0, 0, length, length), -reach_left - 0.5, reach_right + 0.5)
    outline = Polygon(visible, closed=True, transform=axes.transData, facecolor="none")
    axes.set(xlim=(0, length), ylim=(length, 0))
    axes.set_axis_off()
    axes.add_patch(outline)
    row, line = 0, 0.4 if len(share.queries) <= LINED_RUN_LIMIT else 0.0
    for ranks, rows in share.queries:
        nodes = {rank // topology.ranks_per_node for rank in ranks}
        middle = ranks[0] - ranks[0] % topology.ranks_per_node + topology.ranks_per_node // 2
        colour: Any = node_rank_colour(ranks[0] if len(ranks) == 1 else middle, topology)
        if len(ranks) > 1 and (len(nodes) > 1 or topology.nodes == 1):
            colour = TIMELINE_COLOURS["shared"]
        box = Rectangle((0, row), length, rows, facecolor=colour, edgecolor="white", linewidth=line)
        axes.add_patch(box)
        box.set_clip_path(outline)
        row += rows
    key = 0
    for _, rows in share.keys[:-1] if line else ():
        key += rows
        (border,) = axes.plot([key, key], [0, length], color="white", linewidth=line)
        border.set_clip_path(outline)
    ranks_of_doc = share.ranks
    ranks_text = f"rank {ranks_of_doc[0]}" if len(ranks_of_doc) == 1 else f"{len(ranks_of_doc)} ranks"
    nodes_of = len({rank // topology.ranks_per_node for rank in ranks_of_doc})
    ranks_text += f" of {nodes_of} nodes" if nodes_of > 1 else ""
    split = ", heads split" if any(len(ranks) > 1 for ranks, _ in share.queries) else ""
    shades = "colour: node, shade: rank" if topology.nodes > 1 else "colour: rank"
    canvas.text(left, begin - 0.25, f"the longest document: {length:,} of {tokens:,} tokens", 8, color="0.3")
    canvas.text(left, begin - 0.09, f"on {ranks_text}{split}", 8, color="0.3")
    canvas.text(left, begin + 0.07, f"who computes which tile; {shades}", 8, color="0.3")


def draw_document_spread(canvas: Canvas, timeline: Timeline, left: float, top: float, width: float) -> None:
    """Draw the tokens of documents that are computed by one rank, by ranks of one node, and by ranks of several
    nodes."""
    counts, colours = count_documents_by_spread(timeline.plan), ("forward", "near", "far")
    axes = canvas.axes(left, top, width, 0.16)
    axes.set_axis_off()
    axes.set(xlim=(0, max(timeline.plan.documents.tokens, 1)), ylim=(0, 1))
    begin = 0
    for row, ((name, (documents, tokens)), shade) in enumerate(zip(counts.items(), colours, strict=True)):
        axes.barh(0.5, tokens, 1, begin, color=TIMELINE_COLOURS[shade])
        begin += tokens
        words = f"\u25a0 {documents:,} document{'s' * (documents != 1)}, {tokens:,} tokens, {name}"
        canvas.text(left, top + 0.29 + 0.16 * row, words, 8, color=TIMELINE_COLOURS[shade] if documents else "0.7")
