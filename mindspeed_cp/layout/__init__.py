"""Who holds which tokens: documents, spans, layouts.  NumPy only."""

from mindspeed_cp.layout.build import contiguous, equal_tokens, from_spans, zigzag
from mindspeed_cp.layout.documents import Documents
from mindspeed_cp.layout.layout import SPAN, Layout, Span
from mindspeed_cp.layout.redistribution import PART, PART_RUN, Redistribution
from mindspeed_cp.layout.remap import FLOW, Flows, equal_token_flows, equal_token_layout
from mindspeed_cp.layout.runs import expand, joined, merged, overlaps

__all__ = [
    "FLOW", "PART", "PART_RUN", "SPAN", "Documents", "Flows", "Layout", "Redistribution", "Span",
    "contiguous", "equal_token_flows", "equal_token_layout", "equal_tokens", "expand", "from_spans", "joined",
    "merged", "overlaps", "zigzag",
]  # fmt: skip
