"""Who holds which tokens: documents, spans, layouts.  NumPy only."""

from mindspeed_cp.layout.build import contiguous, equal_tokens, from_spans, zigzag
from mindspeed_cp.layout.documents import Documents
from mindspeed_cp.layout.layout import SPAN, Layout, Span
from mindspeed_cp.layout.redistribution import PART, PART_RUN, Redistribution
from mindspeed_cp.layout.remap import (
    FLOW,
    OBJECTIVES,
    Flows,
    equal_token_flows,
    equal_token_layout,
    in_shares,
    padding_rows,
)
from mindspeed_cp.layout.runs import expand, joined, merged, overlaps

__all__ = [
    "FLOW", "OBJECTIVES", "PART", "PART_RUN", "SPAN", "Documents", "Flows", "Layout", "Redistribution", "Span",
    "contiguous", "equal_token_flows", "equal_token_layout", "equal_tokens", "expand", "from_spans", "in_shares",
    "joined", "merged", "overlaps", "padding_rows", "zigzag",
]  # fmt: skip
