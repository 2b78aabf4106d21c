"""Who holds which tokens: documents, spans, layouts.  NumPy only."""

from mindspeed_cp.layout.build import contiguous, equal_tokens, from_spans, zigzag
from mindspeed_cp.layout.documents import Documents
from mindspeed_cp.layout.layout import SPAN, Layout, Span, expand

__all__ = ["SPAN", "Documents", "Layout", "Span", "contiguous", "equal_tokens", "expand", "from_spans", "zigzag"]
