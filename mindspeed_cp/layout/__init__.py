"""Which rank holds which tokens: documents, token spans, layouts and redistributions.  NumPy only."""

from mindspeed_cp.layout.documents import Documents, PackedTrajectories
from mindspeed_cp.layout.equal_tokens import equal_token_layout, padding_rows, sequence_parallel_layout
from mindspeed_cp.layout.layout import TOKEN_SPAN, Layout, contiguous, from_spans, row_zigzag, zigzag
from mindspeed_cp.layout.redistribution import Redistribution, Roll
from mindspeed_cp.layout.runs import (
    ROW_RUN,
    assign_to_least_loaded,
    intersect_runs,
    join_runs,
    ragged_arange,
    union_of_runs,
)
from mindspeed_cp.layout.trees import TreeTargets

__all__ = [
    "ROW_RUN",
    "TOKEN_SPAN",
    "Documents",
    "Layout",
    "PackedTrajectories",
    "Redistribution",
    "Roll",
    "TreeTargets",
    "assign_to_least_loaded",
    "contiguous",
    "equal_token_layout",
    "from_spans",
    "intersect_runs",
    "join_runs",
    "padding_rows",
    "ragged_arange",
    "row_zigzag",
    "sequence_parallel_layout",
    "union_of_runs",
    "zigzag",
]  # fmt: skip
