"""A small batch and attention for every cell of the table of capabilities."""

from __future__ import annotations

from mindspeed_cp import AttentionConfig, Documents
from tools.capabilities import Cell

QUERIES = {
    "packed": Documents([37, 0, 5, 61, 2]),
    "one per row": Documents([29, 29]),
    "trees": Documents([37, 0, 5, 61, 2], [-1, 0, 0, 2, -1]),
    "blocks": Documents([37, 0, 5, 61, 2], None, [(3, 20), (37, 42), (60, 90)]),
}
OTHER_KEYS = {"one per row": Documents([17, 17])}


def example(cell: Cell) -> tuple[Documents, Documents | None, AttentionConfig]:
    """Documents, documents of the keys (None: the same), and attention in the cell; lengths and heads that divide by
    nothing."""
    window = {"causal": (11, 0), "full": (7, 4)}[cell.mask] if cell.window == "sliding" else None
    attention = AttentionConfig(
        heads=6,
        kv_heads=2 if cell.kv_heads == "grouped" else 6,
        head_dim=12,
        head_dim_v=8 if cell.widths == "unequal" else 12,
        mask=cell.mask,
        window=window,
        alibi=cell.bias == "alibi",
        dropout=0.2 if cell.dropout == "some" else 0.0,
    )
    keys = OTHER_KEYS.get(cell.documents, Documents([12, 4, 0, 70, 9])) if cell.keys == "other" else None
    return QUERIES[cell.documents], keys, attention
