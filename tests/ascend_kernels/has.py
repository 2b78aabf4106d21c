"""What of Triton is here."""

from __future__ import annotations

from mindspeed_cp.ascend_kernels.launch import has_triton, uses_interpreter


def triton_runs() -> bool:
    """Whether kernels run in Triton's interpreter."""
    return has_triton() and uses_interpreter()
