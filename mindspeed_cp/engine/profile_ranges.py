"""Names of what the engine does in a profile of torch.profiler: kernels, messages and waits."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd import _profiler_enabled
from torch.profiler import record_function

_NO_RANGE = nullcontext()


def profile_range(name: str) -> AbstractContextManager[Any]:
    """Show what the block runs under a name; without a profiler, nothing is done."""
    return record_function(f"context parallel: {name}") if _profiler_enabled() else _NO_RANGE
